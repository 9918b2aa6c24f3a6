"""Scatters between nodes: batches of all sizes, interrupts, and batches that change after the call."""

from __future__ import annotations

import mmap
import random
from pathlib import Path
from typing import Any

import torch
from support.distributed.rank_processes import Job, Line, on_nodes, outcome, run_job
from support.scatter.batches import same

import tundish as td

MIB = 1 << 20


def batch_of(number: int, rank: int) -> Any:
    """A batch of a random structure and size, by its number and rank."""
    random.seed(1000 * number + rank)
    sizes = random.choice(
        [[8] * random.randint(1, 70), [MIB // 8 - 1, 8], [MIB // 8], [random.randrange(100)], [], [0, 3]]
    )
    tensors = [torch.full((size,), number + rank, dtype=torch.int64) for size in sizes]
    return {"number": number, "tensors": tensors, "said": "x" * random.choice([0, 10, 5000])}


def a_step(rank: int, number: int) -> None:
    given = [batch_of(number, other) for other in range(3)] if rank == 0 else None
    mine = td.scatter_batch(given)
    assert same(mine, batch_of(number, rank)), number


def batches_of_all_sizes(rank: int, line: Line) -> None:
    on_nodes(rank, 1)
    for number in range(200):
        a_step(rank, number)


def test_batches_of_all_sizes_arrive_whole_in_any_order(tmp_path: Path) -> None:
    run_job(batches_of_all_sizes, 3, tmp_path)


def small_ones_kept(rank: int, line: Line) -> None:
    on_nodes(rank, 1)
    kept = []
    for number in range(60):
        # A large batch before each small one leaves a large buffer.
        large = {"x": [torch.full((MIB // 16,), number + part) for part in range(16)]}
        for batch in (large, {"x": torch.full((3,), number)}):
            mine = td.scatter_batch([batch] * 2 if rank == 0 else None)
            assert same(mine, batch)
        kept.append(mine)
    assert all(mine["x"].tolist() == [number] * 3 for number, mine in enumerate(kept))
    line.say(size_in_mib())


def size_in_mib() -> float:
    """The size of this process's address space."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * mmap.PAGESIZE / MIB


def test_small_batches_that_are_kept_hold_no_buffers_of_large_ones(tmp_path: Path) -> None:
    with Job(small_ones_kept, 2, tmp_path) as job:
        source, receiver = (size for (size,) in job.hear_all())
        job.expect_end()
    # 60 of them would be 480 MiB.
    assert receiver < source + 200, (source, receiver)


def changed_on_its_way(rank: int, line: Line) -> None:
    on_nodes(rank, 1)
    given = {"x": torch.zeros(MIB), "small": torch.zeros(3)}
    assert same(td.scatter_batch([given] * 3 if rank == 0 else None), given)
    line.say("ready")
    if rank != 0:
        # Until after the source's timeout.
        line.hear()
    kind, text, lost = outcome(
        lambda: line.say("came", td.scatter_batch([given] * 3 if rank == 0 else None)["x"].sum().item())
    )
    for tensor in given.values():
        tensor.fill_(1.0)
    line.say(kind, text, lost)
    if rank == 0:
        # A source that ends takes what it has not sent with it.
        line.hear()


def test_a_batch_that_the_source_changes_after_its_timeout_arrives_unchanged(tmp_path: Path) -> None:
    with Job(changed_on_its_way, 3, tmp_path, seconds=2.0) as job:
        assert job.hear_all() == [("ready",)] * 3
        kind, text, _ = job.hear(0)
        assert kind == "TimedOutError" and "rank 1 did not come within 2 s" in text, (kind, text)
        for rank in (1, 2):
            job.tell(rank)
            assert job.hear(rank) == ("came", 0.0)
            assert job.hear(rank)[0] == ""
        job.tell(0)
        job.expect_end()


def test_a_batch_that_an_interrupted_source_changes_does_not_arrive_changed(tmp_path: Path) -> None:
    with Job(changed_on_its_way, 3, tmp_path) as job:
        assert job.hear_all() == [("ready",)] * 3
        # While it waits for rank 1.
        job.interrupt(0)
        kind, text, _ = job.hear(0)
        assert kind == "KeyboardInterrupt", text
        for rank in (1, 2):
            job.tell(rank)
            came = job.hear(rank)
            # Either it was sent whole before, or the source says that it left.
            if came[0] == "came":
                assert came == ("came", 0.0)
                came = job.hear(rank)
                assert came[0] == ""
            else:
                assert (came[0], came[2]) == ("PeerFailedError", 0), came
        job.tell(0)
        job.expect_end()
