"""`Handle`: tells other processes of this user and node where a segment is.

A handle owns no memory. It is good as long as the `SharedArray` that it came from, or another one of its segment in
that process, is open. Processes attach through `/proc/<process>/fd`, which the kernel opens to processes of the same
user, or by the segment's name.
"""

from __future__ import annotations

from typing import Any

from tundish import _native
from tundish.errors import InvalidInputError

__all__ = ["Handle"]

# Of an address: process, descriptor, identity, generation.
_BITS = (31, 31, 64, 64)


class Handle:
    """Leads to a segment; small, immutable, picklable. `SharedArray.attach` takes it.

    Args:
        address: process and descriptor under which the segment is open, its identity, and its generation.
        name: of a segment that has one.
    """

    __slots__ = ("_address", "name")

    def __init__(self, address: tuple[int, int, int, int], name: str | None = None) -> None:
        is_address = (
            isinstance(address, tuple)
            and len(address) == len(_BITS)
            and all(
                type(part) is int and 0 <= part < 1 << bits for part, bits in zip(address, _BITS, strict=True)
            )
        )
        if not is_address or not (name is None or (isinstance(name, str) and name.isascii())):
            raise InvalidInputError(
                f"a handle cannot lead to {(address, name)!r:.200}: take that of a SharedArray"
            )
        self._address = address
        self.name = name

    def attach(self) -> _native.SharedSegment:
        """Return the segment, which is mapped once in this process."""
        return _native.SharedSegment.attach(self._address, name=self.name)

    def to_json(self) -> list[int | str | None]:
        """Return the handle as a list of values that JSON can hold."""
        return [*self._address, self.name]

    @classmethod
    def from_json(cls, parts: list[Any]) -> Handle:
        """Return the handle that `to_json` gave.

        Raises:
            InvalidInputError: `parts` is anything else.
        """
        if not isinstance(parts, list | tuple) or len(parts) != 5:
            raise InvalidInputError(f"a handle was given as {parts!r:.200}: give what to_json() made of one")
        process, descriptor, identity, generation, name = parts
        return cls((process, descriptor, identity, generation), name)

    def __eq__(self, other: object) -> bool:
        # The segment is the same, whichever process has it open.
        return isinstance(other, Handle) and self._address[2:] == other._address[2:]

    def __hash__(self) -> int:
        return hash(self._address[2:])

    def __repr__(self) -> str:
        process, descriptor, identity, generation = self._address
        return f"<Handle of segment {identity:016x}, use {generation}, descriptor {descriptor} of process {process}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Handle, (self._address, self.name)
