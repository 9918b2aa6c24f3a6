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
from tundish.errors import StorageError

__all__ = ["Handle"]

_log = logging.getLogger("tundish.shm")

# Of the 256 descriptors that a forkserver passes on to a child, so many are left to others.
_MOST_PASSED = 128

# What was passed on to a process that is being spawned, by segment: a number may be passed once.
_passed: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()

# Descriptors that this process was spawned with, by number. Handles of one segment share one.
_inherited: weakref.WeakValueDictionary[int, _Inherited] = weakref.WeakValueDictionary()


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
        self._address = address
        self.name = name
        self._socket_name = _socket_name
        self._inherited = _inherited

    def attach(self) -> _native.SharedSegment:
        """The segment, mapped once in this process."""
        descriptor = None if self._inherited is None else self._inherited.descriptor
        segment = _native.SharedSegment.attach(self._address, descriptor, self.name, self._socket_name)
        if segment.is_copy:
            _log.warning(
                "this process has a copy of %s bytes of its own, where process %d was to share its memory: no "
                "descriptor could be received. Raise the number of open files that it may have (ulimit -n)",
                f"{segment.nbytes:,}",
                self._address[0],
            )
        return segment

    def to_json(self) -> list[int]:
        """The handle as numbers that JSON can hold."""
        return list(self._address)

    @classmethod
    def from_json(cls, numbers: list[int]) -> Handle:
        """The handle that `to_json` gave."""
        process, descriptor, identity, generation = numbers
        return cls((process, descriptor, identity, generation))

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


class _Inherited:
    """A descriptor that this process was spawned with; closed when no handle needs it any more."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False


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
        number = passed.detach()
        inherited = _inherited.get(number)
        if inherited is None:
            inherited = _inherited[number] = _Inherited(number)
    return Handle((process, descriptor, identity, generation), name, socket_name, inherited)
