"""The least that a plan in a given order does, as a compiled loop: that is checked, lengths are read, arrays written.

Not a cut: of what is written only the order means anything. A sample that does not exist or comes twice is found with
a bit a sample. It reads the lengths as they lie: who copies them first, to have more of them in the caches, may take
less time.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

__all__ = ["check_read_and_write"]

# Of samples or pieces; and of packs, one row an array of the plan.
Column = npt.NDArray[np.int32]
Columns = npt.NDArray[np.int32]
# A bit a sample.
Seen = npt.NDArray[np.uint64]

# Of one entry a pack; one more, of zeros, is not written either by who makes a plan of one dataset.
_PACK_COLUMNS = 4
_WORD_BITS = 64


def check_read_and_write(
    lengths: Column, order: npt.NDArray[np.int64], pieces: int, packs: int, threads: int
) -> tuple[int, Column, Columns]:
    """The tokens of all samples, `order` and zeros behind it, and columns of zeros, in four bytes an entry.

    As many entries as the plan's arrays have, in fresh memory as theirs is. Each of the threads, one or two, takes an
    equal part of all. Raises `ValueError` for an order that is not one.
    """
    written = np.empty(pieces, np.int32)
    columns = np.empty((_PACK_COLUMNS, packs), np.int32)
    seen = np.zeros((threads, -(-lengths.size // _WORD_BITS)), np.uint64)
    if threads == 1:
        tokens = _loop(lengths, order, written, columns, seen[0])
    else:
        numba.set_num_threads(threads)
        tokens = _loops(lengths, order, written, columns, seen)
    if tokens < 0 or int(np.bitwise_count(np.bitwise_or.reduce(seen)).sum()) != order.size:
        raise ValueError("no order: a sample that does not exist, or one that comes twice")
    return tokens, written, columns


@numba.njit(cache=False)  # type: ignore[untyped-decorator]  # numba leaves it so
def _loop(
    lengths: Column, order: npt.NDArray[np.int64], written: Column, columns: Columns, seen: Seen
) -> int:
    """The tokens; less than none where a sample does not exist."""
    tokens = 0
    for place in range(order.size):
        sample = order[place]
        if not 0 <= sample < lengths.size:
            return -1
        seen[sample >> 6] |= np.uint64(1) << np.uint64(sample & 63)
        tokens += lengths[sample]
        written[place] = sample
    written[order.size :] = 0
    columns[:] = 0
    return tokens


@numba.njit(cache=False, parallel=True)  # type: ignore[untyped-decorator]  # as above
def _loops(
    lengths: Column, order: npt.NDArray[np.int64], written: Column, columns: Columns, seen: Seen
) -> int:
    parts = len(seen)
    tokens = np.zeros(parts, np.int64)
    for part in numba.prange(parts):
        begin, end = part * order.size // parts, (part + 1) * order.size // parts
        last = written.size if part == parts - 1 else end
        packs = columns.shape[1]
        low, high = part * packs // parts, (part + 1) * packs // parts
        tokens[part] = _loop(lengths, order[begin:end], written[begin:last], columns[:, low:high], seen[part])
    return tokens.sum() if tokens.min() >= 0 else -1
