"""The order of the packs in an epoch, as global batches.

Invariants:
1. The arguments of `EpochOrder` determine the order; no rank and no world size is among them.
2. Any step can be reached without walking the steps before it, so that resuming is as fast as starting.
3. Draws are those of `numpy.random.RandomState`, whose stream numpy keeps frozen: a run that was saved under one
   version of numpy continues under another. The permutation is drawn natively, bit for bit the same, so that Ctrl-C
   ends it within 100 ms.
4. Working memory is one permutation, made at the first batch (4 bytes a pack below 2³¹ packs; none without `shuffle`).
   With `longest` it is also one window of 64 global batches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tundish import _native

__all__ = ["EpochOrder"]

_Packs = NDArray[np.integer[Any]]

# Long enough that every step of a window finds similar packs, short enough that the packs of a step stay a random
# choice.
_WINDOW_BATCHES = 64


class EpochOrder:
    """Global batches of `global_batch` packs, `steps` of them.

    The packs are shuffled (or stay as they are) and repeated from the start as often as the steps take.
    With `longest` given, each window of 64 global batches is sorted by it and cut into global batches. These are
    then shuffled within the window, and so are the packs within each.

    Args:
        packs: Number of packs.
        global_batch: Packs a step.
        steps: Global batches of the epoch.
        seed, epoch: Seeds of the draws, each in 0 … 2³² − 1.
        shuffle: Whether the packs are shuffled.
        longest: Longest piece of each pack, (packs,), or None.
    """

    def __init__(
        self,
        *,
        packs: int,
        global_batch: int,
        steps: int,
        seed: int,
        epoch: int,
        shuffle: bool,
        longest: _Packs | None,
    ) -> None:
        self._packs = packs
        self._global_batch = global_batch
        self._steps = steps
        self._draws = (seed, epoch)
        self._shuffle = shuffle
        self._longest = longest
        self._order: _Packs | None = None
        self._window: tuple[int, _Packs] | None = None

    def global_batch(self, step: int) -> list[int]:
        """The packs of a step."""
        if self._longest is None:
            batch = self._ordered(step * self._global_batch, (step + 1) * self._global_batch)
        else:
            number, row = divmod(step, _WINDOW_BATCHES)
            if self._window is None or self._window[0] != number:
                self._window = number, self._grouped(number, self._longest)
            batch = self._window[1][row]
        return batch.tolist()  # type: ignore[no-any-return]

    def release(self) -> None:
        """Free the memory; the next call of `global_batch` draws the order again."""
        self._order = self._window = None

    def _ordered(self, start: int, stop: int) -> _Packs:
        """The packs at the positions from `start` to `stop` in the order, which repeats from its beginning."""
        positions = np.arange(start, stop, dtype=np.int64) % self._packs
        if not self._shuffle:
            return positions
        if self._order is None:
            self._order = _native.shuffled_indices(self._packs, *self._draws)
        return self._order[positions]

    def _grouped(self, number: int, longest: _Packs) -> _Packs:
        """The packs of window `number`, one row for each global batch.

        An example of two batches of two packs, with longest pieces of 9, 1, 8 and 2 tokens. Sorted and cut, they are
        `[1 2] [8 9]`. The batches are shuffled: `[8 9] [1 2]`. Each batch is shuffled: `[9 8] [1 2]`.
        """
        first = number * _WINDOW_BATCHES
        batches = min(_WINDOW_BATCHES, self._steps - first)
        packs = self._ordered(first * self._global_batch, (first + batches) * self._global_batch)
        packs = packs[np.argsort(longest[packs], kind="stable")].reshape(batches, self._global_batch)
        # A stream of its own for each window: a resume then needs the draws of no window before it.
        draws = np.random.RandomState((*self._draws, number))
        packs = packs[draws.permutation(batches)]
        # Without this the last rank would always have the longest packs of the step.
        within = np.argsort(draws.random_sample(packs.shape), axis=1, kind="stable")
        return np.take_along_axis(packs, within, axis=1)
