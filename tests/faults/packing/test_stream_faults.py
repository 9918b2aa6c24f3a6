"""A job of two ranks that is killed while it trains on a stream, and goes on from its newest checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.distributed.rank_processes import Job, Line
from support.packing.streams import PlainSource, StatefulSource, draw_samples, planned_items

import tundish as td

RANKS = 2
LENGTHS = np.random.default_rng(0).integers(1, 60, 300).tolist()
OPTIONS = {"mode": "ordered", "window": 8, "max_length": 64}
SOURCES = {"plain": PlainSource, "stateful": StatefulSource}


def train(rank: int, line: Line) -> None:
    """Say the packs of each step, and save the state after it."""
    folder, source = line.hear()
    checkpoint = Path(folder) / "checkpoint"
    stream = td.PackedStream(SOURCES[source](draw_samples(LENGTHS, "lists")), **OPTIONS)
    step = 0
    with td.DispatchLoader(stream if rank == 0 else None) as loader:
        if checkpoint.exists():
            saved = torch.load(checkpoint, weights_only=True)
            step = saved["step"]
            loader.load_state_dict(saved["loader"])
        line.say("begin", step)
        for batch in loader:
            line.say("step", step, batch["input_ids"].tolist())
            step += 1
            if rank == 0:
                torch.save({"step": step, "loader": loader.state_dict()}, Path(folder) / "incomplete")
                os.replace(Path(folder) / "incomplete", checkpoint)
            line.hear()


def begin(job: Job, folder: Path, source: str) -> int:
    job.tell_all((str(folder), source))
    (_, step), other = job.hear_all()
    assert other == ("begin", step)
    return int(step)


@pytest.mark.parametrize("source", SOURCES)
def test_a_killed_job_gets_the_packs_of_one_that_went_through(source: str, tmp_path: Path) -> None:
    expected = [item["input_ids"].tolist() for item in planned_items(draw_samples(LENGTHS, "lists"), OPTIONS)]
    steps = len(expected) // RANKS
    done = 0
    found: dict[int, list[Any]] = {}
    for kills_after in (7, 20, None):
        with Job(train, RANKS, tmp_path) as job:
            first = begin(job, tmp_path, source)
            # The newest step may have missed the checkpoint.
            assert first in (done - 1, done)
            for step in range(first, steps):
                heard = job.hear_all()
                assert [message[:2] for message in heard] == [("step", step)] * RANKS
                packs = [message[2] for message in heard]
                assert found.setdefault(step, packs) == packs
                done = step + 1
                if kills_after is not None and done == first + kills_after:
                    for rank in range(RANKS):
                        job.signal(rank, signal.SIGKILL)
                    break
                job.tell_all()
            else:
                job.expect_end()
    assert [pack for step in range(steps) for pack in found[step]] == expected[: steps * RANKS]
