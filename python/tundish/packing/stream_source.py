"""`StreamReader`: one pass through the samples that a `PackedStream` packs, and its state.

Invariants: `position` counts the samples that the stream has taken. A sample that was refused is not among them, nor is
one that the source could not give, so that a state leads to it again.

In its default format, `datasets` makes a Python list of each row, token by token. Where the rows of a Hugging Face
stream lie in Arrow tables, they are read as arrays.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset

from tundish.errors import InvalidTypeError, StateMismatchError, format_type
from tundish.packing.samples import Sample, SampleReader

_END = object()


class Worker(NamedTuple):
    """Which of the processes of a `DataLoader` packs."""

    number: int
    total: int


class SourceState(NamedTuple):
    """How far a pass through the source is.

    Attributes:
        samples: Samples that were taken.
        state: The source's own state after the first `state_samples` of them; None if it has none, or is at its end.
        state_samples: The samples behind them are read again, and left out. 0 without a state.
        is_exhausted: Whether the source is at its end.
    """

    samples: int = 0
    state: Any = None
    state_samples: int = 0
    is_exhausted: bool = False


class StreamReader:
    """The samples of a source from a state on, each numbered as the source gave it.

    In a worker of a `DataLoader`, a torch `IterableDataset` splits itself, and its samples are numbered in each worker.
    Of any other source, the worker takes every `total`-th sample.

    Args:
        source: Any iterable of samples.
        reader: Checks the samples.
        worker: The worker that this is, or None in a process of its own.
        start: The state to go on from.
    """

    def __init__(self, source: Any, reader: SampleReader, worker: Worker | None, start: SourceState) -> None:
        self._source = source
        # Makes a row of what the source gives, if that is no row.
        self._as_row: Callable[[Any], Any] | None = None
        if (tables := in_arrow_format(source)) is not None:
            self._source = tables
            # If an entry is null, the array has floats, which columns may have and tokens and masks may not.
            self._as_row = _arrow_rows(tables.features, [*reader.columns, *reader.sample_columns])
        self._reader = reader
        self._worker = worker
        self._position = start.samples
        self._is_exhausted = start.is_exhausted
        # The newest state that holds the source's own, which was the source's at that time.
        self._newest = start
        # Whether the source may be behind `_position`: it gave a sample that is not taken yet, or raised an error.
        self._is_ahead = False
        self._rows: Iterator[Any] | None = None

    def next(self) -> Sample | None:
        """The next sample, or None at the end. Call `take` when nothing can refuse the sample any more.

        Raises:
            StateMismatchError: The source has fewer samples than the state says.
            InvalidTypeError, InvalidInputError: As `SampleReader.read`.
            Errors of the source, with a note that numbers the sample.
        """
        if self._is_exhausted:
            return None
        self._is_ahead = True
        if self._rows is None:
            self._rows = self._begin()
        first, step = 0, 1
        if self._worker is not None and not isinstance(self._source, IterableDataset):
            first, step = self._worker
        while (row := self._draw(self._rows, self._position)) is not _END:
            if self._position % step == first or step == 1:
                return self._reader.read(
                    row if self._as_row is None else self._as_row(row), 0, self._position
                )
            self._position += 1
        self._is_exhausted, self._is_ahead = True, False
        return None

    def take(self) -> None:
        """Count the sample that `next` gave."""
        self._position += 1
        self._is_ahead = False

    def state(self) -> SourceState:
        """The state after the last sample that was taken."""
        if self._is_exhausted:
            return SourceState(self._position, is_exhausted=True)
        if self._position == self._newest.samples:
            # Nothing was taken since. The source may not even have begun.
            return self._newest
        # The state of a source that is ahead leaves out a sample. Then an older one is given, and the samples since.
        if not self._is_ahead and _has_exact_state(self._source):
            state = copy.deepcopy(self._source.state_dict())
            self._newest = SourceState(self._position, state, self._position)
        return self._newest._replace(samples=self._position)

    def _begin(self) -> Iterator[Any]:
        """The source's samples from the state on."""
        start = self._newest
        rows = self._iterate() if start.state is None else self._resumed(start)
        for number in range(start.state_samples, start.samples):
            if self._draw(rows, number) is _END:
                raise StateMismatchError(
                    f"the state was taken after {start.samples} samples, and the source has {number}: resume with the "
                    "source that the state was taken of, in the same order"
                )
        return rows

    def _iterate(self) -> Iterator[Any]:
        try:
            return iter(self._source)
        except Exception as error:
            self._note(error, self._position)
            raise

    def _resumed(self, start: SourceState) -> Iterator[Any]:
        """The samples after the state that the source is given."""
        self._source.load_state_dict(copy.deepcopy(start.state))
        rows = self._iterate()
        row = next(rows, _END)
        # Datasets of Hugging Face would begin each further pass at this state.
        parts: list[Any] = [self._source, getattr(self._source, "dataset", None)]
        for part in parts:
            if getattr(part, "_starting_state_dict", None) is not None:
                part.load_state_dict(None)
        while row is not _END:
            yield row
            row = next(rows, _END)

    def _draw(self, rows: Iterator[Any], number: int) -> Any:
        try:
            return next(rows, _END)
        except Exception as error:
            self._note(error, number)
            raise

    def _note(self, error: Exception, number: int) -> None:
        where = "" if self._worker is None else f" in worker {self._worker.number}"
        # Once, although an error of `_iterate` may pass a draw.
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
    return isinstance(source, Iterator) and not is_stateful(source)


def epoch_of(source: Any) -> int | None:
    """The epoch that the source says it is in."""
    epoch = getattr(source, "epoch", None)
    return epoch if isinstance(epoch, int) else None


def is_stateful(source: Any) -> bool:
    """Whether the source has a state of its own."""
    return callable(getattr(source, "state_dict", None)) and callable(
        getattr(source, "load_state_dict", None)
    )


def _has_exact_state(source: Any) -> bool:
    """Whether the source goes on from its state with the next sample.

    The state of a Hugging Face stream with `shuffle(buffer_size=…)` lacks the samples in the buffer. Such a stream
    gives the same samples again when it begins again.
    """
    return is_stateful(source) and not _has_shuffle_buffer(getattr(source, "_ex_iterable", None))


def _has_shuffle_buffer(examples: Any) -> bool:
    if examples is None:
        return False
    if type(examples).__name__ == "BufferShuffledExamplesIterable":
        return True
    inner = [getattr(examples, "ex_iterable", None), *getattr(examples, "ex_iterables", ())]
    return any(map(_has_shuffle_buffer, inner))


# ---- Rows of Hugging Face streams as arrays ----


def in_arrow_format(source: Any) -> Any | None:
    """A stream of the same rows, each as an Arrow table, with the same states.

    Args:
        source: The source of a `PackedStream`.

    Returns:
        A `datasets.IterableDataset` in the epoch of the source; None if the source is no such stream in the default
        format, or `datasets` makes the rows in Python (as `map` does), decodes them, or begins them at a state.
    """
    examples: Any = getattr(source, "_ex_iterable", None)
    features: Any = getattr(source, "features", None)
    try:
        if features is None or examples.iter_arrow is None or examples.is_typed:
            return None
        if getattr(source._formatting, "format_type", None) or source._starting_state_dict:
            return None
        if any(features._column_requires_decoding.values()):
            return None
    except AttributeError:
        # These names are private to `datasets`, and another release may lack one.
        return None
    tables = source.with_format("arrow")
    tables.set_epoch(source.epoch)
    return tables


def _arrow_rows(features: Any, listed: Collection[str]) -> Callable[[Any], dict[str, Any]]:
    """A function that takes a table of one row, and gives the row as `datasets` does, but with arrays for lists.

    Args:
        features: The columns, of type `datasets.Features`.
        listed: Names of columns that stay lists.
    """
    import pyarrow.types as types

    def is_array(kind: Any) -> bool:
        is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        return bool(is_list and (types.is_integer(kind.value_type) or types.is_boolean(kind.value_type)))

    arrays = {
        field.name: field.name not in listed and is_array(field.type) for field in features.arrow_schema
    }

    def read(table: Any) -> dict[str, Any]:
        row = {}
        for name, is_array in arrays.items():
            column = table.column(name)
            (row[name],) = column.to_numpy() if is_array else column.to_pylist()
        return row

    return read
