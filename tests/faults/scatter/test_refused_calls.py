"""A call that is refused on one rank. Afterwards no rank gets the batch of another step."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.distributed.rank_processes import Job, Line, outcome, run_job
from torch.distributed.device_mesh import init_device_mesh

import tundish as td


def given(rank: int, number: int) -> list[str] | None:
    return [f"step {number} for {other}" for other in range(dist.get_world_size())] if rank == 0 else None


def a_step(rank: int, number: int) -> None:
    assert td.scatter_batch(given(rank, number)) == f"step {number} for {rank}"


def refused_in_the_first_call(rank: int, line: Line) -> None:
    # The first call of a group votes, so all ranks hear of it.
    for src in (0.0, 7):
        options = {"src": src} if rank == 1 else {}
        kind, text, _ = outcome(lambda: td.scatter_batch(given(rank, 0), **options))  # noqa: B023
        if rank == 1:
            assert kind in ("InvalidInputError", "InvalidTypeError"), text
        else:
            assert kind == "PeerFailedError" and "rank 1" in text, text
    a_step(rank, 1)


def test_a_source_that_is_refused_in_the_first_call_is_known_to_all(tmp_path: Path) -> None:
    run_job(refused_in_the_first_call, 2, tmp_path)


def refused_later(rank: int, line: Line) -> None:
    argument = line.hear()
    mesh = init_device_mesh("cpu", (1, 2))
    wrong: dict[str, Any] = {"src": {"src": 7}, "group": {"group": mesh}, "replicate": {"replicate": mesh}}[
        argument
    ]
    a_step(rank, 0)
    if rank == 1:
        kind, text, _ = outcome(lambda: td.scatter_batch(None, **wrong))
        assert kind == "InvalidInputError", text
        for _ in range(2):
            kind, text, _ = outcome(lambda: td.scatter_batch(None))
            assert kind == "PeerFailedError" and "rank 1 passed a bad group, src or replicate" in text, text
        line.say("refused")
    else:
        line.hear()
        # It hears that rank 1 left, although it may be ahead of it.
        assert outcome(lambda: td.scatter_batch(given(rank, 1)))[::2] == ("PeerFailedError", 1)
    group = dist.new_group([0, 1])
    assert td.scatter_batch(given(rank, 4), group=group) == f"step 4 for {rank}"


@pytest.mark.parametrize("argument", ["src", "group", "replicate"])
def test_after_a_refused_call_no_rank_gets_another_step_s_batch(argument: str, tmp_path: Path) -> None:
    with Job(refused_later, 2, tmp_path) as job:
        job.tell_all(argument)
        job.hear(1)
        job.tell(0)
        job.expect_end()


def refused_in_a_grid(rank: int, line: Line) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    options: dict[str, Any] = {"group": mesh["data"], "replicate": mesh["tensor"]}
    batches = ["first", "second"] if rank == 0 else None
    kind, text, _ = outcome(lambda: td.scatter_batch(batches, src=5 if rank == 3 else 0, **options))
    assert kind == ("InvalidInputError" if rank == 3 else "PeerFailedError") and "src is 5" in text, (
        kind,
        text,
    )
    assert td.scatter_batch(batches, **options) == ("first", "second")[rank // 2]
    kind, text, _ = outcome(
        lambda: td.DispatchLoader(batches, src="0" if rank == 2 else 0, **options)  # type: ignore[arg-type]
    )
    assert kind == ("InvalidTypeError" if rank == 2 else "PeerFailedError") and "src is '0'" in text, (
        kind,
        text,
    )
    with td.DispatchLoader(batches, **options) as loader:
        assert list(loader) == [("first", "second")[rank // 2]]


def test_a_source_that_is_refused_on_one_rank_of_a_grid_is_known_to_all(tmp_path: Path) -> None:
    run_job(refused_in_a_grid, 4, tmp_path)


def open_one(rank: int, kind: str, group: Any) -> Any:
    if kind == "loader":
        return td.DispatchLoader([1, 2, 3] if rank == 0 else None, group=group)
    return td.scatter_batch([1, 2, 3] if rank == 0 else None, group=group)


def with_a_group_that_nobody_can_tell(rank: int, line: Line) -> None:
    wrong = line.hear()
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=2))
    other = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    given: Any = group
    if rank == 1:
        given = other if wrong == "another group" else dist.GroupMember.NON_GROUP_MEMBER
    for kind in ("loader", "batch"):
        line.say(*outcome(lambda: open_one(rank, kind, given)))  # noqa: B023
        dist.barrier()


@pytest.mark.parametrize("wrong", ["another group", "not a member"])
def test_a_rank_that_called_with_another_group_is_named_after_the_timeout(wrong: str, tmp_path: Path) -> None:
    with Job(with_a_group_that_nobody_can_tell, 3, tmp_path) as job:
        job.tell_all(wrong)
        for _ in range(2):
            told = job.hear_all()
            if wrong == "another group":
                assert (told[1][0], told[1][2]) == ("VoteTimeoutError", (0,)), told[1]
            else:
                assert told[1][0] == "InvalidInputError" and "not a member" in told[1][1], told[1]
            for found, text, named in (told[0], told[2]):
                assert (found, named) == ("VoteTimeoutError", (1,)), text
                assert "rank 1 did not vote within 2" in text, text
        job.expect_end()
