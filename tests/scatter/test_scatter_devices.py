"""Batches that go to a device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tundish as td

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from rank_processes import Job, Line


def make(number: int) -> Any:
    return {
        "pixels": torch.full((300, 400), float(number)),
        "ids": torch.full((3,), number),
        "half": torch.full((5,), number, dtype=torch.bfloat16),
        "array": np.full(4, number),
        "empty": torch.empty(0, 2),
        "n": number,
    }


def check(batch: Any, number: int, device: str) -> None:
    expected = make(number)
    for name in ("pixels", "ids", "half", "empty"):
        assert batch[name].device.type == device
        assert torch.equal(batch[name].cpu(), expected[name])
    assert isinstance(batch["array"], np.ndarray) and (batch["array"] == number).all()
    assert batch["n"] == number


def to_the_device(rank: int, line: Line) -> None:
    device = line.hear()
    for number in range(5):
        given = [make(number), make(number + 100)]
        if number == 3 and device != "meta":
            given = [{**one, "ids": one["ids"].to(device)} for one in given]
        mine = td.scatter_batch(given if rank == 0 else None, device=device)
        if device == "meta":
            assert mine["pixels"].device.type == "meta" and mine["pixels"].shape == (300, 400)
            assert (mine["array"] == number + 100 * rank).all()
        else:
            check(mine, number + 100 * rank, device)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_batch_goes_to_a_device_and_arrays_stay(device: str, tmp_path: Path) -> None:
    with Job(to_the_device, 2, tmp_path) as job:
        job.tell(0, device)
        job.tell(1, device)
        job.expect_end()


@pytest.mark.needs_gpu
def test_a_batch_goes_to_a_gpu(tmp_path: Path) -> None:
    with Job(to_the_device, 2, tmp_path) as job:
        job.tell(0, "cuda")
        job.tell(1, "cuda")
        job.expect_end()
