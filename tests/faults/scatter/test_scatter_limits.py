"""Scatters at the limits of what a process may have: descriptors, memory."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import pytest
import torch

import tundish as td

sys.path.insert(0, str(Path(__file__).parents[2] / "distributed"))

from rank_processes import Job, Line


def on_nodes(rank: int, size: int) -> None:
    os.environ |= {
        "GROUP_RANK": str(rank // size),
        "LOCAL_RANK": str(rank % size),
        "LOCAL_WORLD_SIZE": str(size),
    }


def keep_every_batch(rank: int, line: Line) -> None:
    on_nodes(rank, line.hear())
    td.scatter_batch([None, None] if rank == 0 else None)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, limits[1]))
    kept = []
    for number in range(700):
        given = [None, {"x": torch.full((5000,), number), "n": number}]
        kept.append(td.scatter_batch(given if rank == 0 else None))
    for number, batch in enumerate(kept if rank == 1 else []):
        assert batch["n"] == number and (batch["x"] == number).all()


@pytest.mark.parametrize("node", [2])
def test_whoever_keeps_every_batch_does_not_run_out_of_descriptors(node: int, tmp_path: Path) -> None:
    with Job(keep_every_batch, 2, tmp_path) as job:
        job.tell(0, node)
        job.tell(1, node)
        job.expect_end()
