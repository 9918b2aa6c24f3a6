"""A worker process: it takes tasks from the queue, runs them, and answers.

Invariants:

- Every task that is taken is answered, whatever it returns or raises, unless the process dies.
- The process ends when its pool's parent does, even in the middle of a task: a thread of the compiled module watches,
  which needs no GIL.
- Workers ignore Ctrl-C: it is for the parent.
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
from tundish.shm.pool.messages import CHUNK, IN_BUFFER, ITEM, VALUE, VALUES, MessagePacker, loads

__all__ = ["WorkerLink", "serve"]

Call = Callable[[Any], Any]
# Kind, payload, and the buffer that the payload refers to.
_Answer = tuple[int, Any, _native.SendBuffer | None]


@dataclass(frozen=True, kw_only=True)
class WorkerLink:
    """What a worker has of its parent: descriptors of queue and control socket, and the process id."""

    queue: int
    control: int
    parent: int


def serve(link: WorkerLink, worker: int, load: Callable[[], Call]) -> None:
    """Be worker number `worker` until the parent ends the pool; `load` returns the function."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _native.exit_with_parent(link.control, link.parent)
    try:
        call = load()
    except Exception as error:  # noqa: BLE001 (told to the parent)
        _, summary, text = messages.describe_error(error)
        send_to_parent(link.control, FAILED, worker, f"{summary}\n{text}")
        raise SystemExit(1) from None
    queue = _native.TaskQueue.open(link.queue)

    def announce(buffer: _native.SendBuffer) -> None:
        send_to_parent(link.control, MEMORY, worker, descriptors=[buffer.descriptor])

    packer = MessagePacker(announce)
    send_to_parent(link.control, READY, worker)
    _work(call, queue, worker, packer)


def _work(call: Call, queue: _native.TaskQueue, worker: int, packer: MessagePacker) -> None:
    take, finish_plain = queue.take, queue.finish_plain
    while (task := take(worker, None)) is not None:
        ticket, kind, payload = task
        if kind == ITEM and type(payload) is not bytes:
            # Most tasks where there are many: plain values are not pickled, and sent with one call.
            try:
                value = call(payload)
            except BaseException as error:  # noqa: BLE001 (the task's)
                answer, content, buffer = messages.pack_error(error, packer)
            else:
                if finish_plain(ticket, VALUE, value):
                    continue
                answer, content, buffer = _packed(value, packer)
                del value
        else:
            answer, content, buffer = _answer(call, kind, payload, packer)
        queue.finish(ticket, answer, content)
        if buffer is not None:
            buffer.release()
        # While it waits, a worker keeps nothing of what it worked on.
        del task, payload, content, buffer


def _answer(call: Call, kind: int, payload: Any, packer: MessagePacker) -> _Answer:
    try:
        content = packer.open(payload).copied().value() if kind & IN_BUFFER else loads(payload)
        if kind & CHUNK:
            return _run_chunk(call, content, packer)
        value = call(content)
    except BaseException as error:  # noqa: BLE001 (the task's)
        return messages.pack_error(error, packer)
    return _packed(value, packer)


def _packed(value: Any, packer: MessagePacker) -> _Answer:
    try:
        flag, payload, buffer = packer.pack(value)
    except BaseException as error:  # noqa: BLE001 (the task's)
        return messages.pack_error(error, packer)
    return VALUE | flag, payload, buffer


def _run_chunk(call: Call, items: list[Any], packer: MessagePacker) -> _Answer:
    results: list[Any] = []
    failure = None
    began = time.perf_counter()
    try:
        for item in items:
            results.append(call(item))  # noqa: PERF401 (those before an error are results)
    except BaseException as error:  # noqa: BLE001 (the task's)
        failure = messages.describe_error(error)
    seconds = time.perf_counter() - began
    try:
        flag, stream, buffer = packer.pack((seconds, results, failure))
    except NotPicklableError:
        results, failure = _sendable(results)
        flag, stream, buffer = packer.pack((seconds, results, failure))
    return VALUES | flag, stream, buffer


def _sendable(results: list[Any]) -> tuple[list[Any], tuple[bytes | None, str, str] | None]:
    """The results before the first that cannot be pickled, and the error for that one."""
    for place, result in enumerate(results):
        try:
            messages.check_picklable(result)
        except NotPicklableError as error:
            return results[:place], messages.describe_error(error)
    return results, None
