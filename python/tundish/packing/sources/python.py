"""Samples that are Python objects: iterables and map-style datasets."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tundish import _native
from tundish.errors import InvalidInputError, InvalidTypeError, TundishError, format_integer, format_type
from tundish.packing.arguments import IntegerArray
from tundish.packing.samples import SHAPE_ADVICE
from tundish.packing.sources.source import INPUT_IDS, LENGTH_COLUMNS, SampleRows, choose_column, narrowed

_MOST_TOKENS = 2**63 - 1


def count_samples(samples: Iterable[Any], column: str | None, where: Callable[[int], str]) -> IntegerArray:
    """Return the token count of each sample.

    Args:
        samples: Mappings or sequences of tokens.
        column: The key of the tokens or of their number; None means that of the first sample in `LENGTH_COLUMNS`.
        where: Names a sample for messages, given how many there are before it.

    Returns:
        Shape (samples,), int32 if every count fits, else int64.

    Raises:
        InvalidInputError: A sample lacks the key, or its value is null, holds a null or is no token count, or some
            values are counts and others tokens.
        InvalidTypeError: A sample is neither a mapping nor one-dimensional.
    """
    counts = array("q")
    # Whether the samples before hold counts, or tokens.
    held_counts: bool | None = None
    for number, sample in enumerate(samples):
        value, key = sample, None
        # Asking for the type of a dict takes a tenth of the time.
        if type(sample) is dict or isinstance(sample, Mapping):
            if column is None or column not in sample:
                # That of the first sample holds for all.
                column = choose_column(list(map(str, sample)), column, LENGTH_COLUMNS, where(number))
            value, key = sample[column], column
        is_count = key is not None and _is_integer(value)
        count = int(value) if is_count else _count_tokens(value)
        if count is None or not 0 <= count <= _MOST_TOKENS or held_counts not in (None, is_count):
            raise _refusal(value, key, where(number))
        if type(value) is list and _native.integers_of_list(value) is None and _holds_none(value):
            found = where(number) if key is None else f"{key} of {where(number)}"
            raise InvalidInputError(f"{found} holds a null, and every token needs a value")
        held_counts = is_count
        counts.append(count)
    return narrowed(np.frombuffer(counts, dtype=np.int64) if counts else np.empty(0, dtype=np.int64))


def _is_integer(value: Any) -> bool:
    """Whether `value` is one integer of Python, numpy or torch."""
    return type(value) is int or (
        getattr(value, "ndim", None) == 0 and "int" in str(getattr(value, "dtype", ""))
    )


def _is_sequence(value: Any) -> bool:
    has_entries = hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0
    return has_entries and not isinstance(value, str | bytes | Mapping)


def _count_tokens(value: Any) -> int | None:
    """The number of tokens in `value`; None if it is no sequence of one dimension."""
    if not _is_sequence(value):
        return None
    # Of lists, one entry tells whether they are nested. Entries may be tensors without dimensions.
    entry = value[0] if isinstance(value, list | tuple) and value else None
    is_nested = hasattr(entry, "__len__") and getattr(entry, "ndim", 1) > 0
    return None if is_nested or getattr(value, "ndim", 1) > 1 else len(value)


def _holds_none(value: list[Any]) -> bool:
    return any(entry is None for entry in value)


def _refusal(value: Any, key: str | None, where: str) -> TundishError:
    """The error for a value that is no token count and no tokens, or not what the samples before have."""
    found = where if key is None else f"{key} of {where}"
    if key is not None and value is None:
        return InvalidInputError(f"{found} is null; every sample needs a value")
    if key is not None and _is_integer(value) and not 0 <= value <= _MOST_TOKENS:
        return InvalidInputError(
            f"{found} is {format_integer(int(value))}; a token count is in 0 … 2**63 - 1"
        )
    if _count_tokens(value) is not None or (key is not None and _is_integer(value)):
        return InvalidInputError(
            f"{found} is {format_type(value)}, unlike in samples before it: a column holds token counts, or tokens"
        )
    if _is_sequence(value):
        # A nested tensor has no shape that can be asked for.
        has_shape = not getattr(value, "is_nested", False) and hasattr(value, "shape")
        described = f"of shape {tuple(value.shape)}" if has_shape else "nested"
        advice = f"; {SHAPE_ADVICE}" if has_shape else ""
        return InvalidTypeError(
            f"{found} is {described}, and the tokens of a sample have one dimension{advice}"
        )
    hint = "" if key is None else ", or their number"
    if isinstance(value, str):
        hint = ": tokenize the texts first, with td.hf.tokenize"
    elif key is None and _is_integer(value):
        hint = ": token counts need no counting, td.pack takes them as they are"
    return InvalidTypeError(f"{found} is {format_type(value)}, and tokens are a sequence of integers{hint}")


def rename_keys(
    sample: Mapping[str, Any], tokens: str, columns: Sequence[str] | None, where: str
) -> dict[str, Any]:
    """Return the entries of a sample under the names that `PackedDataset` reads.

    Args:
        sample: The sample.
        tokens: The key that becomes `input_ids`.
        columns: Further keys; None takes all.
        where: The sample, for messages.

    Raises:
        InvalidInputError: The sample lacks a key.
    """
    for name in (tokens, *(columns or ())):
        if name not in sample:
            # Raises the error that names the keys there are.
            choose_column(list(map(str, sample)), name, (), where)
    others = sample if columns is None else columns
    # The tokens are given as `input_ids`, so another entry of this name has no place beside them.
    return {INPUT_IDS: sample[tokens]} | {
        key: sample[key] for key in others if key not in (tokens, INPUT_IDS)
    }


class PythonSamples(NamedTuple):
    """An iterable of samples, or a map-style dataset."""

    owner: Any

    def lengths(self, column: str | None) -> IntegerArray:
        return count_samples(_each(self.owner), column, "sample {}".format)

    def samples(self, column: str | None, columns: Sequence[str] | None) -> Any:
        if not is_map_style(self.owner):
            raise InvalidTypeError(
                f"source is {format_type(self.owner)}, which gives samples one after the other, and PackedDataset "
                "reads them by number: give a list or a map-style dataset"
            )
        if column is None and columns is None:
            return self.owner
        return _RenamedSamples(self.owner, column or INPUT_IDS, columns)


class _RenamedSamples(SampleRows):
    """The samples of a map-style dataset under the names that `PackedDataset` reads."""

    def __init__(self, owner: Any, tokens: str, columns: Sequence[str] | None) -> None:
        self._owner = owner
        self._tokens = tokens
        self._columns = columns

    def __len__(self) -> int:
        return len(self._owner)

    def _read(self, number: int) -> dict[str, Any]:
        sample = self._owner[number]
        where = f"sample {number}"
        if not isinstance(sample, Mapping):
            raise InvalidTypeError(
                f"{where} is {format_type(sample)}, which has no columns; column={self._tokens!r} was asked for"
            )
        return rename_keys(sample, self._tokens, self._columns, where)


def is_map_style(source: Any) -> bool:
    """Whether `source` gives its samples by number."""
    return hasattr(source, "__len__") and hasattr(source, "__getitem__")


def _each(source: Any) -> Iterator[Any]:
    """The samples of `source`, in order."""
    if hasattr(source, "__iter__"):
        yield from source
        return
    # Python's own iteration would take an IndexError of the dataset for the end.
    for number in range(len(source)):
        yield source[number]
