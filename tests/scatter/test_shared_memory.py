"""The two ends of a shared-memory channel, in one process."""

from __future__ import annotations

import gc
import os
import resource
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tundish.errors import OutOfMemoryError, StorageError, TundishError
from tundish.scatter.batch_bytes import IncomingBatch, OutgoingBatch
from tundish.scatter.transport import shared_memory
from tundish.scatter.transport.message import MessageKind
from tundish.scatter.transport.shared_memory import SharedMemoryReceiver, SharedMemorySender

Channel = tuple[SharedMemorySender, SharedMemoryReceiver]


@pytest.fixture
def channel() -> Iterator[Channel]:
    one, other = socket.socketpair()
    sender = SharedMemorySender(1, one, 1 << 30)
    sender.send_queue()
    receiver = SharedMemoryReceiver(other, os.getpid())
    receiver.receive_queue()
    yield sender, receiver
    receiver.close()
    sender.close()


def never(_: Any) -> None:
    pytest.fail("it waits for room")


def send(sender: SharedMemorySender, step: int, value: Any, *, is_shared: bool = False) -> None:
    batch = OutgoingBatch(value, 1, 1)
    lease = sender.write(batch, never)
    sender.send(step, batch.size, len(batch.encoded_schema), lease, never, is_shared=is_shared)


def receive(receiver: SharedMemoryReceiver) -> Any:
    assert receiver.wait(20)
    content = receiver.read().content
    return content.build(None) if isinstance(content, IncomingBatch) else content


class Failing:
    """The receiver's memory, in which the first descriptor cannot be mapped."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._has_failed = False

    def adopt(self, descriptor: int, sender: int) -> None:
        if not self._has_failed:
            self._has_failed = True
            os.close(descriptor)
            raise OutOfMemoryError("there is no room for it")
        self._memory.adopt(descriptor, sender)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)


def test_the_message_after_an_unreadable_one_can_be_read(channel: Channel) -> None:
    sender, receiver = channel
    receiver._memory = Failing(receiver._memory)  # type: ignore[assignment]
    for number in range(3):
        send(sender, number, torch.full((1 << 18,), float(number)))
    assert receiver.wait(20)
    with pytest.raises(OutOfMemoryError):
        receiver.read()
    for number in (1, 2):
        assert (receive(receiver) == number).all()


def test_a_receiver_without_descriptors_says_so_and_gets_the_next_batch(channel: Channel) -> None:
    sender, receiver = channel
    send(sender, 0, torch.zeros(1 << 18))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        assert receiver.wait(20)
        with pytest.raises(StorageError, match="ulimit -n"):
            receiver.read()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    send(sender, 1, torch.ones(1 << 18))
    assert bool((receive(receiver) == 1).all())


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_batch_that_is_kept_does_not_change(channel: Channel, is_shared: bool) -> None:
    sender, receiver = channel
    kept = []
    for number in range(20):
        send(sender, number, {"x": torch.full((1000,), number)}, is_shared=is_shared)
        kept.append(receive(receiver)["x"])
    assert all(bool((one == number).all()) for number, one in enumerate(kept))


def test_a_receiver_that_keeps_many_batches_gets_copies(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "MAX_LEASES", 5)
    sender, receiver = channel
    kept = []
    for number in range(20):
        send(sender, number, torch.full((1000,), number))
        kept.append(receive(receiver))
    assert receiver._memory.views <= 6
    assert all(bool((one == number).all()) for number, one in enumerate(kept))


def test_memory_is_used_again(channel: Channel) -> None:
    sender, receiver = channel
    for number in range(50):
        send(sender, number, torch.full((1 << 18,), number))
        assert bool((receive(receiver) == number).all())
        gc.collect()
    assert len(sender._known_segments) <= 4


def test_a_schema_may_have_any_length(channel: Channel) -> None:
    sender, receiver = channel
    for number, length in enumerate([0, 10, 100_000, 10]):
        for tensors in ([], [torch.arange(5)]):
            send(sender, number, {"text": "x" * length, "tensors": tensors})
            mine = receive(receiver)
            assert mine["text"] == "x" * length and len(mine["tensors"]) == len(tensors)


def test_a_sender_waits_for_room_except_with_errors(channel: Channel) -> None:
    sender, receiver = channel
    for number in range(4):
        send(sender, number, [number])

    def give_up(_: Any) -> None:
        raise TimeoutError

    batch = OutgoingBatch([4], 1, 1)
    with pytest.raises(TimeoutError):
        sender.write(batch, give_up)
    for number in (4, 5):
        sender.send_text(number, MessageKind.FAILED, "é" * 100_000, never)
    with pytest.raises(TimeoutError):
        sender.send_text(6, MessageKind.FAILED, "", give_up)
    assert [receive(receiver) for _ in range(4)] == [[0], [1], [2], [3]]
    texts = [receive(receiver) for _ in range(2)]
    assert set("".join(texts)) == {"é"} and len(texts[0]) > 10_000


def test_a_damaged_schema_is_refused(channel: Channel) -> None:
    sender, receiver = channel
    batch = OutgoingBatch([torch.arange(3)], 1, 1)
    lease = sender.write(batch, never)
    sender.send(0, batch.size, 5, lease, never, is_shared=False)
    assert receiver.wait(20)
    with pytest.raises(TundishError):
        receiver.read()
    send(sender, 1, "next")
    assert receive(receiver) == "next"
