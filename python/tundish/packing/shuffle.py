"""The random order of samples, as numpy's RandomState gives it."""

from __future__ import annotations

from tundish import _native
from tundish.packing.columns import IntegerArray, as_integer

__all__ = ["shuffled_indices"]


def shuffled_indices(n: int, seed: int) -> IntegerArray:
    """The order that `pack(..., seed=seed)` gives `n` samples.

    Bit for bit what `numpy.random.RandomState(seed).shuffle(numpy.arange(n))` leaves, several times as fast.

    Args:
        n: how many, at least 0.
        seed: 0 … 2**32 - 1.

    Returns:
        A permutation of 0 … n - 1, shape (n,), int32 up to 2**31 samples, else int64.

    Raises:
        InvalidTypeError, InvalidInputError: arguments that are no integers or out of range.

    >>> shuffled_indices(5, 0).tolist()
    [2, 0, 1, 3, 4]
    """
    return _native.shuffled_indices(as_integer(n, "n", 0, 2**62), as_integer(seed, "seed", 0, 2**32 - 1))
