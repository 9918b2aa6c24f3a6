"""`SourceReader`: one pass through the samples that a `PackedStream` packs.

Invariants: `position` counts the samples that the source gave, and its state belongs to the same samples: both change
together, at each draw.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset

from tundish.errors import InvalidTypeError, StateMismatchError, format_type
from tundish.packing.dataset.row_reader import RowReader
from tundish.packing.dataset.samples import Sample
from tundish.packing.stream.arrow_rows import arrow_rows, in_arrow_format

__all__ = ["SourceReader", "SourceState", "Worker", "check_source", "epoch_of", "passes_once"]

_END = object()


class Worker(NamedTuple):
    """Which of the processes of a `DataLoader` packs."""

    number: int
    total: int


class SourceState(NamedTuple):
    """How far a pass through the source is.

    Attributes:
        samples: Samples that the source gave.
        state: Its own state after them; None if it has none, or is at its end.
        is_exhausted: Whether it is at its end.
    """

    samples: int = 0
    state: Any = None
    is_exhausted: bool = False


class SourceReader:
    """The samples of a source from a state on, each numbered as the source gave it.

    In a worker of a `DataLoader`, a torch `IterableDataset` splits itself, and its samples are numbered in each worker.
    Of any other source, the worker takes every `total`-th sample.

    Args:
        source: Any iterable of samples.
        reader: Checks the samples.
        worker: The worker that this is, or None in a process of its own.
        start: The state to go on from.

    Attributes:
        position: Samples that the source gave.
        is_exhausted: Whether it has no more.
    """

    def __init__(self, source: Any, reader: RowReader, worker: Worker | None, start: SourceState) -> None:
        self._source = source
        # Makes a row of what the source gives, if that is no row.
        self._as_row: Callable[[Any], Any] | None = None
        if (tables := in_arrow_format(source)) is not None:
            self._source = tables
            # If an entry is null, the array has floats, which columns may have and tokens and masks may not.
            self._as_row = arrow_rows(tables.features, [*reader.columns, *reader.sample_columns])
        self._reader = reader
        self._worker = worker
        self._start = start
        self.position = start.samples
        self.is_exhausted = start.is_exhausted

    def __iter__(self) -> Iterator[Sample]:
        """Iterate once.

        Raises:
            StateMismatchError: The source has fewer samples than the state says.
            InvalidTypeError, InvalidInputError: As `RowReader.read`.
            Errors of the source, with a note that numbers the sample.
        """
        if self.is_exhausted:
            return
        first, step = 0, 1
        if self._worker is not None and not isinstance(self._source, IterableDataset):
            first, step = self._worker
        read, draw, as_row = self._reader.read, self._draw, self._as_row
        rows = self._rows()
        while (row := draw(rows, self.position)) is not _END:
            number = self.position
            self.position = number + 1
            if step == 1 or number % step == first:
                yield read(row if as_row is None else as_row(row), 0, number)
        self.is_exhausted = True

    def state(self) -> SourceState:
        """The state after the last sample that was drawn; it holds what the source's `state_dict` gave."""
        if self.is_exhausted:
            return SourceState(self.position, None, is_exhausted=True)
        if self.position == self._start.samples:
            # Nothing was drawn. The source may not even have begun.
            return self._start
        state = self._source.state_dict() if _has_exact_state(self._source) else None
        return SourceState(self.position, state)

    def _rows(self) -> Iterator[Any]:
        """The source's samples from the state on."""
        if self._start.state is not None:
            return self._resumed()
        if self._start.samples:
            return self._after(self._start.samples)
        return self._begin()

    def _begin(self) -> Iterator[Any]:
        try:
            return iter(self._source)
        except Exception as error:
            self._note(error, self.position)
            raise

    def _resumed(self) -> Iterator[Any]:
        """The samples after the state that the source is given."""
        self._source.load_state_dict(copy.deepcopy(self._start.state))
        rows = self._begin()
        row = next(rows, _END)
        # Datasets of Hugging Face would begin each further pass at this state.
        parts: list[Any] = [self._source, getattr(self._source, "dataset", None)]
        for part in parts:
            if getattr(part, "_starting_state_dict", None) is not None:
                part.load_state_dict(None)
        while row is not _END:
            yield row
            row = next(rows, _END)

    def _after(self, count: int) -> Iterator[Any]:
        """The samples after the first `count`."""
        rows = self._begin()
        for number in range(count):
            if self._draw(rows, number) is _END:
                raise StateMismatchError(
                    f"the state was taken after {count} samples, and the source has {number}: resume with the source "
                    "that the state was taken of, in the same order"
                )
        yield from rows

    def _draw(self, rows: Iterator[Any], number: int) -> Any:
        try:
            return next(rows, _END)
        except StateMismatchError:
            raise
        except Exception as error:
            self._note(error, number)
            raise

    def _note(self, error: Exception, number: int) -> None:
        where = "" if self._worker is None else f" in worker {self._worker.number}"
        # Once, although an error while samples are left out passes two draws.
        note = "raised by the source of a PackedStream when it was asked for sample "
        if not any(text.startswith(note) for text in getattr(error, "__notes__", ())):
            error.add_note(f"{note}{number}{where}")


def check_source(samples: Any) -> None:
    """Refuse what is no iterable of samples.

    Raises:
        InvalidTypeError: It is a path, one sample, or not iterable.
    """
    if isinstance(samples, str | os.PathLike):
        raise InvalidTypeError(
            f"samples is {format_type(samples)}, and no iterable of samples: td.packing.open_samples("
            f"{os.fspath(samples)!r}) opens files and folders"
        )
    is_array = isinstance(samples, np.ndarray | torch.Tensor) and samples.dtype != np.dtype(object)
    if isinstance(samples, Mapping | bytes) or (is_array and samples.ndim < 2):
        raise InvalidTypeError(
            f"samples is {format_type(samples)}, which is one sample at most: give an iterable of samples, for example "
            "a list of it"
        )
    if not hasattr(samples, "__iter__") and not hasattr(samples, "__getitem__"):
        raise InvalidTypeError(
            f"samples is {format_type(samples)}: give an iterable of samples, for example a streaming dataset or an "
            "object whose __iter__ makes a generator"
        )


def passes_once(source: Any) -> bool:
    """Whether a second iteration over the source would go on where the first one ended."""
    return isinstance(source, Iterator) and not _is_stateful(source)


def epoch_of(source: Any) -> int | None:
    """The epoch that the source says it is in."""
    epoch = getattr(source, "epoch", None)
    return epoch if isinstance(epoch, int) else None


def _is_stateful(source: Any) -> bool:
    return callable(getattr(source, "state_dict", None)) and callable(
        getattr(source, "load_state_dict", None)
    )


def _has_exact_state(source: Any) -> bool:
    """Whether the source goes on from its state with the next sample.

    The state of a Hugging Face stream with `shuffle(buffer_size=…)` lacks the samples in the buffer. Such a stream
    gives the same samples again when it begins again.
    """
    return _is_stateful(source) and not _has_shuffle_buffer(getattr(source, "_ex_iterable", None))


def _has_shuffle_buffer(examples: Any) -> bool:
    if examples is None:
        return False
    if type(examples).__name__ == "BufferShuffledExamplesIterable":
        return True
    inner = [getattr(examples, "ex_iterable", None), *getattr(examples, "ex_iterables", ())]
    return any(map(_has_shuffle_buffer, inner))
