"""Shards that are left after a drain, and the warnings about them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from support.rtensor import peer_functions
from support.rtensor.peers import Peer

from tundish import rtensor
from tundish.rtensor import Controller

pytestmark = pytest.mark.usefixtures("emptied")


def test_leftover_entries_are_warned_of(
    owners: list[Peer], consumers: list[Peer], controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    handles = owners[0].call(peer_functions.make, 2, 10)
    with controller.step():
        pass
    with controller.step():
        consumers[1].call(peer_functions.sums_in_forgotten_step, handles, 123_456)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    text = record.getMessage()
    assert f"critic 1 at {consumers[1].addr} still has" in text and "2 entries" in text and "bytes" in text
    assert "the oldest of step 123456" in text
    consumers[1].call(peer_functions.end_forgotten_step, 123_456)


def test_tensors_in_use_on_a_worker_escape(
    owners: list[Peer], consumers: list[Peer], controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    handles = owners[0].call(peer_functions.make, 2, 10)
    with controller.step(claim=handles):
        consumers[0].call(peer_functions.hold, handles)
    assert f"{controller.workers[2]}: " in caplog.text and "escaped" in caplog.text, caplog.text
    consumers[0].call(peer_functions.let_go)


def test_leftover_entries_after_a_step_of_the_process_are_warned_of(
    owners: list[Peer], consumers: list[Peer]
) -> None:
    said = consumers[0].call(step_that_leaves, owners[0].call(peer_functions.make, 2, 10))
    assert len(said) == 1 and "2 entries" in said[0] and "the oldest of step 123456" in said[0]
    consumers[0].call(peer_functions.end_forgotten_step, 123_456)


def test_kept_rows_are_no_leftover(
    owners: list[Peer], consumers: list[Peer], controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    """Of one shard that is kept several entries are there, and they hide nothing when they are drained."""
    handle = owners[0].call(peer_functions.make, 1, 10)[0]
    rows = [handle[:2], handle[4:6], handle[8:]]
    with controller.step():
        consumers[1].call(peer_functions.sums, rows)
        assert controller.keep(handle) == 3
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]
    with controller.step(claim=handle):
        pass
    left = owners[0].call(peer_functions.make, 2, 10)
    with controller.step():
        consumers[1].call(peer_functions.sums_in_forgotten_step, left, 5_000_000)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "2 entries" in record.getMessage()
    consumers[1].call(peer_functions.end_forgotten_step, 5_000_000)


def test_cleared_kept_entries_hide_no_leftover_though_others_are_kept(
    owners: list[Peer], consumers: list[Peer], controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    cleared, kept = owners[0].call(peer_functions.make, 2, 10)
    with controller.step(claim=[cleared, kept]):
        consumers[1].call(peer_functions.sums, [kept, cleared[:3], cleared[5:]])
        controller.keep([cleared, kept])
    controller.clear_batches(cleared)
    # An owner keeps shards, and no entries.
    owners[0].call(
        peer_functions.sums_in_forgotten_step, owners[1].call(peer_functions.make, 1, 10), 6_000_000
    )
    left = owners[0].call(peer_functions.make, 1, 10)
    with controller.step():
        consumers[1].call(peer_functions.sums_in_forgotten_step, left, 6_000_000)
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert (
        ["rollout 0 at" in warned[0], "critic 1 at" in warned[1]]
        == [True, True]
        == [one in text for one, text in zip(("1 entry", "1 entry"), warned, strict=True)]
    )
    for peer in (owners[0], consumers[1]):
        peer.call(peer_functions.end_forgotten_step, 6_000_000)


def test_kept_entries_that_another_step_dropped_hide_no_leftover(
    owners: list[Peer], consumers: list[Peer], controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    dropped, left = (owners[0].call(peer_functions.make, 2, 10) for _ in range(2))
    with controller.step():
        consumers[1].call(peer_functions.sums, dropped)
        controller.keep(dropped)
    with Controller(controller.workers) as other, other.step(claim=dropped):
        pass
    with controller.step():
        pass
    assert not caplog.records
    with controller.step():
        consumers[1].call(peer_functions.sums_in_forgotten_step, left, 7_000_000)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "2 entries" in record.getMessage()
    consumers[1].call(peer_functions.end_forgotten_step, 7_000_000)


def test_rows_that_a_process_keeps_are_no_leftover(owners: list[Peer], consumers: list[Peer]) -> None:
    handle = owners[0].call(peer_functions.make, 1, 10)[0]
    assert consumers[2].call(steps_that_keep_rows, handle) == []


def steps_that_keep_rows(handle: Any) -> list[str]:
    """The warnings."""
    rtensor.localize([handle[:2], handle[4:6]])
    assert rtensor.keep(handle) == 2
    return step_that_leaves([])


def step_that_leaves(handles: Any) -> list[str]:
    """The warnings."""
    said: list[str] = []

    class Note(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    note = Note(logging.WARNING)
    logging.getLogger("tundish.rtensor").addHandler(note)
    try:
        with rtensor.step():
            peer_functions.sums_in_forgotten_step(handles, 123_456)
    finally:
        logging.getLogger("tundish.rtensor").removeHandler(note)
    return said


def test_tensors_that_outlive_the_step_are_warned_of(
    owners: list[Peer], consumers: list[Peer], controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    handles = owners[0].call(peer_functions.make, 1, 1000)
    with controller.step(claim=handles):
        consumers[2].call(peer_functions.hold, handles)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert (
        "8000 bytes of step" in record.getMessage() and f"ref 2 at {consumers[2].addr}" in record.getMessage()
    )
    consumers[2].call(peer_functions.let_go)
