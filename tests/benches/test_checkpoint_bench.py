"""Ways of saving are timed, weighed and compared."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("warm_programs")

# Each kind of them; the others begin as one of these does, and a bench that cannot run one says so.
CONTESTANTS = [
    ("writes", 1, False),
    ("hf lazy", 1, False),
    ("torch thread", 1, False),
    ("dcp", 2, True),
]


@pytest.mark.parametrize(("contestant", "world", "sharded"), CONTESTANTS)
def test_a_way_of_saving_is_timed_and_compared(
    bench: SimpleNamespace, tmp_path: Path, contestant: str, world: int, sharded: bool
) -> None:
    reply = bench.checkpoint_processes.run_ranks(saving(tmp_path, contestant, world, sharded), threads=1)
    assert reply["differing"] == []
    assert len(reply["stall"]) == len(reply["durable"]) == 2
    for stall, durable in zip(reply["stall"], reply["durable"], strict=True):
        assert 0 < stall <= durable
    assert reply["memory"] < 64 * 2**20
    assert [each.keys() for each in reply["loads"]] == [{"cold", "warm"}] * (2 if contestant == "dcp" else 0)
    assert all(seconds > 0 for each in reply["loads"] for seconds in each.values())
    # Of what was saved nothing is left.
    assert not list((tmp_path / "saves").rglob("*.safetensors"))


@pytest.mark.parametrize(("contestant", "world", "sharded"), [("hf", 1, False), ("dcp", 2, True)])
def test_copies_are_timed_between_saves_and_compared(
    bench: SimpleNamespace, tmp_path: Path, contestant: str, world: int, sharded: bool
) -> None:
    request = saving(tmp_path, contestant, world, sharded) | {"beside": ["copy", "bytes"]}
    reply = bench.checkpoint_processes.run_ranks(request, threads=1)
    assert reply["differing"] == []
    assert {contestant: len(stalls) for contestant, stalls in reply["beside"].items()} == {
        "copy": 2,
        "bytes": 2,
    }
    assert all(stall > 0 for stalls in reply["beside"].values() for stall in stalls)


def test_time_lost_beside_training_is_measured(bench: SimpleNamespace, tmp_path: Path) -> None:
    loops = ["matrix products", "400 tiny operations"]
    request = saving(tmp_path, "hf", 1, False) | {"loops": loops, "rounds": 1}
    reply = bench.checkpoint_processes.run_ranks(request, threads=1)
    for loop in loops:
        (lost,) = reply["lost"][loop]
        assert lost["base"] > 0
        # A save of a few kilobytes costs less than a few steps.
        assert abs(lost["lost"]) < 5
        assert lost["worst"] > 0


def test_a_rank_that_fails_is_told_of(bench: SimpleNamespace, tmp_path: Path) -> None:
    # Where the contestant wants to make a folder is a file.
    request = saving(tmp_path, "safetensors", 1, False)
    (tmp_path / "saves").write_text("")
    with pytest.raises(RuntimeError, match=r"(?s)child.py: .*ended with 1.*FileExistsError"):
        bench.checkpoint_processes.run_ranks(request, threads=1)


def test_a_save_that_is_no_copy_is_found_out(bench: SimpleNamespace) -> None:
    state = bench.state.make_state(bench.state.WORKLOADS["tiny"])
    assert bench.state.differing(state, bench.state.make_state(bench.state.WORKLOADS["tiny"])) == []
    saved = {name: tensor.clone() for name, tensor in state.items()}
    changes = bench.state.Changes(state)
    changes.toggle()
    assert bench.state.differing(saved, state) == sorted(state)
    changes.toggle()
    assert bench.state.differing(saved, state) == []
    del saved["layers.1.weight"]
    assert bench.state.differing(saved, state) == ["layers.1.weight"]


def saving(folder: Path, contestant: str, world: int, sharded: bool) -> dict[str, Any]:
    return {
        "contestant": contestant,
        "workload": "tiny",
        "world": world,
        "sharded": sharded,
        "root": str(folder / "saves"),
        "rounds": 2,
        "compare": True,
        "beside": [],
        "loops": [],
        "loads": contestant == "dcp",
    }
