"""Ranks with different tensors, node sizes and default devices save."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.checkpoint.dcp_states import run
from support.distributed.rank_processes import Line, on_nodes, outcome

from tundish._native import staging_stats, trim_staging
from tundish.checkpoint import Checkpointer
from tundish.checkpoint.save_job import Save


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
            # The conversion is tried with zeros, since it reads values.
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


def save_on_nodes_of_two_and_one(rank: int, line: Line) -> None:
    (root,) = line.hear()
    on_nodes(rank % 2, 1 if rank == 2 else 2)
    weights = {f"layer {number}": torch.ones(100 * number) for number in range(1, 7)}
    with Checkpointer(root, on_failure="raise") as checkpointer:
        checkpointer.save_hf(1, weights, shard_bytes=1000, blocking=True)
        mine = weights if rank < 2 else {"layer 1": torch.ones(7)}
        line.say(outcome(lambda: checkpointer.save_hf(2, mine, shard_bytes=1000)))


def test_nodes_may_be_of_different_sizes(tmp_path: Path) -> None:
    for ((_, text, _),) in run(save_on_nodes_of_two_and_one, 3, tmp_path, tmp_path / "root"):
        # Ranks that hold different models are told what people can read.
        assert "6 tensors in 6 files of" in text
        assert "1 tensor in 1 file of" in text
    assert len(list((tmp_path / "root" / "hf-1").glob("*.safetensors"))) == 6


def save_stages_of_a_pipeline(rank: int, line: Line) -> None:
    root, limit = line.hear()
    state = {f"stage {rank}.{number}": torch.ones(1 << 16) for number in range(10)}
    size = sum(tensor.nbytes for tensor in state.values())
    trim_staging()
    with Checkpointer(root, on_failure="raise", staging_limit_bytes=int(limit * size)) as checkpointer:
        saves: list[Save] = []
        name, text, *_ = outcome(lambda: saves.append(checkpointer.save_dcp(1, state)))
        for save in saves:
            save.result(60)
            written, total = save.progress()
            assert written == total >= size
        line.say(name, text, staging_stats()["peak"] <= int(limit * size))


@pytest.mark.parametrize("limit", [0.7, 1.2])
def test_the_first_save_of_ranks_that_hold_different_things_keeps_the_limit(
    tmp_path: Path, limit: float
) -> None:
    """Half as much is expected as long as each rank takes the others to hold the same."""
    for name, text, is_kept in run(save_stages_of_a_pipeline, 2, tmp_path, tmp_path / "root", limit):
        assert is_kept
        if limit < 1:
            assert name == "InvalidInputError" and "more than staging_limit_bytes=" in text
        else:
            assert name == "", text
