"""`scatter_batch`: batches of every kind on 1 to 4 ranks, through shared memory and over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.distributed.rank_processes import Job, Line, on_nodes, outcome, run_job
from support.scatter.batches import KINDS, same

import tundish as td


def steps_of_all_kinds(rank: int, line: Line) -> None:
    on_nodes(rank, line.hear())
    world = dist.get_world_size()
    for src in {0, world - 1}:
        for number, (kind, make) in enumerate(KINDS.items()):
            # Equal schemas follow each other, with others in between.
            for seed in (number, number + 100):
                given = [make(seed + 10 * other) for other in range(world)] if rank == src else None
                mine = td.scatter_batch(given, src=src)
                expected = make(seed + 10 * rank)
                assert same(mine, expected), (kind, seed, mine, expected)
                assert rank != src or mine is given[src]
    line.say([(one["shared_memory_ranks"], one["gloo_ranks"]) for one in td.scatter.stats()])


@pytest.mark.parametrize(("world", "node"), [(1, 1), (2, 2), (3, 3), (4, 4), (2, 1), (4, 2)])
def test_every_kind_of_batch_arrives_unchanged(world: int, node: int, tmp_path: Path) -> None:
    with Job(steps_of_all_kinds, world, tmp_path) as job:
        job.tell_all(node)
        told = job.hear_all()
        job.expect_end()
    for rank, (counts,) in enumerate(told):
        if world == 1:
            assert counts == [(0, 0)]
            continue
        for src, found in zip((0, world - 1), counts, strict=True):
            same_node = [other for other in range(world) if other // node == src // node and other != src]
            cross_node = [other for other in range(world) if other // node != src // node]
            expected = (
                (len(same_node), len(cross_node)) if rank == src else (1, 0) if rank in same_node else (0, 1)
            )
            assert found == expected, (rank, src)


def steps_with_gaps(rank: int, line: Line) -> None:
    on_nodes(rank, line.hear())
    world = dist.get_world_size()
    for left_out in (*range(world), None):
        given = [
            None if left_out in (None, other) else {"x": torch.full((3,), other)} for other in range(world)
        ]
        mine = td.scatter_batch(given if rank == 0 else None)
        if left_out in (None, rank):
            assert mine is None
        else:
            assert mine["x"].tolist() == [rank] * 3
    assert td.scatter_batch(None) is None
    # The call runs a generator.
    assert td.scatter_batch((10 * other for other in range(world)) if rank == 0 else None) == 10 * rank


@pytest.mark.parametrize("node", [3, 1])
def test_a_rank_without_a_batch_gets_none(node: int, tmp_path: Path) -> None:
    run_job(steps_with_gaps, 3, tmp_path, node)


def numbers_of_other_kinds(rank: int, line: Line) -> None:
    for number in range(5):
        src = (1, np.int64(1), torch.tensor(1))[number % 3]
        assert td.scatter_batch([number, number + 10] if rank == 1 else None, src=src) == number + 10 * rank  # type: ignore[arg-type]
    assert [one["steps"] for one in td.scatter.stats()] == [5]


def test_src_may_be_any_kind_of_integer(tmp_path: Path) -> None:
    run_job(numbers_of_other_kinds, 2, tmp_path)


def several_groups(rank: int, line: Line) -> None:
    odd = dist.new_group([1, 3])
    even = dist.new_group([0, 2])
    mine, others = (odd, even) if rank % 2 else (even, odd)
    for number in range(5):
        # Within the group, rank 1 of [1, 3] is 3.
        given = [{"x": torch.tensor([number, rank, 0])}, {"x": torch.tensor([number, rank, 1])}]
        got = td.scatter_batch(given if rank >= 2 else None, src=1, group=mine)
        assert got["x"].tolist() == [number, 2 + rank % 2, rank // 2]
        every = td.scatter_batch(list(range(number, number + 4)) if rank == 2 else None, src=2)
        assert every == number + rank
    assert "not a member" in outcome(lambda: td.scatter_batch(None, group=others))[1]
    assert [one["ranks"] for one in td.scatter.stats(mine)] == [2]


def test_sub_groups_and_several_groups_at_once(tmp_path: Path) -> None:
    run_job(several_groups, 4, tmp_path)


def on_a_mesh(rank: int, line: Line) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    row, column = divmod(rank, 2)
    for number in range(3):
        given = [{"x": torch.tensor([number, column, other])} for other in range(2)] if row == 0 else None
        assert td.scatter_batch(given, group=mesh["data"])["x"].tolist() == [number, column, row]
    kind, text, _ = outcome(lambda: td.scatter_batch(None, group=mesh))
    assert kind == "InvalidInputError" and 'mesh["data"]' in text


def test_a_dimension_of_a_mesh_is_a_group(tmp_path: Path) -> None:
    run_job(on_a_mesh, 4, tmp_path)


def on_a_mesh_in_another_order(rank: int, line: Line) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    # The ranks of its second column have different positions in their rows.
    mesh = DeviceMesh("cpu", [[0, 3], [2, 1]], mesh_dim_names=("tensor", "data"))
    kind, text, _ = outcome(
        lambda: td.scatter_batch([1, 2] if rank == 0 else None, group=mesh["data"], replicate=mesh["tensor"])
    )
    assert kind in ("InvalidInputError", "PeerFailedError")
    assert "rise along both dimensions" in text, text


def test_a_mesh_with_ranks_in_another_order_is_refused_on_all(tmp_path: Path) -> None:
    run_job(on_a_mesh_in_another_order, 4, tmp_path)


def tensors_apart(rank: int, line: Line) -> None:
    given = [{"x": torch.zeros(300), "y": torch.ones(300)}] * 2
    mine = td.scatter_batch(given if rank == 0 else None)
    if rank == 1:
        weight = torch.ones(300, requires_grad=True)
        loss = (weight * mine["x"]).sum()
        # For autograd this is no change of x, which the backward pass needs.
        mine["y"].add_(1)
        loss.backward()
        assert mine["x"].untyped_storage().nbytes() == 1200
        assert not mine["x"]._is_view()


def test_tensors_of_a_batch_are_independent(tmp_path: Path) -> None:
    run_job(tensors_apart, 2, tmp_path)


def batches_of_tens_of_megabytes(rank: int, line: Line) -> None:
    def make(number: int) -> Any:
        return {"pixels": torch.arange(9 << 20, dtype=torch.int32) + number, "of": torch.tensor(number)}

    for first in (0, 10):
        mine = td.scatter_batch([make(first + other) for other in range(3)] if rank == 0 else None)
        assert same(mine, make(first + rank))


def test_large_batches_of_several_ranks_arrive_whole(tmp_path: Path) -> None:
    run_job(batches_of_tens_of_megabytes, 3, tmp_path)


def raising(error: Exception) -> Iterator[Any]:
    raise error
    yield


def endless() -> Iterator[int]:
    yield from range(1000)
    pytest.fail("all batches of an endless iterable were read")


def test_alone_without_a_process_group() -> None:
    batch = {"x": torch.ones(2)}
    assert td.scatter_batch([batch]) is batch
    assert td.scatter_batch(None) is None
    with pytest.raises(td.errors.InvalidInputError, match="batches has 2 entries for 1 rank: give one batch"):
        td.scatter_batch([batch, batch])
    with pytest.raises(td.errors.InvalidInputError, match="batches has more than 1 entries for 1 rank"):
        td.scatter_batch(endless())
    with pytest.raises(td.errors.InvalidTypeError, match="batches is a Tensor"):
        td.scatter_batch(torch.ones(1))
    with pytest.raises(td.errors.InvalidInputError, match="src is 1: it is a rank within the group"):
        td.scatter_batch([batch], src=1)
    with pytest.raises(td.errors.InvalidTypeError, match="src is 'x'"):
        td.scatter_batch([batch], src="x")  # type: ignore[arg-type]


def sources_differ(rank: int, line: Line) -> None:
    kind, text, _ = outcome(lambda: td.scatter_batch([1, 2], src=rank))
    assert kind in ("PeerFailedError", "InvalidInputError"), (kind, text)
    # The next call with the same source works.
    assert td.scatter_batch([5, 6] if rank == 1 else None, src=1) == 5 + rank


def test_different_sources_are_refused_on_all_ranks(tmp_path: Path) -> None:
    run_job(sources_differ, 2, tmp_path)


def replicas(rank: int, line: Line) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    shape, node = line.hear()
    on_nodes(rank, node)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    row = rank // shape[1]
    for number in range(6):
        given = None
        if rank == 0:
            given = [
                {"x": torch.full((70_000,), 10 * number + other), "n": number} for other in range(shape[0])
            ]
            # Steps without a batch, without tensors, and with a schema longer than a message.
            given[0] = None if number == 2 else given[0]
            given[-1] = {"n": number} if number == 3 else given[-1]
            given[-1] = {"text": "x" * 100_000, "x": torch.ones(9)} if number == 4 else given[-1]
        mine = td.scatter_batch(given, group=mesh["data"], replicate=mesh["tensor"])
        if number == 2 and row == 0:
            assert mine is None
        elif number == 3 and row == shape[0] - 1:
            assert mine == {"n": 3}
        elif number == 4 and row == shape[0] - 1:
            assert mine["text"] == "x" * 100_000 and mine["x"].tolist() == [1] * 9
        else:
            assert mine["n"] == number and (mine["x"] == 10 * number + row).all()
            # Other ranks of the node have their own copies.
            mine["x"] += rank + 1
            dist.barrier()
            assert (mine["x"] == 10 * number + row + rank + 1).all()
            continue
        dist.barrier()
    [found] = td.scatter.stats(mesh["data"])
    line.say((found["shared_memory_ranks"], found["gloo_ranks"]), found["sent_bytes"])
    kind, text, _ = outcome(
        lambda: td.scatter_batch([] if rank == 0 else None, group=mesh["data"], replicate=mesh["tensor"])
    )
    assert (kind, "batches has 0 entries" in text) == (
        "InvalidInputError" if rank == 0 else "PeerFailedError",
        True,
    )


def test_ranks_of_another_dimension_get_the_same_batch(tmp_path: Path) -> None:
    with Job(replicas, 4, tmp_path) as job:
        job.tell_all(((2, 2), 4))
        told = job.hear_all()
        job.expect_end()
    assert [counts for counts, _ in told] == [(3, 0), (1, 0), (1, 0), (1, 0)]
    # 5 and 4 steps have tensors; each batch is sent to a node once.
    assert told[0][1] < 11 * 70_000 * 8


def test_a_batch_goes_to_another_node_once(tmp_path: Path) -> None:
    with Job(replicas, 4, tmp_path) as job:
        job.tell_all(((2, 2), 2))
        told = job.hear_all()
        job.expect_end()
    # The first rank of the other node gets it over gloo and passes it on.
    assert [counts for counts, _ in told] == [(1, 1), (1, 0), (1, 1), (1, 0)]


def replicas_along_two_dimensions(rank: int, line: Line) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("data", "pipeline", "tensor"))
    both = mesh["pipeline", "tensor"]
    kind, text, _ = outcome(lambda: td.scatter_batch(None, group=mesh["data"], replicate=both))
    assert kind == "InvalidInputError" and "_flatten()" in text, text
    for number in range(2):
        given = [{"x": torch.full((70_000,), 10 * number + row)} for row in range(2)] if rank == 0 else None
        mine = td.scatter_batch(given, group=mesh["data"], replicate=both._flatten())
        assert (mine["x"] == 10 * number + rank // 4).all()


def test_ranks_along_two_more_dimensions_get_the_same_batch(tmp_path: Path) -> None:
    run_job(replicas_along_two_dimensions, 8, tmp_path)
