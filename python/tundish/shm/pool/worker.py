"""A worker process: it takes tasks from the queue, runs them, and answers.

Invariants:

- Every task that is taken is answered, whatever it returns or raises, unless the process dies.
- The process ends when the parent does, even in the middle of a task. A native thread, which needs no GIL, watches.
- Workers ignore Ctrl-C, which the parent handles.
- While a worker waits for a task, it keeps nothing of the task before.
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
from tundish.shm.pool.messages import CHUNK, IN_BUFFER, SINGLE, MessagePacker, PackedError, loads
from tundish.shm.pool.worker_messages import FAILED, MEMORY, READY, send_to_parent

__all__ = ["ParentLink", "serve"]

Call = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class ParentLink:
    """The descriptors of a worker's queue and control socket, and the process id of its parent."""

    queue: int
    control: int
    parent: int


def serve(link: ParentLink, worker: int, load: Callable[[], Call]) -> None:
    """Run tasks as worker number `worker` until the pool ends; `load` returns the function."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _native.exit_with_parent(link.control, link.parent)
    try:
        call = load()
    except Exception as error:  # noqa: BLE001 (sent to the parent)
        _, summary, text = messages.packed_error(error)
        send_to_parent(link.control, FAILED, worker, f"{summary}\n{text}")
        raise SystemExit(1) from None
    queue = _native.TaskQueue.open(link.queue)

    def send_descriptor(buffer: _native.SendBuffer) -> None:
        send_to_parent(link.control, MEMORY, worker, descriptors=[buffer.descriptor])

    packer = MessagePacker(send_descriptor)
    send_to_parent(link.control, READY, worker)
    while (task := queue.take(worker, None)) is not None:
        _run(call, queue, packer, *task)
        del task


def _run(
    call: Call, queue: _native.TaskQueue, packer: MessagePacker, task_id: int, kind: int, payload: Any
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
            # A plain value takes one call.
            if queue.finish_plain(task_id, SINGLE, result):
                return
            flag, content, lease = packer.pack(result)
    except BaseException as error:  # noqa: BLE001 (sent to the parent)
        flag, content, lease = messages.pack_error(error, packer)
    queue.finish(task_id, kind & CHUNK | flag, content)
    if lease is not None:
        # The memory is used again when the parent has opened and dropped it.
        lease.buffer.release()


def _run_chunk(
    call: Call, items: list[Any], packer: MessagePacker
) -> tuple[int, Any, _native.SentBuffer | None]:
    """Pack three values: seconds, results before the first error, and that error or None."""
    results: list[Any] = []
    failure: PackedError | None = None
    began = time.perf_counter()
    try:
        for item in items:
            results.append(call(item))  # noqa: PERF401 (those before an error are results)
    except BaseException as error:  # noqa: BLE001 (sent to the parent)
        failure = messages.packed_error(error)
    seconds = time.perf_counter() - began
    try:
        return packer.pack((seconds, results, failure))
    except NotPicklableError:
        for place, result in enumerate(results):
            try:
                messages.check_picklable(result)
            except NotPicklableError as error:
                return packer.pack((seconds, results[:place], messages.packed_error(error)))
        raise
