"""A call that is refused on one rank: no rank gets another round's batch for its own afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tundish as td
from rank_processes import Job, Line, outcome


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
