"""The least that a plan does, as a compiled loop: each length is read in the order given, each array written once.

Neither the order's check nor a cut: of what is written only the order means anything. It reads the lengths as they lie:
who copies them first, to have more of them in the caches, may take less time.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

__all__ = ["read_and_write"]

# Of samples or pieces; and of packs, one row an array of the plan.
Column = npt.NDArray[np.int32]
Columns = npt.NDArray[np.int32]

# Of one entry a pack; one more, of zeros, is not written either by who makes a plan of one dataset.
_PACK_COLUMNS = 4


def read_and_write(
    lengths: Column, order: npt.NDArray[np.int64], pieces: int, packs: int, threads: int
) -> tuple[int, Column, Columns]:
    """The tokens of all samples, `order` and zeros behind it, and columns of zeros, in four bytes an entry.

    As many entries as the plan's arrays have, in fresh memory as theirs is. Each of the threads, one or two, takes an
    equal part of all.
    """
    written = np.empty(pieces, np.int32)
    columns = np.empty((_PACK_COLUMNS, packs), np.int32)
    if threads == 1:
        return _loop(lengths, order, written, columns), written, columns
    numba.set_num_threads(threads)
    return _loops(lengths, order, written, columns, threads), written, columns


@numba.njit(cache=False)  # type: ignore[untyped-decorator]  # numba leaves it so
def _loop(lengths: Column, order: npt.NDArray[np.int64], written: Column, columns: Columns) -> int:
    tokens = 0
    for place in range(order.size):
        sample = order[place]
        tokens += lengths[sample]
        written[place] = sample
    written[order.size :] = 0
    columns[:] = 0
    return tokens


@numba.njit(cache=False, parallel=True)  # type: ignore[untyped-decorator]  # as above
def _loops(
    lengths: Column, order: npt.NDArray[np.int64], written: Column, columns: Columns, parts: int
) -> int:
    tokens = np.zeros(parts, np.int64)
    for part in numba.prange(parts):
        begin, end = part * order.size // parts, (part + 1) * order.size // parts
        last = written.size if part == parts - 1 else end
        packs = columns.shape[1]
        low, high = part * packs // parts, (part + 1) * packs // parts
        tokens[part] = _loop(lengths, order[begin:end], written[begin:last], columns[:, low:high])
    return tokens.sum()
