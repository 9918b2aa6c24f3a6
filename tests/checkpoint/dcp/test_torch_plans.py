"""A `WritePlan` is made of the items that torch's planner has a rank save."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import pytest
import torch
from support.checkpoint.dcp_states import OPTIONS, World, assert_same, barrier, gathered, read, run, whole
from support.distributed.rank_processes import Line
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from tundish.checkpoint.dcp.save import plan_of_torch
from tundish.checkpoint.root import DiskDraft
from tundish.checkpoint.staging import Staged


def save_as_torch_plans(rank: int, line: Line) -> None:
    layout, folder = line.hear()
    world = World(layout)
    world.train()
    state = world.state() | {"note": ["text", (1, 2)], "nothing": torch.zeros(0, 3)}
    expected = whole(state)
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=rank == 0)
    plans = gathered(planner.create_local_plan())
    # As torch's coordinator does; all ranks get the same.
    coordinator = DefaultSavePlanner()
    coordinator.set_up_planner(state, is_coordinator=True)
    finished, metadata = coordinator.create_global_plan(plans)
    plan, results = plan_of_torch(planner.finish_plan(finished[rank]), planner, f"__{rank}_0.distcp")
    staged = Staged(plan)
    staged.copy()
    with torch.no_grad():
        # The save has the values of before.
        for parameter in world.model.parameters():
            parameter.zero_()
    staged.wait_staged(60)
    written = staged.write(DiskDraft(folder), OPTIONS)
    staged.release()
    assert [file.name for file in written] == [file.name for file in plan.files]
    everyone = [result for of_rank in gathered(results) for result in of_rank]
    if rank == 0:
        places = {result.index: result.storage_data for result in everyone}
        (folder / ".metadata").write_bytes(pickle.dumps(dataclasses.replace(metadata, storage_data=places)))
        assert_same(read(folder), expected)
    barrier()
    line.say(len(results) > 0)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_torch_reads_what_it_planned(layout: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    assert run(save_as_torch_plans, 2, tmp_path / "ranks", layout, folder) == [(True,), (True,)]
