"""A DCP save refuses invalid input before anything is staged."""

from __future__ import annotations

import functools
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoint.dcp_states import new_planner
from support.distributed.rank_processes import Job, Line, outcome
from torch import distributed

from tundish._native import staging_stats
from tundish.checkpoint.dcp.plan import SavePlanner
from tundish.checkpoint.dcp.save import DcpSave
from tundish.distributed import VoteId


def refused_tensors(rank: int, line: Line) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard

    mesh = init_device_mesh("cpu", (2,))
    alone = distributed.new_group([0])
    outsider = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
    crooked = DTensor.from_local(
        torch.ones(2 + rank), mesh, [Shard(0)], run_check=False, shape=(5,), stride=(1,)
    )
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    planner = new_planner()
    said = [outcome(lambda tensor=tensor: DcpSave(planner, {"w": tensor})) for tensor in (partial, crooked)]
    if rank == 0:
        alone_save = DcpSave(new_planner(alone), {"w": outsider})
        vote = VoteId("unused", 0)
        said.append(outcome(lambda: alone_save.agree(vote, any_needs=True, do_replicas_differ=False)))
    line.say([one[:2] for one in said])


def test_layouts_that_cannot_be_saved_are_refused(tmp_path: Path) -> None:
    with Job(refused_tensors, 2, tmp_path) as job:
        ((first,), _) = job.hear_all()
        job.expect_end()
    assert [kind for kind, _ in first] == ["InvalidInputError"] * 3
    assert "yet to be reduced" in first[0][1]
    assert "its local tensor has shape (2,)" in first[1][1]
    assert "give the Checkpointer a group with all ranks that hold blocks of it" in first[2][1]


def ragged() -> torch.Tensor:
    with warnings.catch_warnings():
        # That it is a prototype.
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


@pytest.mark.parametrize(
    ("state", "kind", "said"),
    [
        ({}, "InvalidInputError", "nothing to save"),
        ([1], "InvalidTypeError", "is a list"),
        ({"x": {0: 1, "0": 2}}, "InvalidInputError", "'x.0', under the keys ('x', 0) and ('x', '0')"),
        ({1: 1, "1": 2}, "InvalidInputError", "have the name '1'"),
        ({"../up": torch.ones(1)}, "InvalidInputError", "'../up'"),
        ({"a.b": 1, "a": {"b": 2}}, "InvalidInputError", "a.b"),
        ({"w": torch.empty(1, device="meta")}, "InvalidInputError", "'w' is on the meta device"),
        ({"w": torch.eye(2).to_sparse()}, "InvalidTypeError", "'w' is sparse"),
        ({"w": ragged()}, "InvalidTypeError", "'w' is nested"),
        ({"w": torch.zeros(4, dtype=torch.uint8).view(torch.bits8)}, "InvalidTypeError", "'w' is bits8"),
        ({"f": lambda: 1}, "InvalidTypeError", "'f', which is a function, cannot be saved as a pickle"),
    ],
)
def test_unsupported_values_are_refused_before_staging(
    planner: SavePlanner, state: Any, kind: str, said: str
) -> None:
    before = staging_stats()["in_use"]
    with pytest.raises((ValueError, TypeError)) as refusal:
        DcpSave(planner, state)
    assert type(refusal.value).__name__ == kind
    assert said in str(refusal.value)
    assert staging_stats()["in_use"] == before
    DcpSave(planner, {"w": torch.ones(1)})


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


def nested_lists(depth: int) -> list[Any]:
    return functools.reduce(lambda inner, _: [inner], range(depth), [])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"extra": [("step", 1)]}, "extra is a list"),
        ({"extra": {"step": torch.tensor(1)}}, "extra is no JSON: extra['step'] is a Tensor."),
        ({"extra": {"loss": [0.5, math.nan]}}, "extra is no JSON: extra['loss'][1] is nan."),
        ({"extra": {1: 2}}, "extra is no JSON: extra has the key 1."),
        ({"extra": {None: 2}}, "extra is no JSON: extra has the key None."),
        ({"extra": {"a": {"shape": (1, 2)}}}, "extra is no JSON: extra['a']['shape'] is a tuple."),
        ({"extra": {"a": ENDLESS}}, "extra is no JSON: it is nested too deep, or contains itself."),
        ({"extra": {"a": nested_lists(500)}}, "extra is no JSON: it is nested too deep, or contains itself."),
        ({"extra": {"a": 10**5000}}, "extra is no JSON: it does not survive a JSON round trip."),
        ({"rank_extra": {"loader": object()}}, "rank_extra['loader'] is a builtins.object"),
        ({"staging": "later"}, "staging is 'later'"),
        ({"staging": "lazy"}, "give optimizer="),
    ],
)
def test_invalid_arguments_are_refused(planner: SavePlanner, arguments: Any, said: str) -> None:
    with pytest.raises((ValueError, TypeError)) as refusal:
        DcpSave(planner, {"w": torch.ones(1)}, **arguments)
    assert said in str(refusal.value)
