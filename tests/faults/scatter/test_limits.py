"""Scatters without enough descriptors or memory."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.distributed.rank_processes import Job, Line, on_nodes, outcome, run_job
from support.waiting import NOTICED, PATIENCE

import tundish as td


def keep_every_batch(rank: int, line: Line) -> None:
    node, steps, shapes = line.hear()
    on_nodes(rank, node)

    td.scatter_batch([None, None] if rank == 0 else None)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, limits[1]))
    kept = []
    for number in range(steps):
        given = [None, {"x": [torch.full((size,), number) for size in shapes], "n": number}]
        kept.append(td.scatter_batch(given if rank == 0 else None))
    for number, batch in enumerate(kept if rank == 1 else []):
        assert batch["n"] == number
        assert [bool((x == number).all()) for x in batch["x"]] == [True] * len(shapes), number


@pytest.mark.parametrize("node", [2, 1])
@pytest.mark.parametrize(
    ("steps", "shapes"),
    [(700, [5000]), (300, [50_000]), (300, [10] * 100)],
    ids=["small", "large", "many"],
)
def test_a_receiver_that_keeps_every_batch_does_not_run_out_of_descriptors(
    node: int, steps: int, shapes: list[int], tmp_path: Path
) -> None:
    run_job(keep_every_batch, 2, tmp_path, (node, steps, shapes))


@contextlib.contextmanager
def out_of_descriptors() -> Iterator[None]:
    """A block in which this process can open no file."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 8, limits[1]))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)


def meets_without_descriptors(rank: int, line: Line) -> None:
    node, victim = line.hear()
    on_nodes(rank, node)
    # Opens what votes need, and imports all modules.
    td.scatter_batch([None] * 3 if rank == 2 else None, src=2)
    with out_of_descriptors() if rank == victim else contextlib.nullcontext():
        begin = time.monotonic()
        line.say(*outcome(lambda: td.scatter_batch([1, 2, 3] if rank == 0 else None)))
        assert time.monotonic() - begin < NOTICED
    assert td.scatter_batch([1, 2, 3] if rank == 0 else None) == rank + 1


@pytest.mark.parametrize("node", [3, 1])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_without_descriptors_for_the_rendezvous_is_named_by_all(
    node: int, victim: int, tmp_path: Path
) -> None:
    with Job(meets_without_descriptors, 3, tmp_path) as job:
        job.tell_all((node, victim))
        for rank, (kind, text, lost) in enumerate(job.hear_all()):
            assert "Too many open files" in text
            assert (kind, lost) == (("OSError", None) if rank == victim else ("PeerFailedError", victim))
        job.expect_end()


@contextlib.contextmanager
def out_of_addresses() -> Iterator[None]:
    """A block in which this process can map hardly any memory."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def shared_without_room(rank: int, line: Line) -> None:
    lack = {"descriptors": out_of_descriptors, "addresses": out_of_addresses}[line.hear()]

    def a_step(number: int) -> None:
        # The ranks of a node read one object from the same memory.
        given = [{"x": torch.full(((1 << 25) + number,), number)}] * 3 if rank == 0 else None
        mine = td.scatter_batch(given)
        assert len(mine["x"]) == (1 << 25) + number and (mine["x"] == number).all()

    td.scatter_batch([None] * 3 if rank == 0 else None)
    dist.barrier()
    with lack() if rank == 1 else contextlib.nullcontext():
        line.say(*outcome(lambda: a_step(1)))
    # The next message comes only now.
    line.hear()
    a_step(2)


@pytest.mark.parametrize(
    ("lack", "said"), [("descriptors", "Too many open files"), ("addresses", "Cannot allocate memory")]
)
def test_a_receiver_without_memory_for_a_shared_batch_says_so_in_its_step(
    lack: str, said: str, tmp_path: Path
) -> None:
    with Job(shared_without_room, 3, tmp_path) as job:
        job.tell_all(lack)
        kind, text, _ = job.hear(1)
        assert kind in ("StorageError", "OutOfMemoryError") and said in text, text
        assert job.hear_all(0, 2) == [("", "", None)] * 2
        job.tell_all()
        job.expect_end()


def larger_than_memory() -> Any:
    """Every other byte of more memory than the machine has. Nothing touches it."""
    # MAP_NORESERVE, which Python names since 3.13.
    no_reserve = 0x4000
    promised = mmap.mmap(-1, 1 << 42, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(promised, dtype=torch.uint8)[::2]


def too_large(rank: int, line: Line) -> None:
    on_nodes(rank, line.hear())
    for number in range(3):
        ones = {"x": torch.full((3,), number)}
        given = [ones, {**ones, "large": larger_than_memory()}, ones] if number == 1 else [ones] * 3
        kind, text, lost = outcome(
            lambda given=given: line.say(td.scatter_batch(given if rank == 0 else None)["x"].tolist())  # type: ignore[misc]
        )
        if number != 1:
            assert kind == "", text
        elif rank == 0:
            assert kind == "OutOfMemoryError", text
        elif rank == 1:
            assert (kind, lost) == ("PeerFailedError", 0) and "OutOfMemoryError" in text, text


@pytest.mark.parametrize("node", [3, 1])
def test_a_batch_larger_than_memory_fails_on_the_source(node: int, tmp_path: Path) -> None:
    with Job(too_large, 3, tmp_path) as job:
        job.tell_all(node)
        for number in (0, 2):
            assert [job.hear(0), job.hear(1)] == [([number] * 3,)] * 2
        job.expect_end(0, 1)


def without_room_for_it(rank: int, line: Line) -> None:
    on_nodes(rank, line.hear())
    batch = {"x": torch.ones(1 << 26)} if rank == 0 else None
    td.scatter_batch([1, 2] if rank == 0 else None)
    with out_of_addresses() if rank == 1 else contextlib.nullcontext():
        line.say(*outcome(lambda: td.scatter_batch([None, batch] if rank == 0 else None)))
    line.say(*outcome(lambda: line.say(td.scatter_batch([3, 4] if rank == 0 else None))))
    line.hear()


def test_a_receiver_without_memory_for_a_batch_over_gloo_closes_the_scatter(tmp_path: Path) -> None:
    with Job(without_room_for_it, 2, tmp_path, seconds=PATIENCE * 2) as job:
        job.tell_all(1)
        assert job.hear(1)[0] in ("OutOfMemoryError", "StorageError")
        kind, text, lost = job.hear(1)
        assert (kind, lost) == ("PeerFailedError", 1) and "could not read an earlier batch" in text, text
        # The source does not wait for it.
        for _ in range(2):
            kind, text, lost = job.hear(0)
            assert (kind, lost) == ("PeerFailedError", 1), text


def test_a_receiver_without_memory_for_a_batch_of_its_node_gets_the_next_one(tmp_path: Path) -> None:
    with Job(without_room_for_it, 2, tmp_path) as job:
        job.tell_all(2)
        assert job.hear(1)[0] in ("OutOfMemoryError", "StorageError")
        assert job.hear(1) == (4,)


def opens_nothing(rank: int, line: Line) -> None:
    size = line.hear()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def a_step(number: int) -> Any:
        return td.scatter_batch([None, torch.full((size,), number)] if rank == 0 else None)

    def held() -> int:
        [found] = td.scatter.stats()
        return found["in_use_bytes"] + found["cached_bytes"] + found["escaped_bytes"]

    a_step(0)
    dist.barrier()
    if rank == 1:
        # The next descriptor would be the first beyond the limit.
        with open("/dev/null", "rb") as probe:
            resource.setrlimit(resource.RLIMIT_NOFILE, (probe.fileno(), limits[1]))
    found = []
    for number in range(1, 41):
        kind, text, _ = outcome(lambda number=number: a_step(number))  # type: ignore[misc]
        assert not kind if rank == 0 else kind == "StorageError", text
        dist.barrier()
        found.append(held())
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert (a_step(41) == 41).all()
    else:
        a_step(41)
        line.say(found[9], found[-1])


@pytest.mark.parametrize("size", [10_000, 100_000])
def test_memory_that_the_receiver_could_not_open_is_used_again(size: int, tmp_path: Path) -> None:
    with Job(opens_nothing, 2, tmp_path) as job:
        job.tell_all(size)
        before, after = job.hear(0)
        # Thirty more batches.
        assert after - before < 4 * 8 * size
        job.expect_end()


def shared_with_one_that_stays_away(rank: int, line: Line) -> None:
    limit = timedelta(seconds=2)
    data = [dist.new_group([column, column + 2], timeout=limit) for column in range(2)][rank % 2]
    tensor = [dist.new_group([row, row + 1], timeout=limit) for row in (0, 2)][rank // 2]

    def a_grid_step() -> None:
        given = [{"x": torch.ones(1 << 18)}] * 2 if rank == 0 else None
        td.scatter_batch(given, group=data, replicate=tensor)

    def held() -> int:
        [found] = td.scatter.stats(data)
        return found["in_use_bytes"] + found["cached_bytes"] + found["escaped_bytes"]

    a_grid_step()
    if rank == 3:
        line.hear()
    elif rank == 0:
        while not outcome(a_grid_step)[0]:
            pass
        found = []
        for _ in range(3):
            assert outcome(a_grid_step)[0] == "TimedOutError"
            found.append(held())
        line.say(found[-1] - found[0])
    else:
        while outcome(a_grid_step)[0] != "PeerFailedError":
            pass


def test_the_memory_of_a_shared_batch_does_not_wait_for_a_rank_that_stays_away(tmp_path: Path) -> None:
    with Job(shared_with_one_that_stays_away, 4, tmp_path) as job:
        (grown,) = job.hear(0)
        assert grown < 1 << 20
        job.tell(3)


def shares_of_a_node(rank: int, line: Line) -> None:
    import tundish.scatter.rendezvous as rendezvous

    on_nodes(rank, line.hear())
    shares = []
    memory_limit = rendezvous.memory_limit

    def recorded(ranks: int) -> int:
        shares.append(ranks)
        return memory_limit(ranks)

    rendezvous.memory_limit = recorded  # type: ignore[assignment]
    td.scatter_batch([None] * 4 if rank == 0 else None)
    line.say(shares)


@pytest.mark.parametrize(("node", "expected"), [(4, [4]), (2, [2]), (1, [1])])
def test_the_ranks_of_a_node_share_its_memory(node: int, expected: list[int], tmp_path: Path) -> None:
    with Job(shares_of_a_node, 4, tmp_path) as job:
        job.tell_all(node)
        # The other ranks of the source's node send nothing.
        for rank in (0, *range(node, 4)):
            assert job.hear(rank) == (expected,), rank
        job.expect_end(0, *range(node, 4))
