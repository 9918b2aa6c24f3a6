"""Handles: what one process tells another so that it finds a segment.

What always holds: a handle owns no memory; it is good as long as the `SharedArray` that it came from, or another one of
its segment in that process, is open. A process that is just being spawned gets the descriptor itself on its way.
"""

from __future__ import annotations

import logging
import os
import weakref
from typing import Any

from tundish import _native
from tundish.errors import InvalidInputError, SegmentGoneError, StorageError

__all__ = ["Handle"]

_log = logging.getLogger("tundish.shm")

# Of the 256 descriptors that a forkserver passes on to a child, so many are left to others.
_MOST_PASSED = 128

# Of an address: of its process, descriptor, identity and generation.
_BITS = (31, 31, 64, 64)

# What was passed on to a process that is being spawned, by segment: a number may be passed once.
_passed: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()

# Descriptors that this process was spawned with, by what brought them: handles of one segment share one, also where it
# was used and closed before the next of them is unpickled.
_inherited: weakref.WeakKeyDictionary[Any, _Inherited] = weakref.WeakKeyDictionary()


class Handle:
    """Leads to a segment; small, immutable, picklable. `SharedArray.attach` takes it."""

    __slots__ = ("_address", "_inherited", "_socket_name", "name")

    def __init__(
        self,
        address: tuple[int, int, int, int],
        name: str | None = None,
        _socket_name: str | None = None,
        _inherited: _Inherited | None = None,
    ) -> None:
        self._address = _checked(address, name, _socket_name)
        self.name = name
        self._socket_name = _socket_name
        self._inherited = _inherited

    def attach(self) -> _native.SharedSegment:
        """The segment, mapped once in this process."""
        descriptor = None if self._inherited is None else self._inherited.descriptor
        try:
            segment = _native.SharedSegment.attach(self._address, descriptor, self.name, self._socket_name)
        except SegmentGoneError:
            self._let_go()
            raise
        self._let_go()
        if segment.is_copy:
            _log.warning(
                "this process has a copy of %s bytes of its own, where process %d was to share its memory: no "
                "descriptor could be received. Raise the number of open files that it may have (ulimit -n)",
                f"{segment.nbytes:,}",
                self._address[0],
            )
        return segment

    def _let_go(self) -> None:
        if self._inherited is not None:
            self._inherited.close()

    def to_json(self) -> list[int | str | None]:
        """The handle as what JSON can hold."""
        return [*self._address, self.name, self._asked_at()]

    @classmethod
    def from_json(cls, parts: list[Any]) -> Handle:
        """The handle that `to_json` gave.

        Raises `InvalidInputError` for anything else.
        """
        if not isinstance(parts, list | tuple) or len(parts) != 6:
            raise InvalidInputError(f"a handle was given as {parts!r:.200}: give what to_json() made of one")
        process, descriptor, identity, generation, name, socket_name = parts
        return cls((process, descriptor, identity, generation), name, socket_name)

    def __eq__(self, other: object) -> bool:
        # Which process is asked for the segment makes it no other.
        return isinstance(other, Handle) and self._address[2:] == other._address[2:]

    def __hash__(self) -> int:
        return hash(self._address[2:])

    def __repr__(self) -> str:
        process, descriptor, identity, generation = self._address
        return f"<Handle of segment {identity:016x}, use {generation}, descriptor {descriptor} of process {process}>"

    def __reduce__(self) -> tuple[Any, ...]:
        passed = _pass_on(self._address)
        if passed is not None:
            return (_restored, (*self._address, self.name, None, passed))
        return (_restored, (*self._address, self.name, self._asked_at()))

    def _asked_at(self) -> str | None:
        """The socket at which the process that has the segment is asked for it; None where it has none."""
        if self._address[0] != os.getpid():
            return self._socket_name
        try:
            return _native.lending_socket()
        except StorageError:
            # One way less, of several.
            return None


def _checked(address: Any, name: Any, socket_name: Any) -> tuple[int, int, int, int]:
    """`address`, if it can be one: a handle may have come from anywhere."""
    is_address = (
        isinstance(address, tuple)
        and len(address) == len(_BITS)
        and all(
            type(part) is int and 0 <= part < 1 << bits for part, bits in zip(address, _BITS, strict=True)
        )
    )
    are_texts = all(
        text is None or (isinstance(text, str) and text.isascii()) for text in (name, socket_name)
    )
    if not is_address or not are_texts:
        raise InvalidInputError(
            f"a handle cannot lead to {(address, name, socket_name)!r:.200}: take that of a SharedArray"
        )
    return address  # type: ignore[no-any-return]  # as was just found


class _Inherited:
    """A descriptor that this process was spawned with; closed at its first use, or when no handle is left.

    Those of one segment share it: who attached once finds the segment again without it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)
        self._close.atexit = False

    @property
    def descriptor(self) -> int | None:
        """None once it is closed."""
        return self._descriptor if self._close.alive else None

    def close(self) -> None:
        """It has led to the segment, or the segment is gone: from here on it would only keep memory alive."""
        self._close()


def _pass_on(address: tuple[int, int, int, int]) -> Any:
    """What brings the descriptor to a process that is being spawned; None where none is, or none is at hand."""
    from multiprocessing.context import get_spawning_popen

    popen: Any = get_spawning_popen()
    if popen is None:
        return None
    passed = _passed.setdefault(popen, {})
    identity = address[2]
    if identity not in passed:
        descriptor = _native.held_descriptor(address)
        if descriptor is None or len(passed) >= _MOST_PASSED:
            return None
        passed[identity] = popen.DupFd(popen.duplicate_for_child(descriptor))
    return passed[identity]


def _restored(
    process: int,
    descriptor: int,
    identity: int,
    generation: int,
    name: str | None,
    socket_name: str | None,
    passed: Any = None,
) -> Handle:
    inherited = None
    if passed is not None:
        inherited = _inherited.get(passed)
        if inherited is None:
            inherited = _inherited[passed] = _Inherited(passed.detach())
    return Handle((process, descriptor, identity, generation), name, socket_name, inherited)
