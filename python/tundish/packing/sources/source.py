"""What the readers of all sources share: names of columns, rows by number, and the limit of what they keep."""

from __future__ import annotations

import logging
import operator
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from tundish import logs
from tundish.errors import (
    InvalidInputError,
    InvalidTypeError,
    NoSuchSampleError,
    format_count,
    format_integer,
)
from tundish.packing.arguments import IntegerArray
from tundish.packing.samples import TOKENIZE_HINT

_logger = logging.getLogger("tundish.packing")

INPUT_IDS = "input_ids"
# Where token counts are looked for, in this order, unless a column is named.
LENGTH_COLUMNS = ("length", INPUT_IDS)
_LARGEST_INT32 = 2**31 - 1
# A message lists at most so many names.
_SHOWN_NAMES = 24
# Decoded rows that a source keeps, in bytes.
_KEPT_BYTES = 256 * 2**20

T = TypeVar("T")


class Source(Protocol):
    """The reader of a source."""

    def lengths(self, column: str | None) -> IntegerArray:
        """The token count of each sample, (samples,); `column` is that of `tundish.packing.lengths`."""

    def samples(self, column: str | None, columns: Sequence[str] | None) -> Any:
        """A map-style dataset; the arguments are those of `tundish.packing.open_samples`."""


@runtime_checkable
class DecodedSource(Source, Protocol):
    """The reader of a source whose samples are decoded each time that they are read."""

    def cached_samples(
        self, column: str | None, columns: Sequence[str] | None, cache: Path, progress: bool | None
    ) -> Any:
        """A map-style dataset of mapped Arrow files in the folder `cache`, which are made if they are missing."""


class SampleRows(ABC):
    """A map-style dataset that `PackedDataset` reads. It pickles without the data that it read."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _read(self, number: int) -> Any:
        """The sample `number`, which exists."""

    def column_types(self) -> Mapping[str, Any] | None:
        """The keys of all samples, each with its Arrow type; None where only the samples tell."""
        return None

    def __getitem__(self, index: int) -> Any:
        """Return sample `index`; negative numbers count from the end.

        Raises:
            NoSuchSampleError: There is no such sample (an `IndexError`).
        """
        count = len(self)
        try:
            number = operator.index(index)
        except TypeError:
            raise InvalidTypeError(f"a sample is asked for by its number, got {index!r}") from None
        if not -count <= number < count:
            raise NoSuchSampleError(
                f"sample {format_integer(number)} does not exist: the source has {format_count(count, 'sample')}"
            )
        return self._read(number + count if number < 0 else number)

    def __iter__(self) -> Iterator[Any]:
        return (self._read(number) for number in range(len(self)))


class Kept(Generic[T]):
    """What was decoded last, up to `_KEPT_BYTES`. The newest is kept in any case. It pickles without what it keeps.

    It says once in the log if much is decoded again that was not kept.

    Args:
        where: What is decoded, for the log.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._held: OrderedDict[int, tuple[T, int]] = OrderedDict()
        self._size = 0
        # A bit for each entry that was ever added, and the bytes that were added again.
        self._seen = bytearray()
        self._again = 0

    def get(self, number: int) -> T | None:
        """The entry of this number, if it is kept."""
        found = self._held.get(number)
        if found is None:
            return None
        self._held.move_to_end(number)
        return found[0]

    def add(self, number: int, entry: T, size: int) -> T:
        """Keep an entry that takes `size` bytes, and return it."""
        self._count_again(number, size)
        self._held[number] = entry, size
        self._size += size
        while len(self._held) > 1 and self._size > _KEPT_BYTES:
            _, (_, freed) = self._held.popitem(last=False)
            self._size -= freed
        return entry

    def _count_again(self, number: int, size: int) -> None:
        place, bit = number >> 3, 1 << (number & 7)
        if place >= len(self._seen):
            self._seen.extend(bytes(place + 1 - len(self._seen)))
        if self._seen[place] & bit:
            self._again += size
        self._seen[place] |= bit
        if self._again > _KEPT_BYTES:
            _say_once_that_reading_is_slow(self._where, self._again)

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, (self._where,)


# Whether this process has said that reading is slow.
_has_said = threading.Event()


def _say_once_that_reading_is_slow(where: str, again: int) -> None:
    if _has_said.is_set() or not logs.is_first_process():
        return
    _has_said.set()
    _logger.warning(
        "%s: %d MiB were decoded more than once, because at most %d MiB of decoded samples are kept. "
        "td.packing.open_samples(…, cache=FOLDER) converts the files once, to Arrow files that are mapped",
        where,
        again >> 20,
        _KEPT_BYTES >> 20,
    )


def choose_column(names: Sequence[str], column: str | None, defaults: Sequence[str], where: str) -> str:
    """Return the column that is asked for, or else the first of `defaults` that there is.

    Args:
        names: The columns of the source.
        column: The column that the caller named, or None.
        defaults: The columns to look for if none is named.
        where: The source, for messages.

    Raises:
        InvalidInputError: There is no such column, or more than one.
    """
    wanted = defaults if column is None else (column,)
    for name in wanted:
        if names.count(name) > 1:
            raise InvalidInputError(f"{where} has {names.count(name)} columns named {name!r}; rename them")
        if name in names:
            return name
    missing = " and no ".join(map(repr, wanted))
    advice = "" if not names else "; give the name of one" if column is not None else "; name one with column"
    if INPUT_IDS in wanted:
        advice += f"; {TOKENIZE_HINT}"
    raise InvalidInputError(f"{where} has no column {missing}: {format_names(names)}{advice}")


def format_names(names: Sequence[str]) -> str:
    """Format names for a message, as in "its columns are 'id' and 'text'"."""
    shown = [repr(name) for name in names[:_SHOWN_NAMES]]
    if len(names) > _SHOWN_NAMES:
        shown.append(f"{len(names) - _SHOWN_NAMES} more")
    if not shown:
        return "it has no columns"
    if len(shown) == 1:
        return f"its only column is {shown[0]}"
    return f"its columns are {', '.join(shown[:-1])} and {shown[-1]}"


def narrowed(lengths: IntegerArray) -> IntegerArray:
    """Return `lengths` as int32 if every value fits, else as int64."""
    if lengths.dtype == np.int32:
        return lengths
    fits = not len(lengths) or int(lengths.max()) <= _LARGEST_INT32
    return lengths.astype(np.int32 if fits else np.int64, copy=False)


def concatenated(parts: Iterable[IntegerArray]) -> IntegerArray:
    """Return the token counts of all `parts` in new memory: int32 if every part is int32, else int64."""
    return np.concatenate([np.empty(0, dtype=np.int32), *parts])
