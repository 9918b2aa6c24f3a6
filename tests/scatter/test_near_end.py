"""The receiver's end of a line: descriptors of several messages that are on it at once."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tundish.errors import OutOfMemoryError
from tundish.scatter.outgoing_batch import OutgoingBatch
from tundish.scatter.received_batch import ReceivedBatch
from tundish.scatter.transport.shared_memory import SharedMemoryReceiver, SharedMemorySender


class Failing:
    """What `parcels` does, but that the first descriptor cannot be adopted."""

    def __init__(self, parcels: Any) -> None:
        self._parcels = parcels
        self._has_failed = False

    def adopt(self, descriptor: int, sender: int) -> None:
        if not self._has_failed:
            self._has_failed = True
            os.close(descriptor)
            raise OutOfMemoryError("there is no room for it")
        self._parcels.adopt(descriptor, sender)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parcels, name)


def test_memory_that_cannot_be_had_takes_none_of_the_next_messages_along() -> None:
    near, far = socket.socketpair()
    lane = SharedMemorySender(1, near, 1 << 30)
    lane.introduce()
    end = SharedMemoryReceiver(far, os.getpid(), awake=False)
    end._parcels = Failing(end._parcels)  # type: ignore[assignment]
    for number in range(3):
        batch = torch.full((1 << 18,), float(number))
        lane.give(number, OutgoingBatch(batch, 1, 1), lambda wait: pytest.fail("it waits for room"))
    assert end.wait(60)
    with pytest.raises(OutOfMemoryError):
        end.read()
    for number in (1, 2):
        assert end.wait(60)
        message = end.read()
        assert message is not None and isinstance(message[1], ReceivedBatch)
        assert (message[1].build(None) == number).all()
        # Until then it stays.
        assert end.wait(0) and end.read() is message
        del message
        end.done()
    end.close()
    lane.close()


@pytest.fixture
def line() -> Iterator[tuple[SharedMemorySender, SharedMemoryReceiver]]:
    near, far = socket.socketpair()
    lane = SharedMemorySender(1, near, 1 << 30)
    lane.introduce()
    end = SharedMemoryReceiver(far, os.getpid(), awake=False)
    yield lane, end
    end.close()
    lane.close()


def give(lane: SharedMemorySender, number: int, batch: Any) -> None:
    lane.give(number, OutgoingBatch(batch, 1, 1), lambda wait: pytest.fail("it waits for room"))


def read(end: SharedMemoryReceiver) -> Any:
    """The next batch."""
    while True:
        assert end.wait(20)
        message = end.read()
        if message is not None:
            assert isinstance(message[1], ReceivedBatch)
            end.done()
            return message[1].build(None)


def interrupted_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, before: bool) -> None:
    """Have Ctrl-C come before the next call of a method begins, or as it has ended."""
    method = getattr(owner, name)

    def call(*args: Any) -> Any:
        monkeypatch.setattr(owner, name, method)
        if not before:
            method(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, call)


def batch_of(epoch: int) -> dict[str, Any]:
    return {"x": torch.full((4,), float(epoch)), "epoch": epoch}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("changed", [0, 1], ids=["a new form", "new values"])
def test_what_ctrl_c_keeps_from_being_read_is_known_all_the_same(
    line: tuple[SharedMemorySender, SharedMemoryReceiver],
    monkeypatch: pytest.MonkeyPatch,
    changed: int,
    before: bool,
) -> None:
    lane, end = line
    if changed:
        give(lane, 0, batch_of(0))
        assert read(end)["epoch"] == 0
    give(lane, 1, batch_of(changed))
    interrupted_once(monkeypatch, end._known, "hear", before=before)
    with pytest.raises(KeyboardInterrupt):
        read(end)
    # The scatterer leaves the one of an earlier round out.
    assert read(end)["epoch"] == changed
    for number in (2, 3):
        give(lane, number, batch_of(changed))
        assert read(end)["epoch"] == changed


def test_what_was_finished_as_ctrl_c_came_is_read_once(
    line: tuple[SharedMemorySender, SharedMemoryReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, end = line
    give(lane, 1, batch_of(1))
    interrupted_once(monkeypatch, end, "_finish", before=False)
    with pytest.raises(KeyboardInterrupt):
        read(end)
    # As whoever does not know that it has said so.
    end.done()
    for number in (2, 3):
        give(lane, number, batch_of(number))
        assert read(end)["epoch"] == number


class Refusing:
    """What `parcels` does, but that nothing can be opened."""

    def __init__(self, parcels: Any) -> None:
        self._parcels = parcels

    def open(self, reference: Any) -> None:
        raise OutOfMemoryError("there is no room for it")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parcels, name)


@pytest.mark.parametrize("is_known", [False, True])
def test_a_long_schema_that_cannot_be_had_is_not_taken_for_another(
    line: tuple[SharedMemorySender, SharedMemoryReceiver], is_known: bool
) -> None:
    lane, end = line

    def captioned(number: int) -> dict[str, Any]:
        return {"x": torch.ones(3), "caption": f"{number}" * 100_000}

    if is_known:
        give(lane, 0, captioned(0))
        assert read(end)["caption"] == "0" * 100_000
    parcels = end._parcels
    end._parcels = Refusing(parcels)  # type: ignore[assignment]
    give(lane, 1, captioned(1))
    with pytest.raises(OutOfMemoryError):
        read(end)
    end._parcels = parcels
    with pytest.raises(LookupError, match="did not come"):
        read(end)
    # What is equal refers to what did not come.
    give(lane, 2, captioned(1))
    with pytest.raises(LookupError, match="did not come"):
        read(end)
    if is_known:
        give(lane, 3, captioned(3))
        assert read(end)["caption"] == "3" * 100_000


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_descriptor_that_is_sent_once_more_takes_the_place_of_the_one_before(
    line: tuple[SharedMemorySender, SharedMemoryReceiver],
) -> None:
    lane, end = line
    departure = OutgoingBatch(torch.ones(1000), 1, 1)
    shipment = lane.load(departure)
    counts = []
    for number in range(4):
        lane.share(number, departure.schema, departure.size, shipment, lambda wait: pytest.fail("no room"))
        assert (read(end) == 1).all()
        counts.append(descriptors())
        # As after so many others that it does not know any more what it has sent.
        lane._known.clear()
    assert counts == counts[:1] * 4


def test_memory_that_its_source_has_let_go_of_is_not_kept() -> None:
    near, far = socket.socketpair()
    # It keeps none of these.
    lane = SharedMemorySender(1, near, 1 << 20)
    lane.introduce()
    end = SharedMemoryReceiver(far, os.getpid(), awake=False)

    def share(number: int) -> Any:
        departure = OutgoingBatch(torch.full((1 << 19,), float(number)), 1, 1)
        lane.share(
            number,
            departure.schema,
            departure.size,
            lane.load(departure),
            lambda wait: pytest.fail("it waits for room"),
        )
        return read(end)

    begin = descriptors()
    kept = [share(number) for number in range(10)]
    assert all((batch == number).all() for number, batch in enumerate(kept))
    kept.clear()
    share(10)
    # That of the last one, at its source and here, and what the kernel has of it for whoever looked at it.
    assert descriptors() - begin <= 8
    end.close()
    lane.close()
