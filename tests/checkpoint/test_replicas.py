"""Values that ranks hold under one name are the same, or the save is refused: no rank's is lost in silence."""

from __future__ import annotations

import collections
import enum
import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.checkpoint.dcp_states import run
from support.distributed.rank_processes import Line, outcome
from torch import distributed, nn

from tundish.checkpoint import Checkpointer, load_dcp
from tundish.checkpoint.replicas import MOST_BYTES, digest_of, hashes_of


class Normed(nn.Module):
    """Its statistics follow the data of each rank, as a BatchNorm's."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)
        nn.init.ones_(self.last.weight)
        nn.init.zeros_(self.last.bias)
        self.norm.running_mean.fill_(rank + 1)


def different(rank: int) -> dict[str, Any]:
    return {
        "a number": {"x": {"seed": 100 + rank, "same": 1}},
        "a plain tensor": {"x": {"seed": torch.full((3,), rank), "same": torch.ones(3)}},
        "a random state": {"x": {"seed": random.Random(rank).getstate()}},
        "an array": {"x": {"seed": (np.arange(3) + rank,)}},
        "a tensor in columns": {"x": {"seed": torch.full((3, 2), rank).t()}},
        "one of the largest": {"x": {"seed": torch.full((MOST_BYTES,), rank, dtype=torch.uint8)}},
    }


def save_different(rank: int, line: Line) -> None:
    (root,) = line.hear()
    said = {}
    with Checkpointer(root, on_failure="raise", timeout=60) as checkpointer:
        for step, (what, state) in enumerate(different(rank).items()):
            said[what] = outcome(lambda: checkpointer.save_dcp(step, state))  # noqa: B023
        # Planned before, so that the ranks exchange nothing more than the vote.
        step = 100
        for what, state in different(0).items():
            checkpointer.save_dcp(step, state)
            said[f"{what}, later"] = outcome(lambda: checkpointer.save_dcp(step + 1, different(rank)[what]))  # noqa: B023
            step += 2
        # Held by two ranks of three.
        state = {"all": 1, **({"some": torch.full((2,), 5)} if rank else {})}
        checkpointer.save_dcp(200, state)
        checkpointer.save_dcp(201, state)
        if rank == 2:
            state["some"] = torch.full((2,), 6)
        said["some ranks, later"] = outcome(lambda: checkpointer.save_dcp(202, state))
        said["model"] = outcome(lambda: checkpointer.save_hf(203, {"seed": torch.full((3,), rank)}))
        checkpointer.wait()
        assert checkpointer.stats()["staging_in_use_bytes"] == 0
        checkpointer.save_dcp(204, {"w": torch.ones(2)}, rank_extra={"seed": 100 + rank}, blocking=True)
    line.say(said)


def test_what_differs_between_ranks_is_refused_by_name(tmp_path: Path) -> None:
    said = [answer for (answer,) in run(save_different, 3, tmp_path / "job", tmp_path / "root")]
    for what in said[0]:
        kinds = [of_rank[what][0] for of_rank in said]
        assert kinds.count("InvalidInputError") == 1, (what, said[0][what])
        assert kinds.count("PeerFailedError") == 2, (what, kinds)
        name, ranks = ("'some'", (1, 2)) if "some ranks" in what else ("'x.seed'", (0, 1))
        name = "'seed'" if what == "model" else name
        for of_rank in said:
            assert f"{name} differs between rank {ranks[0]} and rank {ranks[1]}" in of_rank[what][1], what
            assert "rank_extra" in of_rank[what][1]


def save_buffers(rank: int, line: Line) -> None:
    (root,) = line.hear()
    model = Normed(rank)
    with Checkpointer(root, on_failure="raise", timeout=60) as checkpointer:
        for step in (1, 2):
            checkpointer.save_dcp(step, {"model": model.state_dict()})
            # A file for each tensor, so that both ranks write some.
            checkpointer.save_hf(step, model, shard_bytes=1)
            model.norm.running_mean.add_(10)
        checkpointer.wait()
        with torch.no_grad():
            model.last.bias.fill_(rank)
        refused = [
            outcome(lambda: checkpointer.save_dcp(3, {"model": model.state_dict()})),
            outcome(lambda: checkpointer.save_hf(3, model, shard_bytes=1)),
        ]
    distributed.barrier()
    line.say(refused)


def test_buffers_that_differ_are_those_of_the_first_rank(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for (refused,) in run(save_buffers, 2, tmp_path / "job", root):
        assert "'model.last.bias' differs" in refused[0][1]
        assert "'last.bias' differs" in refused[1][1]
    for step, mean in ((1, 1.0), (2, 11.0)):
        state = {"model": Normed(7).state_dict()}
        load_dcp(state, root / f"dcp-{step}")
        exported: dict[str, torch.Tensor] = {}
        for file in (root / f"hf-{step}").glob("*.safetensors"):
            exported |= load_file(file)
        for saved in (state["model"], exported):
            assert saved["norm.running_mean"].tolist() == [mean] * 4


class Color(enum.Enum):
    RED = 1


class Warmup:
    """An object of state that can be called, as schedules are."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self) -> int:
        return self.steps


def test_equal_contents_have_equal_hashes() -> None:
    text = "".join(["ab", "cd"])
    first = [
        {"a": 1, "b": {"x", "y"}},
        [text, text],
        (1, True, 1.0),
        Color.RED,
        np.arange(3),
        torch.ones(2).double(),
    ]
    other = [{"b": {"y", "x"}, "a": 1}, ["abcd", "ab" + "cd"], (1, True, 1.0), Color.RED, np.arange(3)]
    other += [torch.ones(2, 2, dtype=torch.float64)[:, 0]]
    assert hashes_of(first) == hashes_of(other)
    assert digest_of(first) == digest_of(other)
    assert len(set(hashes_of(first))) == len(first)


def test_what_containers_share_is_read_once() -> None:
    # time: without that, 2**200 lists are read, in no time there is
    assert hashes_of([doubled(200)]) == hashes_of([doubled(200)]) != hashes_of([doubled(199)])


def doubled(times: int) -> list[Any]:
    return functools.reduce(lambda inner, _: [inner, inner], range(times), [])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (0.0, -0.0),
        ([1, [2]], [[1], 2]),
        ("ab", b"ab"),
        ((1,), [1]),
        (np.zeros(2), np.zeros(2, dtype="f4")),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (collections.deque([1]), collections.deque([2])),
        (np.random.default_rng(1), np.random.default_rng(2)),
        (torch.zeros(2), torch.ones(2)),
        ({1: "a"}, {"1": "a"}),
        (functools.partial(int, 1), functools.partial(int, 2)),
        (Warmup(1), Warmup(2)),
        (int, str),
    ],
)
def test_other_contents_have_other_hashes(one: Any, other: Any) -> None:
    assert hashes_of([one]) != hashes_of([other])
    assert digest_of([one]) != digest_of([other])


def test_larger_tensors_are_not_compared() -> None:
    assert hashes_of([torch.zeros(MOST_BYTES + 1, dtype=torch.uint8)]) == [""]
