"""Ranks that are not alike, and scripts with settings of their own, save like any other."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tundish.checkpoint import Checkpointer

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
sys.path.insert(0, str(Path(__file__).parent))

from dcp_worlds import run
from rank_processes import Line


def save_with_a_default_device(rank: int, line: Line) -> None:
    (root,) = line.hear()
    host = torch.device("cpu")
    state = {"all": torch.ones(3, device=host), f"only {rank}": torch.full((2,), rank, device=host)}
    # A script sets it to "cuda"; any device but the host's will do.
    torch.set_default_device("meta")
    try:
        with Checkpointer(root, on_failure="raise") as checkpointer:
            rank_extra = {"none": torch.ones(0, device=host), "some": torch.ones(2, device=host)}
            checkpointer.save_dcp(1, state, rank_extra=rank_extra, blocking=True)
            # What is tried with zeros, as it asks for values.
            shared = {"all": state["all"]}
            checkpointer.save_hf(1, shared, to_hf=lambda name, tensor: [(name, tensor * float(tensor.sum()))])
            found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            _, rank_extras = checkpointer.load_dcp(found)
    finally:
        torch.set_default_device(None)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    line.say([str(tensor.device) for extra in rank_extras.values() for tensor in extra.values()])


def test_the_default_device_of_a_script_changes_nothing(tmp_path: Path) -> None:
    assert run(save_with_a_default_device, 2, tmp_path, tmp_path / "root") == [(["cpu"] * 4,)] * 2
