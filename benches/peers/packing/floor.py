"""The least that a plan does, as a compiled loop: each length is read in the order given, each index written once.

Neither the order's check nor any array of the plan but one. It reads the lengths as they lie: who copies them first, to
have more of them in the caches, may take less time.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

__all__ = ["read_and_write"]


def read_and_write(
    lengths: npt.NDArray[np.int32], order: npt.NDArray[np.int64], threads: int
) -> tuple[int, npt.NDArray[np.int32]]:
    """The tokens of all samples, and `order` in four bytes an index, in fresh memory as the plan's is.

    Each of the threads, one or two, takes an equal part of the order.
    """
    written = np.empty(order.size, np.int32)
    if threads == 1:
        return _loop(lengths, order, written), written
    numba.set_num_threads(threads)
    return _loops(lengths, order, written, threads), written


@numba.njit(cache=False)  # type: ignore[untyped-decorator]  # numba leaves it so
def _loop(
    lengths: npt.NDArray[np.int32], order: npt.NDArray[np.int64], written: npt.NDArray[np.int32]
) -> int:
    tokens = 0
    for place in range(order.size):
        sample = order[place]
        tokens += lengths[sample]
        written[place] = sample
    return tokens


@numba.njit(cache=False, parallel=True)  # type: ignore[untyped-decorator]  # as above
def _loops(
    lengths: npt.NDArray[np.int32],
    order: npt.NDArray[np.int64],
    written: npt.NDArray[np.int32],
    parts: int,
) -> int:
    tokens = np.zeros(parts, np.int64)
    for part in numba.prange(parts):
        begin, end = part * order.size // parts, (part + 1) * order.size // parts
        tokens[part] = _loop(lengths, order[begin:end], written[begin:end])
    return tokens.sum()
