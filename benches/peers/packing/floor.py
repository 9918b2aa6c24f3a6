"""What no plan can do without, as a compiled loop: each length is read in the order given, each index written once.

Neither the order's check nor any array of the plan but one: whoever plans on one thread takes longer.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

__all__ = ["read_and_write"]


def read_and_write(
    lengths: npt.NDArray[np.int32], order: npt.NDArray[np.int64]
) -> tuple[int, npt.NDArray[np.int32]]:
    """The tokens of all samples, and `order` in four bytes an index, in fresh memory as the plan's is."""
    written = np.empty(order.size, np.int32)
    return _loop(lengths, order, written), written


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
