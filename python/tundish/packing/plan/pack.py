"""`Pack` and `Piece`: one packed sequence; `PackBatch`: several of them as arrays."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tundish.errors import InvalidInputError, InvalidTypeError, NoSuchPackError, format_integer

__all__ = ["Pack", "PackBatch", "Piece", "pack_numbers"]


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


def pack_numbers(index: Any, packs: int, what: str = "plan") -> int | range:
    """The number of the pack that `plan[index]` is, or the numbers that a slice gives, for a plan of `packs` packs.

    `what` is the plan in messages.

    Raises:
        NoSuchPackError: There is no such pack.
        InvalidTypeError: The index is neither an integer nor a slice of integers.
        InvalidInputError: The step of a slice is 0.
    """
    if isinstance(index, slice):
        try:
            return range(*index.indices(packs))
        except TypeError:
            raise InvalidTypeError(f"packs are asked for by a slice of integers, got {index!r}") from None
        except ValueError:
            raise InvalidInputError(
                f"packs are asked for by a slice whose step is not 0, got {index!r}"
            ) from None
    try:
        asked = operator.index(index)
    except TypeError:
        raise InvalidTypeError(f"a pack is asked for by its number, got {index!r}") from None
    number = asked + packs if asked < 0 else asked
    if not 0 <= number < packs:
        raise NoSuchPackError(f"pack {format_integer(asked)} does not exist: the {what} has {packs} packs")
    return number
