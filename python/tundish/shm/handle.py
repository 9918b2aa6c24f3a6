"""`Handle`: the address of a segment, for other processes of this user and node."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Handle"]


@dataclass(frozen=True, slots=True)
class Handle:
    """The address of a segment; small and picklable. `SharedArray.attach` takes it.

    A handle owns no memory. It works while its process has a `SharedArray` of the segment open. Other processes attach
    through `/proc/<process>/fd`, which the kernel opens to the same user, or by the segment's name.

    Args:
        process: id of a process that has the segment open.
        descriptor: the segment's file descriptor in that process.
        identity: random number of the segment.
        generation: count of the arrays that the segment has held; its memory is used again for other arrays.
        name: name of the segment, or None.

    Example:
        >>> import pickle
        >>> import numpy as np
        >>> import tundish as td
        >>> shared = td.shm.SharedArray.from_array(np.arange(4))
        >>> message = pickle.dumps(shared.handle)
        >>> td.shm.SharedArray.attach(pickle.loads(message)).array.tolist()      # in another process
        [0, 1, 2, 3]
    """

    process: int
    descriptor: int
    identity: int
    generation: int
    name: str | None = None
