"""`stats()` of a scatter and of a loader on two ranks: counts, bytes and seconds."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.distributed.rank_processes import Job, Line, on_nodes
from support.waiting import until

import tundish as td

# Values of a batch, which fill whole pages.
NUMBERS = 1 << 16
BYTES = 4 * NUMBERS
SCATTER = {
    "source",
    "ranks",
    "shared_memory_ranks",
    "gloo_ranks",
    "device_ranks",
    "steps",
    "batches",
    "sent_bytes",
    "waiting_seconds",
    "in_use_bytes",
    "cached_bytes",
    "escaped_bytes",
}
LOADER = SCATTER | {"reading_seconds", "next_seconds", "ready_steps", "ready_bytes"}
# By the number of ranks of a node, the counts of ranks on the other end.
COUNTS = {2: (1, 0, 0), 1: (0, 1, 0)}


def batch(number: int) -> dict[str, Any]:
    return {"x": torch.full((NUMBERS,), number, dtype=torch.int32), "n": number}


def a_few_steps(rank: int, line: Line) -> None:
    on_nodes(rank, line.hear())
    assert td.scatter.stats() == []
    kept = [td.scatter_batch([batch(number)] * 2 if rank == 0 else None) for number in range(5)]
    # Steps without a batch, without one for a rank, and without tensors.
    td.scatter_batch(None)
    td.scatter_batch([batch(0), None] if rank == 0 else None)
    td.scatter_batch(["a", "b"] if rank == 0 else None)
    if rank == 0:
        line.hear()
    else:
        line.say("waits")
    [before] = td.scatter.stats()
    begin = time.monotonic()
    td.scatter_batch([None, None] if rank == 0 else None)
    seconds = time.monotonic() - begin
    [found] = td.scatter.stats()
    line.say(found, found["waiting_seconds"] - before["waiting_seconds"], seconds)
    assert [mine["n"] for mine in kept] == list(range(5))
    # The caller may change the result.
    del found["ranks"]
    assert td.scatter.stats()[0]["ranks"] == 2
    line.hear()


@pytest.mark.parametrize("node", [2, 1])
def test_a_scatter_counts_steps_batches_and_bytes(node: int, tmp_path: Path) -> None:
    with Job(a_few_steps, 2, tmp_path) as job:
        job.tell_all(node)
        assert job.hear(1) == ("waits",)
        time.sleep(0.5)
        job.tell(0)
        for rank, (found, waited, seconds) in enumerate(job.hear_all()):
            assert found.keys() == SCATTER
            assert (found["source"], found["ranks"]) == (0, 2)
            assert (found["shared_memory_ranks"], found["gloo_ranks"], found["device_ranks"]) == COUNTS[node]
            assert found["steps"] == 9
            # The source's own batch is not sent.
            assert found["batches"] == 6
            assert found["sent_bytes"] == (5 * BYTES if rank == 0 else 0)
            held = found["in_use_bytes"] + found["cached_bytes"] + found["escaped_bytes"]
            if rank == 0 and node == 2:
                # The receiver has kept all of them.
                assert 5 * BYTES <= held < 10 * BYTES
            else:
                assert held == 0
            # Only the wait for a message counts.
            assert 0 <= waited <= seconds
            assert rank == 0 or waited > 0
        job.tell_all()
        job.expect_end()


# Seconds that a slow loader takes for a batch.
READING = 0.002


def a_loader_ahead(rank: int, line: Line) -> None:
    node, prefetch = line.hear()
    on_nodes(rank, node)

    def given() -> Iterator[Any]:
        for number in range(16):
            time.sleep(READING)
            yield batch(number)

    with td.DispatchLoader(given() if rank == 0 else None, prefetch=prefetch) as loader:
        line.say(loader.stats())
        steps = iter(loader)
        for number in range(3):
            assert next(steps)["n"] == 2 * number + rank
        until(lambda: loader.stats()["ready_steps"] >= prefetch, "nothing is prefetched")
        dist.barrier()
        line.say(loader.stats())
        line.hear()
        assert [mine["n"] for mine in steps] == list(range(6 + rank, 16, 2))
        line.say(loader.stats())
        line.hear()


@pytest.mark.parametrize(("node", "prefetch"), [(2, 0), (2, 2), (1, 1)])
def test_a_loader_counts_steps_that_are_handed_out_and_prefetched(
    node: int, prefetch: int, tmp_path: Path
) -> None:
    with Job(a_loader_ahead, 2, tmp_path) as job:
        job.tell_all((node, prefetch))
        for (found,) in job.hear_all():
            counts = (
                "steps",
                "batches",
                "sent_bytes",
                "reading_seconds",
                "next_seconds",
                "ready_steps",
                "ready_bytes",
            )
            assert {found[count] for count in counts} == {0}
        for rank, (found,) in enumerate(job.hear_all()):
            assert found.keys() == LOADER
            assert (found["shared_memory_ranks"], found["gloo_ranks"], found["device_ranks"]) == COUNTS[node]
            assert (found["steps"], found["ready_steps"]) == (3, prefetch)
            assert found["ready_bytes"] == prefetch * BYTES
            assert found["batches"] == 3 + prefetch
            assert found["sent_bytes"] == ((3 + prefetch) * BYTES if rank == 0 else 0)
            assert found["next_seconds"] > 0
            if rank == 0:
                assert found["reading_seconds"] >= 2 * (3 + prefetch) * READING
            else:
                assert found["reading_seconds"] == 0
            job.tell(rank)
        for rank, (found,) in enumerate(job.hear_all()):
            assert (found["steps"], found["ready_steps"], found["ready_bytes"]) == (8, 0, 0)
            assert (found["batches"], found["sent_bytes"]) == (8, 0 if rank else 8 * BYTES)
            assert (found["reading_seconds"] >= 16 * READING) == (rank == 0)
            job.tell(rank)
        job.expect_end()


def a_loader_bounded(rank: int, line: Line) -> None:
    on_nodes(rank, line.hear())
    given = [batch(number) for number in range(40)] if rank == 0 else None
    with td.DispatchLoader(given, prefetch=15, prefetch_bytes=3 * BYTES) as loader:
        steps = iter(loader)
        for number in range(2):
            assert next(steps)["n"] == 2 * number + rank
        until(lambda: loader.stats()["ready_bytes"] >= 3 * BYTES, "nothing is prefetched")
        # Time in which more would be prefetched.
        time.sleep(0.05)
        line.say(loader.stats())
        line.hear()
        assert [mine["n"] for mine in steps] == list(range(4 + rank, 40, 2))


@pytest.mark.parametrize("node", [2, 1])
def test_prefetched_bytes_are_bounded_on_every_rank(node: int, tmp_path: Path) -> None:
    with Job(a_loader_bounded, 2, tmp_path) as job:
        job.tell_all(node)
        for found in job.hear_all():
            assert [(one["ready_steps"], one["ready_bytes"]) for one in found] == [(3, 3 * BYTES)]
        job.tell_all()
        job.expect_end()


def logged_epochs(rank: int, line: Line) -> None:
    said: list[str] = []
    note = logging.Handler(logging.INFO)
    note.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tundish.scatter")
    logger.setLevel(logging.INFO)
    logger.addHandler(note)
    with td.DispatchLoader([batch(number) for number in range(6)] if rank == 0 else None) as loader:
        for _ in range(2):
            next(iter(loader))
        assert len(list(loader)) == len(list(loader)) == 3
        line.say(said, loader.stats()["next_seconds"])


def test_the_source_logs_each_whole_epoch_and_how_long_training_waited(tmp_path: Path) -> None:
    with Job(logged_epochs, 2, tmp_path) as job:
        (said, waited), (other, _) = job.hear_all()
        assert other == [] and len(said) == 2
        found = [
            re.fullmatch(r"epoch (\d) is over: 3 steps in (.+) s, of which .* waited (.+) s for .*", one)
            for one in said
        ]
        assert [one and one[1] for one in found] == ["0", "1"]
        assert all(one and 0 <= float(one[3]) <= float(one[2]) for one in found)
        assert sum(float(one[3]) for one in found if one) <= waited + 0.1
        job.expect_end()
