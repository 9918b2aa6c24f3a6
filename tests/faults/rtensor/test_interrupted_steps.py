"""Ctrl-C at every moment of a step of a process alone: the next one begins, and nothing is left of what ended."""

from __future__ import annotations

import contextlib
import gc

import torch
from support.distributed.ctrl_c import at_every_moment

from tundish import rtensor
from tundish.rtensor import steps


def test_a_step_that_is_interrupted_anywhere_holds_up_no_other() -> None:
    rtensor.serve()
    for moment, ctrl_c in at_every_moment(contextlib, steps):
        handle = rtensor.remotize(torch.ones(3))
        with ctrl_c, rtensor.step(claim=handle):
            rtensor.localize(handle)
        # What it left suspended is closed.
        gc.collect()
        with rtensor.step():
            pass
        rtensor.remove(rtensor.flatten_shard_ids(handle))
        assert rtensor.storage_stats()["num_tensors"] == rtensor.fetch_buffer_stats()["num_entries"] == 0, (
            moment
        )
