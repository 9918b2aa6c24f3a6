"""`SampleRows`: samples of files and datasets, read by number."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from tundish.errors import InvalidTypeError, NoSuchSampleError, format_integer

__all__ = ["SampleRows"]


class SampleRows(ABC):
    """A map-style dataset that `PackedDataset` reads. It pickles without the data that it read."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _read(self, number: int) -> Any:
        """The sample `number`, which exists."""

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
                f"sample {format_integer(number)} does not exist: there are {count} samples"
            )
        return self._read(number + count if number < 0 else number)

    def __iter__(self) -> Iterator[Any]:
        return (self._read(number) for number in range(len(self)))
