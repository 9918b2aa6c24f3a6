"""`PieceLayout`: where the tokens of pieces lie in an item, and the padding of aligned pieces."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["PieceLayout", "aligned_sizes"]

D = TypeVar("D", bound=np.generic)


def aligned_sizes(sizes: Sequence[int], align: int) -> list[int]:
    """Round the sizes of pieces up to multiples of `align`."""
    return [-(-size // align) * align for size in sizes]


class PieceLayout:
    """The pieces of an item, each followed by the padding that makes it a multiple of `align` tokens.

    The padding belongs to its piece: with causal attention no token before it sees it, so the piece's bounds can
    include it. Megatron-LM and verl pad packed sequences for context parallelism in this way.

    Args:
        sizes: Tokens of each piece, all above 0.
        align: `PackPlan.align`.

    Attributes:
        tokens: Bounds of the pieces' own tokens, without padding, int64, (pieces + 1,).
        bounds: Bounds of the pieces with their padding, int64, (pieces + 1,).
        sizes: Tokens of each piece with its padding.
    """

    def __init__(self, sizes: Sequence[int], align: int) -> None:
        self.tokens = self.bounds = _bounds(sizes)
        self.sizes = sizes
        self._places: NDArray[np.int64] | None = None
        if align > 1:
            self.sizes = aligned_sizes(sizes, align)
            self.bounds = _bounds(self.sizes)
            moves = (self.bounds - self.tokens)[:-1].repeat(sizes)
            self._places = np.arange(self.tokens[-1], dtype=np.int64) + moves

    def padded(self, values: NDArray[D], padding: Any) -> NDArray[D]:
        """Spread the values of the pieces' own tokens, (tokens,), over the item; `padding` fills the rest."""
        if self._places is None:
            return values
        spread = np.full(self.bounds[-1], padding, dtype=values.dtype)
        spread[self._places] = values
        return spread

    def positions(self) -> NDArray[np.int64]:
        """Numbers that count from 0 in each piece, and on through its padding."""
        positions = np.arange(self.bounds[-1], dtype=np.int64)
        positions -= self.bounds[:-1].repeat(self.sizes)
        return positions


def _bounds(sizes: Sequence[int]) -> NDArray[np.int64]:
    return np.array([0, *itertools.accumulate(sizes)], dtype=np.int64)
