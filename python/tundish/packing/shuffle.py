"""`shuffled_indices`: the random order of numpy's RandomState."""

from __future__ import annotations

from tundish import _native
from tundish.packing.arguments.integer_arrays import IntegerArray
from tundish.packing.arguments.integers import as_integer

__all__ = ["shuffled_indices"]


def shuffled_indices(n: int, seed: int) -> IntegerArray:
    """Return the order of `n` samples in `pack(..., seed=seed)`.

    It equals `numpy.random.RandomState(seed).shuffle(numpy.arange(n))` bit for bit, several times as fast.

    Args:
        n: How many samples, at least 0.
        seed: 0 … 2**32 - 1.

    Returns:
        A permutation of 0 … n - 1, shape (n,), int32 up to 2**31 samples, else int64.

    Raises:
        InvalidTypeError: An argument is not an integer.
        InvalidInputError: An argument is out of range.

    Example:
        >>> shuffled_indices(5, 0).tolist()
        [2, 0, 1, 3, 4]
    """
    return _native.shuffled_indices(as_integer(n, "n", 0, 2**62), as_integer(seed, "seed", 0, 2**32 - 1))
