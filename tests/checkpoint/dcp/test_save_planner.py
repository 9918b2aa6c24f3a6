"""A DCP save is planned once for each structure, with torch's names, and keeps no tensor alive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoint.dcp_states import assert_same, read, reserve, save
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from tundish._native import staging_stats
from tundish.checkpoint.dcp.plan import SavePlanner
from tundish.checkpoint.dcp.save import DcpSave
from tundish.checkpoint.dcp.state import flatten_state


def test_fingerprints_differ_with_extra_and_staging(planner: SavePlanner) -> None:
    state = {"w": torch.ones(1)}
    same = [
        DcpSave(planner, state, extra={"a": 1, "b": 2}),
        DcpSave(planner, state, extra={"b": 2, "a": 1}, rank_extra=3),
    ]
    assert same[0].fingerprint == same[1].fingerprint
    assert DcpSave(planner, state, extra={"a": 2, "b": 2}).fingerprint != same[0].fingerprint
    assert DcpSave(planner, state).fingerprint != same[0].fingerprint


def test_an_unstaged_plan_releases_its_memory(planner: SavePlanner) -> None:
    before = staging_stats()["in_use"]
    plan = DcpSave(planner, {"w": torch.ones(1 << 20)})
    staged = reserve(plan)
    assert staging_stats()["in_use"] >= before + (1 << 22)
    staged.release()
    assert staging_stats()["in_use"] == before


def test_a_save_of_the_same_form_is_planned_once(
    planner: SavePlanner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []
    plan = SavePlanner.plan
    monkeypatch.setattr(SavePlanner, "plan", lambda *given: (planned.append(1), plan(*given))[1])
    for number in range(3):
        save(planner, {"w": torch.full((3,), float(number))}, tmp_path / str(number))
    assert len(planned) == 1
    assert_same(read(tmp_path / "2"), {"w": torch.full((3,), 2.0)})
    save(planner, {"v": torch.zeros(3)}, tmp_path / "other")
    assert len(planned) == 2


def test_a_save_keeps_no_tensor_alive(planner: SavePlanner, tmp_path: Path) -> None:
    import gc
    import weakref

    tensor = torch.ones(1000)
    gone = weakref.ref(tensor)
    save(planner, {"w": tensor}, tmp_path / "saved")
    del tensor
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "state",
    [
        {"b": torch.ones(2), "a.b": torch.ones(3), "a": torch.ones(())},
        {"b": torch.ones(2), "a": {"b": torch.ones(3), "c": {7: torch.ones(1)}}},
        {"b": torch.ones(2), "list": [torch.ones(1), {"x": 1}], "numbers": [1, 2], "step": 3},
    ],
    ids=["flat", "nested", "mixed"],
)
def test_names_and_paths_are_those_of_torchs_planner(state: dict[str, Any]) -> None:
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    first = flatten_state(state)
    assert dict(zip(first.structure.paths, first.structure.torch_paths, strict=True)) == planner.mappings
    assert [name for name, _ in first] == list(planner.state_dict)
    assert all(value is planner.state_dict[name] for name, value in first)
    assert flatten_state(state, first.structure).structure is first.structure
    # The same names and values on other paths are another structure.
    moved = {name: value for name, value in state.items() if name != "b"} | {"b": {"b": state["b"]}}
    assert flatten_state(moved, first.structure).structure is not first.structure
