"""`Pack` and `Piece`: one packed sequence; `PackBatch`: several of them as arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Pack", "PackBatch", "Piece"]


class Piece(NamedTuple):
    """Tokens `start` … `stop` - 1 of sample `sample`; with `stop` None, all tokens from `start` on."""

    sample: int
    start: int
    stop: int | None


class Pack(NamedTuple):
    """One packed sequence: the pieces, in order, of samples of dataset `dataset_id`."""

    dataset_id: int
    pieces: list[Piece]


@dataclass(frozen=True, slots=True)
class PackBatch:
    """Several packs, as arrays.

    Attributes:
        dataset_id: Dataset of each pack, int64, (packs,).
        piece_cu: Pack `k` has the pieces `piece_cu[k]:piece_cu[k + 1]`, int64, (packs + 1,).
        sample: Sample index of each piece, int64, (pieces,).
        start: First token taken of each piece's sample, int64, (pieces,).
        stop: One past the last token taken, -1 for "to the sample's end", int64, (pieces,).
    """

    dataset_id: NDArray[np.int64]
    piece_cu: NDArray[np.int64]
    sample: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.dataset_id)

    def __iter__(self) -> Iterator[Pack]:
        bounds = self.piece_cu.tolist()
        rows = zip(self.sample.tolist(), self.start.tolist(), self.stop.tolist(), strict=True)
        pieces = [Piece(sample, start, None if stop < 0 else stop) for sample, start, stop in rows]
        for number, dataset in enumerate(self.dataset_id.tolist()):
            yield Pack(dataset, pieces[bounds[number] : bounds[number + 1]])
