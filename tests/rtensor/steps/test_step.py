"""Steps of one process alone: what they claim, and what was fetched before them."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.rtensor import peer_functions
from support.rtensor.peers import Peer

from tundish import rtensor
from tundish.errors import InvalidInputError, InvalidTypeError, ShardGoneError
from tundish.rtensor import Controller, Worker, tensor_store


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


def test_fetches_before_the_first_step_end_with_it() -> None:
    with Peer() as owner, Peer() as consumer:
        handles = owner.call(peer_functions.make, 3, 10)
        assert consumer.call(fetch_before_the_first_step, handles) == [3, 3, 0]


def fetch_after_a_step(handles: list[rtensor.RTensor]) -> None:
    with rtensor.step():
        pass
    rtensor.localize(handles)


def test_fetches_after_a_step_of_the_process_end_with_that_of_a_controller() -> None:
    with Peer() as owner, Peer() as consumer:
        handles = owner.call(peer_functions.make, 3, 10)
        consumer.call(fetch_after_a_step, handles)
        with Controller([Worker(consumer.addr)]) as controller, controller.step():
            pass
        assert consumer.call(peer_functions.stats)[1]["num_entries"] == 0


def fail_to_begin_a_step(claim: rtensor.RTensor) -> None:
    with pytest.raises(ShardGoneError), rtensor.step(claim=claim):
        pass


def test_kept_shards_of_a_controllers_step_survive_a_failed_step_of_the_process() -> None:
    with Peer() as worker:
        kept, gone = worker.call(peer_functions.make, 2, 10)
        worker.call(peer_functions.remove, [gone.shard_id])
        with Controller([Worker(worker.addr)]) as controller, controller.step(claim=kept):
            assert worker.call(peer_functions.keep, kept) == 1
        worker.call(fail_to_begin_a_step, gone)
        assert worker.call(peer_functions.sums, kept) == [0]


def fetch_for_long(handles: list[rtensor.RTensor]) -> list[list[str]]:
    """The warnings: as it begins, after a minute, at once again, and after a step."""
    said: list[list[str]] = []

    class Note(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said[-1].append(record.getMessage())

    note = Note(logging.WARNING)
    logging.getLogger("tundish.rtensor").addHandler(note)
    clock = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_store, "time", SimpleNamespace(monotonic=lambda: clock[0], time_ns=time.time_ns))
        for handle, now in zip(handles, (0.0, 59.0, 61.0, 62.0, 130.0), strict=True):
            clock[0] = now
            said.append([])
            rtensor.localize(handle)
        with rtensor.step():
            pass
        for now in (1000.0, 2000.0):
            clock[0] = now
            said.append([])
            rtensor.localize(handles)
    logging.getLogger("tundish.rtensor").removeHandler(note)
    return said


@pytest.mark.parametrize("is_owner", [False, True], ids=["alone", "of an owner that is no worker"])
def test_a_process_that_fetches_and_is_never_drained_is_warned(is_owner: bool) -> None:
    with Peer() as owner, Peer() as consumer:
        if is_owner:
            own = consumer.call(peer_functions.make, 1, 10)
            with Controller([Worker(owner.addr)]) as controller, controller.step(claim=own):
                pass
        said = consumer.call(fetch_for_long, owner.call(peer_functions.make, 5, 10))
    assert [len(some) for some in said] == [0, 0, 1, 0, 0, 0, 0]
    assert "no step ever began in it: 3 entries (384 bytes)" in said[2][0] and "serve()" in said[2][0]


def test_warnings_have_the_callers_number_of_a_step(caplog: pytest.LogCaptureFixture) -> None:
    with Peer() as owner:
        handle = owner.call(peer_functions.make, 1, 1000)[0]
        with rtensor.step(number=7) as step:
            held = [rtensor.localize(handle)]
        assert step.number == 7 and "8000 bytes of step 7 escaped" in caplog.text
        held.append(rtensor.localize(handle))
        rtensor.drain(number=8)
        assert "bytes of step 8 escaped" in caplog.text


@pytest.mark.parametrize(
    ("number", "kind"),
    [(-1, InvalidInputError), (2**53, InvalidInputError), (True, InvalidTypeError), (1.5, InvalidTypeError)],
)
def test_numbers_of_steps_are_integers_that_json_can_hold(number: Any, kind: type[Exception]) -> None:
    for step in (rtensor.step(number=number), Controller([]).step(number=number)):
        with pytest.raises(kind, match="number is"), step:
            pass
    with pytest.raises(kind, match="number is"):
        rtensor.drain(number=number)
    with rtensor.step(number=2**53 - 1) as last:
        assert last.number == 2**53 - 1
