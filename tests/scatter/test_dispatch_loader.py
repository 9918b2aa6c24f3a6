"""`DispatchLoader`: steps, tails, states and meshes, through shared memory and over gloo."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.distributed.rank_processes import Job, Line, on_nodes, outcome, run_job
from support.scatter.batches import KINDS, same
from torch.utils.data import DataLoader, DistributedSampler

import tundish as td


def batch(number: int) -> dict[str, Any]:
    return {"x": torch.full((number % 3 + 1, 100), number), "n": number}


class Numbered:
    """Batches that hold their numbers, 0 to count - 1."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(batch, range(self.count))

    def __len__(self) -> int:
        return self.count


def number_of(mine: dict[str, Any]) -> int:
    assert mine["x"].shape == (mine["n"] % 3 + 1, 100) and bool((mine["x"] == mine["n"]).all())
    return int(mine["n"])


def expected(count: int, world: int, tail: str, rank: int) -> list[tuple[int | None, bool]]:
    """Number of each batch that a rank gets, and whether it is padding."""
    steps: list[tuple[int | None, bool]] = [
        (first + rank, False) for first in range(0, count - world + 1, world)
    ]
    rest = count % world
    if rest and tail != "drop":
        first = count - rest
        if rank < rest:
            steps.append((first + rank, False))
        elif tail == "short":
            steps.append((None, False))
        else:
            steps.append((first + (rank - rest) % rest, True))
    return steps


def every_tail(rank: int, line: Line) -> None:
    world = dist.get_world_size()
    on_nodes(rank, line.hear())
    cases = [
        (0, tail, count, 1)
        for tail in ("drop", "pad", "short")
        for count in (0, 1, world, 3 * world + 1, 4 * world - 1)
    ]
    cases += [(0, tail, 3 * world + 1, prefetch) for tail in ("pad", "short") for prefetch in (0, 3)]
    cases += [(world - 1, "pad", 3 * world + 1, prefetch) for prefetch in (0, 2)]
    for case in cases:
        src, tail, count, prefetch = case
        inner = Numbered(count) if rank == src else None
        with td.DispatchLoader(inner, src=src, tail=tail, prefetch=prefetch) as loader:  # type: ignore[arg-type]
            wanted = expected(count, world, tail, rank)
            assert len(loader) == len(wanted), case
            for _ in range(2):
                found = [(None if mine is None else number_of(mine), loader.is_padding) for mine in loader]
                assert found == wanted, case


@pytest.mark.parametrize(("world", "node"), [(2, 2), (3, 1), (4, 2)])
def test_every_rank_gets_its_batches_to_the_end(world: int, node: int, tmp_path: Path) -> None:
    run_job(every_tail, world, tmp_path, node)


def kept_batches(rank: int, line: Line) -> None:
    on_nodes(rank, line.hear())
    world = dist.get_world_size()
    kinds = list(KINDS.values())
    steps = 2 * len(kinds)

    def given() -> Iterator[Any]:
        for number in range(steps * world):
            yield kinds[number // world % len(kinds)](number)

    with td.DispatchLoader(given() if rank == 0 else None, prefetch=2) as loader:
        kept = list(loader)
        assert len(kept) == steps
        for number, mine in enumerate(kept):
            assert same(mine, kinds[number % len(kinds)](number * world + rank)), number


@pytest.mark.parametrize("node", [3, 2])
def test_batches_that_are_kept_do_not_change(node: int, tmp_path: Path) -> None:
    run_job(kept_batches, 3, tmp_path, node)


class Stateful:
    """A loader with a state of its own, which counts the batches that were read."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.at = 0
        self.read = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.at < self.count:
            self.at += 1
            self.read += 1
            yield batch(self.at - 1)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def shuffled(count: int) -> DataLoader[Any]:
    data = [batch(number) for number in range(count)]
    return DataLoader(data, batch_size=None, shuffle=True, generator=torch.Generator().manual_seed(11))


def loader_for(kind: str, rank: int) -> td.DispatchLoader[Any]:
    inner: Any = None
    if rank == 0:
        inner = {"plain": Numbered, "stateful": Stateful, "shuffled": shuffled}[kind](17)
    return td.DispatchLoader(inner, tail="short", prefetch=2)


def stopped_in_the_middle(rank: int, line: Line) -> None:
    kind, steps = line.hear()
    found = []
    with loader_for(kind, rank) as loader:
        batches = iter(loader)
        found.extend(number_of(next(batches)) for _ in range(steps))
        line.say(found, loader.state_dict())
        line.hear()


def resumed(rank: int, line: Line) -> None:
    kind, state = line.hear()
    with loader_for(kind, rank) as loader:
        loader.load_state_dict(state)
        line.say([None if mine is None else number_of(mine) for mine in loader])
        if kind == "stateful" and rank == 0 and state["loader"] is not None:
            # It resumed from its own state, so no batch was read to be left out.
            assert loader._loader.read == 17 - state["batches"]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["plain", "stateful", "shuffled"])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_a_resumed_epoch_has_exactly_the_remaining_batches(
    kind: str, before: int, after: int, tmp_path: Path
) -> None:
    order = [number_of(one) for one in shuffled(17)] if kind == "shuffled" else list(range(17))
    steps = 3
    (tmp_path / "before").mkdir()
    with Job(stopped_in_the_middle, before, tmp_path / "before") as job:
        job.tell_all((kind, steps))
        told = job.hear_all()
        job.tell_all()
        job.expect_end()
    assert [numbers for numbers, _ in told] == [
        order[rank : before * steps : before] for rank in range(before)
    ]
    states = [state for _, state in told]
    assert {state["batches"] for state in states} == {before * steps}
    # The state of any rank resumes all.
    for state in states:
        with Job(resumed, after, tmp_path) as job:
            job.tell_all((kind, state))
            left = job.hear_all()
            job.expect_end()
        rest = order[before * steps :]
        rest += [None] * (-len(rest) % after)
        assert [numbers for (numbers,) in left] == [rest[rank::after] for rank in range(after)]
        if kind != "stateful":
            break


def several_loaders(rank: int, line: Line) -> None:
    world = dist.get_world_size()
    pairs = dist.new_group([0, 2]) if rank % 2 == 0 else None
    one = td.DispatchLoader(Numbered(10 * world) if rank == 0 else None)
    two = td.DispatchLoader(Numbered(5 * world) if rank == 1 else None, src=1, prefetch=3)
    three = None
    if pairs is not None:
        three = td.DispatchLoader(Numbered(20) if rank == 2 else None, src=1, group=pairs)
    seconds = iter(two)
    found = []
    for number, mine in enumerate(one):
        assert number_of(mine) == number * world + rank
        if number % 2:
            found.append(number_of(next(seconds)))
        if three is not None and number == 4:
            assert [number_of(other) for other in three] == list(range(rank // 2, 20, 2))
    assert found == list(range(rank, 5 * world, world))
    assert [*seconds] == []
    for loader in (one, two, three):
        if loader is not None:
            loader.close()


def test_several_loaders_at_once(tmp_path: Path) -> None:
    run_job(several_loaders, 3, tmp_path)


def on_a_mesh(rank: int, line: Line) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    on_nodes(rank, line.hear())
    inner = Numbered(9) if rank == 0 else None
    with td.DispatchLoader(inner, group=mesh["data"], replicate=mesh["tensor"], tail="pad") as loader:
        assert len(loader) == 5
        found = [(number_of(mine), loader.is_padding) for mine in loader]
        row = rank // 2
        assert found == expected(9, 2, "pad", row)
        assert loader.state_dict()["batches"] == 0 and loader.epoch == 1


@pytest.mark.parametrize("node", [4, 2, 1])
def test_ranks_along_another_dimension_get_the_same_batches(node: int, tmp_path: Path) -> None:
    run_job(on_a_mesh, 4, tmp_path, node)


def source_closes_first(rank: int, line: Line) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    group, replicate, row = (mesh["data"], mesh["tensor"], rank // 2) if line.hear() else (None, None, rank)
    width = 2 if group else 4
    inner = Numbered(2 * width) if rank == 0 else None
    with td.DispatchLoader(inner, group=group, replicate=replicate, prefetch=2) as loader:
        if rank:
            line.hear()
        assert [number_of(mine) for mine in loader] == [row, row + width]


@pytest.mark.parametrize("is_replicated", [True, False])
def test_batches_arrive_although_the_source_has_closed(is_replicated: bool, tmp_path: Path) -> None:
    with Job(source_closes_first, 4, tmp_path) as job:
        job.tell_all(is_replicated)
        assert job.hear(0) == ("end of scenario",)
        job.tell_all(None, range(1, 4))
        job.expect_end(1, 2, 3)


def what_is_refused(rank: int, line: Line) -> None:
    data = list(range(8))

    def made(inner: Any, **options: Any) -> tuple[str, str, Any]:
        return outcome(lambda: td.DispatchLoader(inner if rank == 0 else None, **options))

    sharded = DataLoader(data, sampler=DistributedSampler(data, 2, rank))  # type: ignore[arg-type]
    plan = td.pack([5] * 40, 10, seed=1)
    packs = DataLoader(data, batch_sampler=td.PackedBatchSampler(plan, 1, 0, 2))
    for inner, said in (
        (sharded, r"one of 2 parts of the data (its sampler is a DistributedSampler with num_replicas=2)"),
        (packs, "(its batch_sampler is a PackedBatchSampler with world_size=2)"),
        (None, "the source's loader is None"),
    ):
        kind, text, _ = made(inner)
        assert said in text, text
        # Without `replicate`, each group of a mesh has its own source.
        assert inner is not None or "replicate=" in text
        wanted = "InvalidTypeError" if inner is None else "InvalidInputError"
        assert kind == (wanted if rank == 0 else "PeerFailedError")
    # All ranks hear of a bad argument on one.
    assert "prefetch is -1" in made([1], prefetch=-1 if rank == 1 else 1)[1]
    assert "only the source has a loader" in outcome(lambda: td.DispatchLoader([1]))[1]
    kinds = outcome(lambda: td.DispatchLoader([1] if rank == 0 else None, tail="pad" if rank else "drop"))
    assert "tail" in kinds[1]
    # The source would wait without end for a rank that prefetches less.
    unlike = outcome(lambda: td.DispatchLoader([1] if rank == 0 else None, prefetch_bytes=1 << rank))
    assert "prefetch_bytes is" in unlike[1] and "; give all ranks the same" in unlike[1]
    unlike = outcome(lambda: td.DispatchLoader([1] if rank == 0 else None, skip_batches=rank))
    assert "skip_batches is" in unlike[1] and "; give all ranks the same" in unlike[1]
    # And the next one works.
    with td.DispatchLoader(Numbered(4) if rank == 0 else None) as loader:
        assert [number_of(mine) for mine in loader] == [rank, rank + 2]
        state = {**loader.state_dict(), "epoch": 5, "batches": 2}
        if rank == 1:
            # On the others only.
            loader.load_state_dict(state)
            assert "load the state on the source too" in outcome(lambda: list(loader))[1]
        else:
            assert outcome(lambda: list(loader))[0] in ("PeerLeftLoopError", "")


def test_bad_arguments_are_refused_on_all_ranks(tmp_path: Path) -> None:
    run_job(what_is_refused, 2, tmp_path)


def prepared_by_accelerate(rank: int, line: Line) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    plain = DataLoader([batch(number) for number in range(8)], batch_size=None)
    for dispatch in (False, True):
        accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch)
        )
        assert accelerator.num_processes == 2
        prepared = accelerator.prepare(DataLoader(list(range(8)), batch_size=2))
        kind, text, _ = outcome(lambda prepared=prepared: td.DispatchLoader(prepared if rank == 0 else None))
        assert kind == ("InvalidInputError" if rank == 0 else "PeerFailedError")
        assert "deals its batches out to the ranks already" in text, text
    # In place of dispatch_batches=True.
    with td.DispatchLoader(plain if rank == 0 else None, device=accelerator.device) as loader:
        assert accelerator.prepare(loader) is loader
        assert [number_of(mine) for mine in loader] == list(range(rank, 8, 2))


def test_accelerate_does_not_shard_a_dispatch_loader(tmp_path: Path) -> None:
    run_job(prepared_by_accelerate, 2, tmp_path)


def with_workers(rank: int, line: Line) -> None:
    inner = None
    if rank == 0:
        inner = DataLoader(
            [batch(number) for number in range(8)],
            batch_size=None,
            num_workers=2,
            multiprocessing_context="fork",
        )
    with td.DispatchLoader(inner) as loader:
        for _ in range(2):
            assert [number_of(mine) for mine in loader] == list(range(rank, 8, 2))


def test_a_data_loader_with_workers(tmp_path: Path) -> None:
    run_job(with_workers, 2, tmp_path)
