"""BufferReceiver: memory that one process writes and another receives, and when it is used again."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from support.shm.array_tasks import METHODS
from support.shm.leftovers import descriptors, mapped

import tundish as td
from tundish._native import BufferReceiver, SegmentArena


def packed(arena: SegmentArena, contents: bytes) -> Any:
    buffer = arena.take(len(contents))
    with memoryview(buffer) as room:
        room[:] = contents
    return buffer


def test_a_buffer_arrives_and_is_its_receivers_to_write() -> None:
    arena, buffers = SegmentArena(), BufferReceiver()
    buffer = packed(arena, b"hello")
    assert len(buffer) == 5
    view = buffers.open(buffer.reference())
    buffer.release()
    assert len(view) == 5
    array = np.frombuffer(view, np.uint8)
    del view
    array[0] = ord("j")
    assert array.tobytes() == b"jello"


def test_memory_is_used_again_only_after_the_receiver_opened_and_dropped_it() -> None:
    arena, buffers = SegmentArena(), BufferReceiver()
    first = packed(arena, b"1" * 1000)
    reference = first.reference()
    first.release()
    first.release()
    # Sent but not received: it must not be overwritten.
    second = packed(arena, b"2" * 1000)
    assert second.reference()[2] != reference[2]
    view = buffers.open(reference)
    # Received: it must not be overwritten.
    third = packed(arena, b"3" * 1000)
    assert third.reference()[2] not in (reference[2], second.reference()[2])
    assert bytes(view) == b"1" * 1000
    assert arena.stats()["escaped_bytes"] > 0
    del view
    fourth = packed(arena, b"4" * 1000)
    again = fourth.reference()
    assert again[:3] == reference[:3] and again[3] > reference[3]
    with pytest.raises(td.errors.SegmentGoneError, match="its sender has taken it back"):
        buffers.open(reference)
    assert bytes(buffers.open(again)) == b"4" * 1000


def test_a_buffer_that_was_not_sent_is_used_again_at_once() -> None:
    arena = SegmentArena()
    inodes = set()
    for _ in range(3):
        buffer = packed(arena, b"x")
        inodes.add(os.fstat(buffer.descriptor).st_ino)
        del buffer
    assert len(inodes) == 1


def test_a_receiver_of_a_revoked_buffer_is_refused() -> None:
    arena, buffers = SegmentArena(), BufferReceiver()
    buffer = packed(arena, b"x")
    reference = buffer.reference()
    buffer.revoke()
    with pytest.raises(td.errors.SegmentGoneError, match="its sender has taken it back"):
        buffers.open(reference)
    assert arena.stats()["in_use_bytes"] == 0
    with pytest.raises(ValueError, match="given back already") as caught:
        buffer.reference()
    assert isinstance(caught.value, td.TundishError)
    with pytest.raises(BufferError, match="given back already"):
        memoryview(buffer)


def test_a_revoked_buffer_that_was_received_stays_with_its_receiver() -> None:
    arena, buffers = SegmentArena(), BufferReceiver()
    buffer = packed(arena, b"mine")
    view = buffers.open(buffer.reference())
    buffer.revoke()
    other = packed(arena, b"next")
    assert bytes(view) == b"mine" and len(other) == 4


def test_a_buffer_in_use_delays_the_release() -> None:
    arena = SegmentArena()
    buffer = arena.take(8)
    array = np.frombuffer(buffer, np.uint8)
    buffer.release()
    other = packed(arena, b"y" * 8)
    array[:] = 1
    assert bytes(other) == b"y" * 8
    assert arena.stats()["cached_bytes"] == 0
    del array
    assert arena.stats()["cached_bytes"] > 0


def test_sizes_share_memory_and_none_is_too_small() -> None:
    arena, buffers = SegmentArena(), BufferReceiver()
    assert len(packed(arena, b"")) == 0
    for size in (0, 1, 65_536, 65_537, 1_000_003, 400_000, 3 << 20):
        buffer = packed(arena, os.urandom(size))
        with memoryview(buffer) as room:
            sent = bytes(room)
        assert bytes(buffers.open(buffer.reference())) == sent
        buffer.release()
    assert arena.stats()["peak_bytes"] < 6 << 20


def test_the_arena_keeps_no_more_than_its_limit() -> None:
    arena, before = SegmentArena(1 << 20), len(mapped())
    buffers = [arena.take(400_000) for _ in range(5)]
    for buffer in buffers:
        buffer.release()
    stats = arena.stats()
    assert 0 < stats["cached_bytes"] <= 1 << 20 and stats["in_use_bytes"] == 0
    assert len(mapped()) - before == 2
    nothing = SegmentArena(0)
    packed(nothing, b"x").release()
    assert nothing.stats()["cached_bytes"] == 0


def test_a_receiver_drops_segments_that_their_sender_dropped() -> None:
    arena, buffers = SegmentArena(0), BufferReceiver()
    before = len(descriptors())
    for _ in range(20):
        buffer = packed(arena, b"x" * 100_000)
        buffers.open(buffer.reference())
        buffer.release()
        arena.stats()
    # One that was dropped after the last one was received.
    assert len(descriptors()) - before <= 1


def test_a_reference_that_leads_elsewhere_is_refused() -> None:
    arena, buffers = SegmentArena(), BufferReceiver()
    buffer, other = packed(arena, b"x" * 100), packed(arena, b"y")
    process, descriptor, identity, generation, size = buffer.reference()
    assert other.reference()[2] != identity
    with pytest.raises(td.TundishError, match="another segment has taken its place"):
        buffers.open((process, other.descriptor, identity, generation, size))
    with pytest.raises(td.TundishError, match="it has no room for 1000000 bytes"):
        buffers.open((process, descriptor, identity, generation, 1_000_000))
    with pytest.raises(OSError, match="cannot open"):
        buffers.open((process, 9999, identity + 1, generation, size))
    assert bytes(buffers.open(buffer.reference())) == b"x" * 100


def answer(line: Connection) -> None:
    """Sends each buffer back with every byte plus one, and keeps nothing."""
    arena, buffers = SegmentArena(), BufferReceiver()
    while (reference := line.recv()) is not None:
        received = np.frombuffer(buffers.open(reference), np.uint8)
        buffer = arena.take(received.nbytes)
        np.add(received, 1, out=np.frombuffer(buffer, np.uint8))
        line.send((buffer.reference(), received.ctypes.data))
        buffer.release()
        del received, buffer


@pytest.mark.parametrize("method", METHODS)
def test_buffers_go_to_a_process_and_back_through_the_same_memory(method: str) -> None:
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=answer, args=(theirs,), daemon=True)
    child.start()
    arena, buffers = SegmentArena(), BufferReceiver()
    there, back, addresses = set(), set(), set()
    for number in range(50):
        buffer = packed(arena, bytes([number]) * 500_000)
        ours.send(buffer.reference())
        there.add(buffer.reference()[2])
        assert ours.poll(60)
        reference, address = ours.recv()
        buffer.release()
        back.add(reference[2])
        addresses.add(address)
        assert bytes(buffers.open(reference)) == bytes([number + 1]) * 500_000
    # The child may still hold one while the next is written.
    assert max(len(there), len(back), len(addresses)) <= 2
    ours.send(None)
    child.join(60)
    assert child.exitcode == 0
    child.close()
    ours.close()
    theirs.close()


def die(line: Connection) -> None:
    import array
    import socket

    buffer = packed(SegmentArena(), b"last words")
    with socket.socket(fileno=os.dup(line.fileno())) as ours:
        ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [buffer.descriptor]))])
    line.send((buffer.reference(), os.getpid()))
    os.kill(os.getpid(), 9)


def test_a_buffer_outlives_its_sender_where_the_descriptor_came_before() -> None:
    import socket

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=die, args=(theirs,), daemon=True)
    child.start()
    theirs.close()
    with socket.socket(fileno=os.dup(ours.fileno())) as line:
        _, (descriptor,), *_ = socket.recv_fds(line, 1, 1)
    reference, sender = ours.recv()
    child.join(60)
    child.close()
    ours.close()
    without = BufferReceiver()
    with pytest.raises(OSError, match="cannot open"):
        without.open(reference)
    buffers = BufferReceiver()
    buffers.adopt(descriptor, sender)
    view = buffers.open(reference)
    buffers.forget(sender)
    assert bytes(view) == b"last words"


def test_a_child_made_by_fork_uses_its_own() -> None:
    arena, buffers = SegmentArena(), BufferReceiver()
    buffer = packed(arena, b"x")
    reference = buffer.reference()
    pid = os.fork()
    if pid == 0:
        refused = 0
        for use in (lambda: arena.take(1), buffer.reference, lambda: buffers.open(reference)):
            try:
                use()
            except ValueError:
                refused += 1
        buffer.revoke()
        os._exit(0 if refused == 3 and bytes(BufferReceiver().open(reference)) == b"x" else 1)
    assert os.waitpid(pid, 0)[1] == 0
    buffer.release()
    # The child has acknowledged it.
    assert arena.stats()["in_use_bytes"] == 0


def test_buffers_of_a_dead_sender_can_be_opened() -> None:
    arena, buffers = SegmentArena(), BufferReceiver()
    references, sent = [], []
    for number in range(3):
        buffer = packed(arena, bytes([number]) * 1000)
        references.append(buffer.reference())
        sent.append(os.dup(buffer.descriptor))
        buffer.release()
        del buffer
    # Its sender has ended, and the memory stays.
    del arena
    for descriptor in sent:
        buffers.adopt(descriptor, os.getpid())
    for number, reference in enumerate(references):
        assert bytes(buffers.open(reference)) == bytes([number]) * 1000
    assert buffers.views == 0
