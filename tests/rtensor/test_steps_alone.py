"""Steps of one process alone: what they claim, and what was fetched before them."""

from __future__ import annotations

import pytest
import torch

import told
from peers import Peer
from tundish import rtensor
from tundish.errors import ShardGoneError
from tundish.rtensor import Controller, Worker


def test_a_claim_that_fails_drains_nothing() -> None:
    there, gone = rtensor.remotize([torch.arange(4), torch.arange(3)])
    rtensor.remove([gone.shard_id])
    with pytest.raises(ShardGoneError, match=gone.shard_id), rtensor.step(claim=[there, gone]):
        pass
    stats = rtensor.storage_stats()
    assert (stats["num_tensors"], stats["unclaimed_entries"]) == (1, 1)
    assert rtensor.localize(there).tolist() == [0, 1, 2, 3]
    with rtensor.step(claim=there):
        pass
    assert rtensor.storage_stats()["num_tensors"] == 0


def fetch_before_the_first_step(handles: list[rtensor.RTensor]) -> list[int]:
    rtensor.localize(handles)
    found = [rtensor.fetch_buffer_stats()["num_entries"]]
    with rtensor.step():
        found.append(rtensor.fetch_buffer_stats()["num_entries"])
    return [*found, rtensor.fetch_buffer_stats()["num_entries"]]


def test_what_is_fetched_before_the_first_step_ends_with_it() -> None:
    with Peer() as owner, Peer() as consumer:
        handles = owner.call(told.make, 3, 10)
        assert consumer.call(fetch_before_the_first_step, handles) == [3, 3, 0]


def fetch_after_a_step(handles: list[rtensor.RTensor]) -> None:
    with rtensor.step():
        pass
    rtensor.localize(handles)


def test_what_is_fetched_after_a_step_alone_ends_with_that_of_a_controller() -> None:
    with Peer() as owner, Peer() as consumer:
        handles = owner.call(told.make, 3, 10)
        consumer.call(fetch_after_a_step, handles)
        with Controller([Worker(consumer.addr)]) as controller, controller.step():
            pass
        assert consumer.call(told.stats)[1]["num_entries"] == 0
