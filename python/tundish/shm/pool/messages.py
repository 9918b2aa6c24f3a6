"""What travels between a pool's parent and its workers: items, results, exceptions.

Owns how a value becomes the payload of a slot of the task board and back. What always holds:

1. A payload fits its slot. What does not, and every buffer of `LARGE_BYTES` or more, lies in a parcel (a segment
   of an arena), which the payload refers to: an array is copied once on its way, never pickled. Plain values (numbers,
   short texts) are payloads as they are; all other payloads are bytes.
2. Whatever a task returns or raises can be answered: what cannot be pickled, here or there, becomes an error
   that says so and carries the worker's traceback.

The pickles are those of protocol 5 with out-of-band buffers (PEP 574); they never leave a pool's own processes.
"""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Callable
from pickle import dumps, loads
from typing import Any, Final

from tundish import _native
from tundish.errors import NotPicklableError

__all__ = [
    "CHUNK",
    "ERROR",
    "IN_PARCEL",
    "ITEM",
    "LOST",
    "PROTOCOL",
    "VALUE",
    "VALUES",
    "Arrival",
    "Courier",
    "RemoteTraceback",
    "cannot_unpickle",
    "check_picklable",
    "describe_error",
    "dumps",
    "loads",
    "pack_error",
    "unpack",
    "unpack_error",
]

# Kinds of tasks, and of answers. `IN_PARCEL` is added where the payload only refers to a parcel.
ITEM: Final = 0
CHUNK: Final = 2
VALUE: Final = 0
VALUES: Final = 2
ERROR: Final = 4
IN_PARCEL: Final = 1
# Never on the board: the answer is an exception of the parent's own.
LOST: Final = 8

PROTOCOL: Final = 5
# Below this, copying a buffer into the pickle and out of it costs less than a segment of its own.
LARGE_BYTES: Final = 64 * 1024

_ALIGNMENT = 64
# Whose frames come before those of the function.
_CALLERS: Final = frozenset({"tundish.shm.pool.worker", "tundish.shm.pool.binding"})


class RemoteTraceback(Exception):
    """The traceback in the worker, as the cause of the exception that the parent raises."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Arrival:
    """An answer in a parcel, opened as soon as it came, so that it outlives the worker that wrote it."""

    __slots__ = ("_table_bytes", "_view", "nbytes")

    def __init__(self, view: memoryview, table_bytes: int) -> None:
        self.nbytes = view.nbytes
        self._view = view
        self._table_bytes = table_bytes

    def value(self) -> Any:
        """The value; its arrays are views of the parcel, which goes back when the last of them is gone."""
        stream, buffers = _parts(self._view, self._table_bytes)
        return loads(stream, buffers=buffers)

    def copied(self) -> Arrival:
        """The same in memory of this process's own; the parcel goes back with this one."""
        return Arrival(memoryview(bytearray(self._view)), self._table_bytes)

    def copied_value(self) -> Any:
        """The value with arrays of its own."""
        stream, buffers = _parts(self._view, self._table_bytes)
        return loads(stream, buffers=[bytearray(buffer) for buffer in buffers])


class Courier:
    """Packs values into payloads of at most `room` bytes and parcels of its own, and opens those of others.

    `announce` is called with the parcel whenever one lies in memory that no parcel of this courier lay in before.
    """

    def __init__(self, room: int, announce: Callable[[_native.SendBuffer], None] | None = None) -> None:
        self.room = room
        self.parcels = _native.BufferReceiver()
        self._announce = announce
        self._announced: set[int] = set()
        self._arena: _native.SegmentArena | None = None

    def pack(self, value: Any) -> tuple[int, Any, _native.SendBuffer | None]:
        """`IN_PARCEL` or 0, the payload, and the parcel, which the caller gives back.

        Raises:
            NotPicklableError: `value` cannot be pickled.
            OutOfMemoryError: there is no room for the parcel.
        """
        if _native.is_plain(value, self.room):
            return 0, value, None
        buffers: list[memoryview] = []
        stream = _pickled(value, buffers)
        if not buffers and len(stream) <= self.room:
            return 0, stream, None
        lengths = [buffer.nbytes for buffer in buffers]
        table = dumps((stream, lengths), PROTOCOL)
        starts, end = _layout(len(table), lengths)
        if self._arena is None:
            self._arena = _native.SegmentArena()
        parcel = self._arena.take(end)
        with memoryview(parcel) as room:
            room[: len(table)] = table
            for start, buffer in zip(starts, buffers, strict=True):
                room[start : start + buffer.nbytes] = buffer
        reference = parcel.reference()
        identity = reference[2]
        if self._announce is not None and identity not in self._announced:
            self._announce(parcel)
            self._announced.add(identity)
        return IN_PARCEL, dumps((reference, len(table)), PROTOCOL), parcel

    def disown(self) -> None:
        """Let go of what is kept for the next messages, in a child made by `fork`: nothing travels from there."""
        self._arena = None
        self.parcels = _native.BufferReceiver()

    def open(self, payload: bytes) -> Arrival:
        """The parcel that `payload` refers to; once."""
        reference, table_bytes = loads(payload)
        return Arrival(memoryview(self.parcels.open(reference)), table_bytes)


def pack_error(error: BaseException, courier: Courier) -> tuple[int, Any, _native.SendBuffer | None]:
    """`error` of a task, with its traceback, as a payload; whatever it is."""
    packed = describe_error(error)
    try:
        flag, payload, parcel = courier.pack(packed)
    except Exception:  # noqa: BLE001 (an error is always told)
        # No memory for the whole of it; the end of a traceback says most.
        _, summary, text = packed
        flag, payload, parcel = courier.pack((None, summary[:1000], text[-4000:]))
    return ERROR | flag, payload, parcel


def describe_error(error: BaseException) -> tuple[bytes | None, str, str]:
    """The pickle of `error`, if there can be one, a line about it, and its traceback."""
    summary = _summary_of(error)
    try:
        stream: bytes | None = dumps(error, PROTOCOL)
    except BaseException as failure:  # noqa: BLE001 (code of users)
        _let_interrupt_pass(failure)
        stream, summary = None, f"{summary} ({_summary_of(failure)})"
    return stream, summary, _traceback_of(error)


def unpack(kind: int, payload: Any) -> tuple[Any, BaseException | None]:
    """The value of an answer, or the exception that stands for it.

    `payload`: bytes or a plain value, with `IN_PARCEL` an `Arrival`, with `LOST` the exception itself.
    """
    if kind == LOST:
        return None, payload
    if kind == VALUE and type(payload) is not bytes:
        return payload, None
    try:
        value = payload.value() if kind & IN_PARCEL else loads(payload)
    except BaseException as error:  # noqa: BLE001 (code of users)
        _let_interrupt_pass(error)
        return None, cannot_unpickle(error)
    if kind & ERROR:
        return None, unpack_error(value)
    return value, None


def cannot_unpickle(error: BaseException) -> NotPicklableError:
    """What to raise where a result is there and `error`, its cause, came of unpickling it."""
    failure = NotPicklableError(f"a result came but cannot be unpickled here: {_summary_of(error)}")
    failure.__cause__ = error
    return failure


def unpack_error(packed: tuple[bytes | None, str, str]) -> BaseException:
    """The exception that `describe_error` packed, its cause the worker's traceback."""
    stream, summary, text = packed
    loaded: Any = None
    if stream is not None:
        try:
            loaded = loads(stream)
        except BaseException as failure:  # noqa: BLE001 (code of users)
            _let_interrupt_pass(failure)
            summary = f"{summary} ({_summary_of(failure)})"
    error = (
        loaded
        if isinstance(loaded, BaseException)
        else NotPicklableError(
            f"a task raised an exception that cannot be sent between processes: {summary}; "
            "its traceback in the worker is shown as this error's cause"
        )
    )
    # Also where its class lets no attribute be set.
    BaseException.__setattr__(error, "__cause__", RemoteTraceback(text))
    return error


def _pickled(value: Any, buffers: list[memoryview]) -> bytes:
    """The pickle of `value`; its large buffers go to `buffers`."""

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:
            return True
        if raw.nbytes < LARGE_BYTES:
            return True
        buffers.append(raw)
        return False

    try:
        # Nobody has a tensor without having imported torch.
        if "torch" in sys.modules:
            from tundish.shm.pool.tensor_pickles import dumps_with_tensors

            return dumps_with_tensors(value, PROTOCOL, buffer_callback=is_small)
        return dumps(value, PROTOCOL, buffer_callback=is_small)
    except MemoryError:
        raise
    except BaseException as error:
        _let_interrupt_pass(error)
        raise NotPicklableError(
            f"a {type(value).__qualname__} cannot be sent between processes: {_summary_of(error)}"
        ) from error


def check_picklable(value: Any) -> None:
    """Raise `NotPicklableError` unless `value` can be sent."""
    _pickled(value, [])


def _layout(table_bytes: int, lengths: list[int]) -> tuple[list[int], int]:
    """Where in a parcel buffers of these lengths begin, behind the table, and where the last one ends."""
    starts, end = [], table_bytes
    for length in lengths:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(start)
        end = start + length
    return starts, end


def _parts(view: memoryview, table_bytes: int) -> tuple[bytes, list[memoryview]]:
    stream, lengths = loads(view[:table_bytes])
    starts, _ = _layout(table_bytes, lengths)
    return stream, [view[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def _traceback_of(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in _CALLERS:
        trace = trace.tb_next
    return _or_else(lambda: "".join(traceback.format_exception(type(error), error, trace)), "(no traceback)")


def _summary_of(error: BaseException) -> str:
    text = _or_else(lambda: str(error), "(its message cannot be shown)")
    name = type(error).__qualname__
    return f"{name}: {text}" if text else name


def _or_else(show: Callable[[], str], otherwise: str) -> str:
    """A text that code of users takes part in making."""
    try:
        return show()
    except BaseException as error:  # noqa: BLE001 (code of users)
        _let_interrupt_pass(error)
        return otherwise


def _let_interrupt_pass(error: BaseException) -> None:
    """Raise `error` again if it is Ctrl-C; code of users may raise any other, such as SystemExit."""
    if isinstance(error, KeyboardInterrupt):
        raise error
