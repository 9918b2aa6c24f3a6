"""A call that is refused on one rank: no rank gets another round's batch for its own afterwards."""

from __future__ import annotations

import os
import socket
import textwrap
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.distributed.programs import PIPE, Program
from support.distributed.rank_processes import Job, Line, outcome
from torch.distributed.device_mesh import init_device_mesh

import tundish as td


def given(rank: int, number: int) -> list[str] | None:
    return [f"round {number} for {other}" for other in range(dist.get_world_size())] if rank == 0 else None


def a_round(rank: int, number: int) -> None:
    assert td.scatter_batch(given(rank, number)) == f"round {number} for {rank}"


def refused_for_its_source(rank: int, line: Line) -> None:
    refused: list[tuple[int, dict[str, Any]]] = [
        (1, {"src": 0.0}),
        (1, {"src": 0.0}),
        (1, {"src": 7}),
        (1, {"replicate": init_device_mesh("cpu", (1, 2))}),
        (0, {"src": None}),
        (0, {"src": -1}),
    ]
    for number, (victim, options) in enumerate(refused):
        call = {} if rank != victim else options
        kind, text, _ = outcome(lambda: td.scatter_batch(given(rank, 2 * number), **call))  # noqa: B023
        if rank == victim:
            assert kind in ("InvalidInputError", "InvalidTypeError"), text
        elif victim == 0 or number == 0:
            # The source tells of it, as does any rank in the first call, which is a vote.
            assert kind == "PeerFailedError" and f"rank {victim}" in text, (number, kind, text)
        else:
            assert kind == "", text
        a_round(rank, 2 * number + 1)


def test_a_call_that_is_refused_for_its_source_is_a_round_all_the_same(tmp_path: Path) -> None:
    with Job(refused_for_its_source, 2, tmp_path) as job:
        job.expect_end()


def refused_for_its_group(rank: int, line: Line) -> None:
    a_round(rank, 0)
    mesh = init_device_mesh("cpu", (1, 2))
    if rank == 1:
        assert "of 2 dimensions" in outcome(lambda: td.scatter_batch(None, group=mesh))[1]
        for _ in range(2):
            kind, text, _ = outcome(lambda: td.scatter_batch(None))
            assert kind == "PeerFailedError" and "rank 1 made a call that was refused for its group" in text
        line.say("refused")
    else:
        line.hear()
        # It may be far ahead of a receiver, but hears that this one takes part no longer.
        assert outcome(lambda: td.scatter_batch(given(rank, 1)))[::2] == ("PeerFailedError", 1)
    group = dist.new_group([0, 1])
    kind, text, _ = outcome(lambda: td.scatter_batch(given(rank, 2), group=group))
    assert kind == "PeerFailedError" and "1 calls that were refused for their group" in text, text
    # Where all were refused alike nobody is behind.
    if rank == 0:
        assert "of 2 dimensions" in outcome(lambda: td.scatter_batch(given(0, 3), group=mesh))[1]
    assert td.scatter_batch(given(rank, 4), group=group) == f"round 4 for {rank}"


def test_after_a_call_that_is_refused_for_its_group_nobody_gets_another_round_s_batch(tmp_path: Path) -> None:
    with Job(refused_for_its_group, 2, tmp_path) as job:
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
    with Job(refused_in_a_grid, 4, tmp_path) as job:
        job.expect_end()


# The promise: whoever is refused is known within about a second.
KNOWN = 1.0
TIMEOUT = 30.0


def open_one(rank: int, kind: str, group: Any) -> Any:
    if kind == "loader":
        return td.DispatchLoader([1, 2, 3] if rank == 0 else None, group=group)
    return td.scatter_batch([1, 2, 3] if rank == 0 else None, group=group)


def with_a_wrong_group(rank: int, line: Line) -> None:
    kind, wrong, has_met = line.hear()
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=TIMEOUT))
    beside = dist.new_group([0, 2])
    given: Any = group
    if has_met:
        td.distributed.vote(what="meeting", group=group)
    if rank == 1:
        if wrong == "destroyed":
            dist.destroy_process_group(group)
        elif wrong == "mesh":
            given = init_device_mesh("cpu", (1, 3), mesh_dim_names=("data", "tensor"))
        else:
            given = wrong
    elif wrong == "mesh":
        # To make one is a matter of all ranks.
        init_device_mesh("cpu", (1, 3), mesh_dim_names=("data", "tensor"))
    begun = time.monotonic()
    line.say(*outcome(lambda: open_one(rank, kind, given)), time.monotonic() - begun)
    # Those who were refused alike go on without it, and votes are votes.
    if rank != 1:
        assert td.scatter_batch(["a", "b"] if rank == 0 else None, group=beside) == "ab"[rank // 2]
    td.distributed.vote(what="the end")


@pytest.mark.parametrize("has_met", [False, True])
@pytest.mark.parametrize("wrong", ["destroyed", "mesh", [0, 1, 2], "data", 0], ids=str)
@pytest.mark.parametrize("kind", ["loader", "batch"])
def test_who_waits_for_a_rank_that_is_refused_for_its_group_hears_of_it(
    kind: str, wrong: Any, has_met: bool, tmp_path: Path
) -> None:
    with Job(with_a_wrong_group, 3, tmp_path) as job:
        for rank in range(3):
            job.tell(rank, (kind, wrong, has_met))
        told = job.hear_all()
        assert told[1][0] == "InvalidInputError", told[1]
        for found, text, named, seconds in (told[0], told[2]):
            assert (found, named) == ("PeerFailedError", 1), text
            assert "rank 1 made 1 calls that were refused for their group" in text, text
            assert told[1][1] in text, text
            assert seconds < 2 * KNOWN, seconds
        job.expect_end()


def with_a_wrong_group_in_a_grid(rank: int, line: Line) -> None:
    kind, which = line.hear()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    options: dict[str, Any] = {"group": mesh["data"], "replicate": mesh["tensor"]}
    if rank == 3:
        options[which] = "data"
    open_it = td.DispatchLoader if kind == "loader" else td.scatter_batch
    begun = time.monotonic()
    line.say(*outcome(lambda: open_it([1, 2] if rank == 0 else None, **options)), time.monotonic() - begun)
    line.hear()


@pytest.mark.parametrize("which", ["group", "replicate"])
@pytest.mark.parametrize("kind", ["loader", "batch"])
def test_all_of_a_grid_hear_of_a_rank_that_is_refused_for_its_group(
    kind: str, which: str, tmp_path: Path
) -> None:
    with Job(with_a_wrong_group_in_a_grid, 4, tmp_path) as job:
        for rank in range(4):
            job.tell(rank, (kind, which))
        *others, refused = job.hear_all()
        assert refused[0] == "InvalidInputError", refused
        for found, text, _, seconds in others:
            assert found == "PeerFailedError" and "rank 3 " in text, text
            # Some hear of it from others who did.
            assert seconds < 3 * KNOWN, seconds
        for rank in range(4):
            job.tell(rank)
        job.expect_end()


def with_a_group_that_nobody_can_tell(rank: int, line: Line) -> None:
    wrong = line.hear()
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=2))
    other = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    given: Any = group
    if rank == 1:
        given = other if wrong == "another group" else dist.GroupMember.NON_GROUP_MEMBER
    for kind in ("loader", "batch"):
        begun = time.monotonic()
        line.say(*outcome(lambda: open_one(rank, kind, given)), time.monotonic() - begun)  # noqa: B023
        dist.barrier()


@pytest.mark.parametrize("wrong", ["another group", "not a member"])
def test_who_waits_for_a_rank_that_is_elsewhere_names_it_after_the_timeout(
    wrong: str, tmp_path: Path
) -> None:
    with Job(with_a_group_that_nobody_can_tell, 3, tmp_path) as job:
        for rank in range(3):
            job.tell(rank, wrong)
        for _ in range(2):
            told = job.hear_all()
            if wrong == "another group":
                assert (told[1][0], told[1][2]) == ("VoteTimeoutError", (0,)), told[1]
            else:
                assert told[1][0] == "InvalidInputError" and "not a member" in told[1][1], told[1]
            for found, text, named, seconds in (told[0], told[2]):
                assert (found, named) == ("VoteTimeoutError", (1,)), text
                assert "rank 1 did not vote within 2" in text, text
                assert seconds < 2.0 + 2 * KNOWN, seconds
        job.expect_end()


PROGRAM = """
    import sys, time
    from datetime import timedelta
    import torch.distributed as dist
    import tundish as td

    rank, port = int(sys.argv[1]), int(sys.argv[2])
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = dist.new_group([0], timeout=timedelta(seconds=60))
    if rank == 1:
        td.DispatchLoader(None, group=group)
    begun = time.monotonic()
    try:
        td.DispatchLoader([1, 2])
    except td.errors.PeerFailedError as error:
        print(error.rank, time.monotonic() - begun < 20, error)
"""


def test_a_program_that_ends_as_it_is_not_in_the_group_is_known_to_who_waits_for_it(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = [
        Program(
            ["-c", textwrap.dedent(PROGRAM), rank, port],
            env={**os.environ, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
            stdout=PIPE,
            stderr=PIPE,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert "only members may make this call" in said[1][1] and ranks[1].returncode == 1
    assert said[0][0].startswith("1 True ") and "has ended, as it was to scatter in a group" in said[0][0], (
        said[0]
    )
