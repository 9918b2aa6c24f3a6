"""A worker process: it takes tasks from the queue, runs them, and answers.

Invariants:

- Every task that is taken is answered, whatever it returns or raises, unless the process dies.
- The process ends when its pool's parent does, even in the middle of a task: a thread of the compiled module watches,
  which needs no GIL.
- Workers ignore Ctrl-C: it is for the parent.
- While it waits for a task, a worker keeps nothing of the one before.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tundish import _native
from tundish.errors import NotPicklableError
from tundish.shm.pool import messages
from tundish.shm.pool.control_socket import FAILED, MEMORY, READY, send_to_parent
from tundish.shm.pool.messages import CHUNK, IN_BUFFER, SINGLE, MessagePacker, PackedError, loads

__all__ = ["ParentLink", "serve"]

Call = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class ParentLink:
    """A worker's link to its parent: descriptors of queue and control socket, and the parent's process id."""

    queue: int
    control: int
    parent: int


def serve(link: ParentLink, worker: int, load: Callable[[], Call]) -> None:
    """Be worker number `worker` until the parent ends the pool; `load` returns the function."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _native.exit_with_parent(link.control, link.parent)
    try:
        call = load()
    except Exception as error:  # noqa: BLE001 (sent to the parent)
        _, summary, text = messages.describe_error(error)
        send_to_parent(link.control, FAILED, worker, f"{summary}\n{text}")
        raise SystemExit(1) from None
    queue = _native.TaskQueue.open(link.queue)

    def announce(buffer: _native.SendBuffer) -> None:
        send_to_parent(link.control, MEMORY, worker, descriptors=[buffer.descriptor])

    packer = MessagePacker(announce)
    send_to_parent(link.control, READY, worker)
    while (task := queue.take(worker, None)) is not None:
        _run(call, queue, packer, *task)
        del task


def _run(
    call: Call, queue: _native.TaskQueue, packer: MessagePacker, ticket: int, kind: int, payload: Any
) -> None:
    try:
        item = payload
        if kind & IN_BUFFER:
            item = packer.open(payload).copied().value()
        elif type(payload) is bytes:
            item = loads(payload)
        if kind & CHUNK:
            flag, content, lease = _run_chunk(call, item, packer)
        else:
            result = call(item)
            # Most results if there are many: plain values take one call.
            if queue.finish_plain(ticket, SINGLE, result):
                return
            flag, content, lease = packer.pack(result)
    except BaseException as error:  # noqa: BLE001 (the task's)
        flag, content, lease = messages.pack_error(error, packer)
    queue.finish(ticket, kind & CHUNK | flag, content)
    if lease is not None:
        # The memory is used again when the parent has let go of it.
        lease.buffer.release()


def _run_chunk(
    call: Call, items: list[Any], packer: MessagePacker
) -> tuple[int, Any, _native.BufferLease | None]:
    """The packed seconds, results before the first error, and that error or None."""
    results: list[Any] = []
    failure: PackedError | None = None
    began = time.perf_counter()
    try:
        for item in items:
            results.append(call(item))  # noqa: PERF401 (those before an error are results)
    except BaseException as error:  # noqa: BLE001 (the task's)
        failure = messages.describe_error(error)
    seconds = time.perf_counter() - began
    try:
        return packer.pack((seconds, results, failure))
    except NotPicklableError:
        for place, result in enumerate(results):
            try:
                messages.check_picklable(result)
            except NotPicklableError as error:
                return packer.pack((seconds, results[:place], messages.describe_error(error)))
        raise
