"""A worker process: it binds the function to the shared arguments, takes tasks from the queue, runs them, and answers.

A forked worker inherits the arguments. For other workers, arrays are copied to shared memory once, and everything else
is pickled once. Both happen when the pool is made, so an argument that cannot be sent is refused then.

Invariants:

- Every task that is taken is answered, whatever it returns or raises, unless the process dies.
- The process ends when the parent does, even in the middle of a task. A native thread, which needs no GIL, watches.
- Workers ignore Ctrl-C, which the parent handles.
- While a worker waits for a task, it keeps nothing of the task before.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pickle import dumps, loads
from types import FunctionType
from typing import Any

import numpy as np

from tundish import _native
from tundish.errors import InvalidTypeError, NotPicklableError
from tundish.shm import messages
from tundish.shm.messages import (
    CHUNK,
    FAILED,
    GO_ON,
    IN_BUFFER,
    MEMORY,
    PICKLE_PROTOCOL,
    READY,
    SINGLE,
    MessagePacker,
    PackedError,
    send_to_parent,
)
from tundish.shm.shared_array import SharedArray


def bind_inherited(function: Callable[..., Any], shared: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Bind the arguments that a forked worker inherits. Arrays are read-only."""
    torch = sys.modules.get("torch")
    if torch is not None:
        # The threads of torch do not exist after a fork: an operation that uses them would wait for ever.
        torch.set_num_threads(1)
    return _bind(function, {name: _read_only(value) for name, value in shared.items()})


def _bind(function: Callable[..., Any], shared: Mapping[str, Any]) -> Callable[[Any], Any]:
    code = function.__code__ if isinstance(function, FunctionType) else None
    if code is not None and code.co_varnames[1 : min(1 + len(shared), code.co_argcount)] == tuple(shared):
        values = tuple(shared.values())
        # An empty task takes half the time that it takes with keyword arguments.
        return lambda item: function(item, *values)
    return partial(function, **shared)


def _read_only(value: Any) -> Any:
    if isinstance(value, SharedArray):
        return SharedArray.attach(value.handle)
    if not isinstance(value, np.ndarray):
        return value
    view = value.view()
    view.flags.writeable = False
    return view


class SendableFunction:
    """A function and its shared arguments, ready to be sent to any number of workers.

    Raises:
        NotPicklableError: the function or an argument cannot be pickled.
        OutOfMemoryError: there is no room for the arrays.
    """

    def __init__(self, function: Callable[..., Any], shared: Mapping[str, Any]) -> None:
        self._function = _sent(function, "the function")
        self._shared = {name: _sendable(name, value) for name, value in shared.items()}
        self._tensors = {name for name, value in shared.items() if not isinstance(value, np.ndarray)}

    def load(self) -> Callable[[Any], Any]:
        """Return the function as a worker calls it."""
        shared: dict[str, Any] = {}
        for name, sent in self._shared.items():
            if isinstance(sent, bytes):
                shared[name] = _received(sent, f"shared[{name!r}]")
            else:
                shared[name] = sent.tensor() if name in self._tensors else sent.array
        return _bind(_received(self._function, "the function"), shared)


def _sendable(name: str, value: Any) -> SharedArray | bytes:
    torch = sys.modules.get("torch")
    # A subclass may have more than the values of the array.
    if type(value) in (np.ndarray, np.memmap) or (torch is not None and isinstance(value, torch.Tensor)):
        with contextlib.suppress(InvalidTypeError):
            return SharedArray.from_array(value)
    return _sent(value, f"shared[{name!r}]")


def _sent(value: Any, what: str) -> bytes:
    try:
        return dumps(value, PICKLE_PROTOCOL)
    except Exception as error:
        raise NotPicklableError(
            f"{what} cannot be sent to workers that are not forked: {error}; define it at the top level of a module, "
            'or use mp_context="fork"'
        ) from error


def _received(stream: bytes, what: str) -> Any:
    try:
        return loads(stream)
    except (AttributeError, ImportError) as error:
        raise NotPicklableError(
            f"{what} is not found by workers that are not forked: {error}; define it in a module that they can import, "
            'which a notebook, a console and `python -c` are not, or use mp_context="fork"'
        ) from error


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
            flag, content, lease = _run_chunk(call, item, packer, goes_on=bool(kind & GO_ON))
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
    call: Call, items: list[Any], packer: MessagePacker, *, goes_on: bool
) -> tuple[int, Any, _native.SentBuffer | None]:
    """Pack three values: seconds, results, and errors by their places among the results, which have None there.

    Unless it `goes_on`, there is at most one error, and no result behind it.
    """
    results: list[Any] = []
    failures: dict[int, PackedError] = {}
    items_left = iter(items)
    began = time.perf_counter()
    while len(results) < len(items) and (goes_on or not failures):
        try:
            for item in items_left:
                results.append(call(item))  # noqa: PERF401 (those before an error are results)
        except BaseException as error:  # noqa: BLE001 (sent to the parent)
            failures[len(results)] = messages.packed_error(error)
            results.append(None)
    seconds = time.perf_counter() - began
    try:
        return packer.pack((seconds, results, failures))
    except NotPicklableError:
        for place, result in enumerate(results):
            try:
                messages.check_picklable(result)
            except NotPicklableError as error:
                failures[place], results[place] = messages.packed_error(error), None
                if not goes_on:
                    return packer.pack((seconds, results[: place + 1], {place: failures[place]}))
        return packer.pack((seconds, results, failures))
