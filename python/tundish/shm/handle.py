"""`Handle`: the address of a segment, for other processes of this user and node."""

from __future__ import annotations

from dataclasses import dataclass

from tundish import _native

__all__ = ["Handle"]


@dataclass(frozen=True, slots=True)
class Handle:
    """The address of a segment; small and picklable. `SharedArray.attach` takes it.

    A handle owns no memory. It works as long as the `SharedArray` that it came from is open, or another one of the same
    segment in that process. Processes attach through `/proc/<process>/fd`, which the kernel opens to processes of the
    same user, or by the segment's name.

    Args:
        process: id of a process that has the segment open.
        descriptor: the segment's file descriptor in that process.
        identity: random number that tells the segment from any other.
        generation: number of the use of the segment; its memory is used again for other arrays.
        name: name of the segment, if it has one.
    """

    process: int
    descriptor: int
    identity: int
    generation: int
    name: str | None = None

    def attach(self) -> _native.SharedSegment:
        """Return the segment. A process maps it once, however often it attaches."""
        address = self.process, self.descriptor, self.identity, self.generation
        return _native.SharedSegment.attach(address, name=self.name)
