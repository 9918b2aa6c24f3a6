"""Token counts of samples that are Python objects, one after the other."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tundish.errors import InvalidInputError, InvalidTypeError, format_integer, format_type
from tundish.packing.arguments.integer_arrays import IntegerArray
from tundish.packing.sources.columns import INPUT_IDS, LENGTH_COLUMNS, choose_column, narrowed
from tundish.packing.sources.sample_rows import SampleRows

__all__ = ["PythonSamples", "count_samples", "is_map_style", "rename_keys"]

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
        InvalidInputError: A sample lacks the key, or its value is null or no token count, or some values are counts
            and others tokens.
        InvalidTypeError: A sample is neither a mapping nor one-dimensional.
    """
    counts = array("q")
    has_counts = has_tokens = False
    for sample in samples:
        value = sample
        # Asking for the type of a dict takes a tenth of the time.
        is_mapping = type(sample) is dict or isinstance(sample, Mapping)
        if is_mapping:
            if column is None or column not in sample:
                # That of the first sample holds for all.
                column = choose_column(list(map(str, sample)), column, LENGTH_COLUMNS, where(len(counts)))
            value = sample[column]
            # A number of tokens, as most files have it.
            if type(value) is int and 0 <= value <= _MOST_TOKENS and not has_tokens:
                has_counts = True
                counts.append(value)
                continue
        count = _count(value, column if is_mapping else None, where, len(counts))
        if is_mapping:
            has_tokens = has_tokens or (hasattr(value, "__len__") and getattr(value, "ndim", 1) != 0)
            if has_tokens and (has_counts or type(value) is int):
                raise InvalidInputError(
                    f"{column} of {where(len(counts))} is {format_type(value)}, unlike in samples before it: a column "
                    "holds token counts, or tokens"
                )
        counts.append(count)
    return narrowed(np.frombuffer(counts, dtype=np.int64) if counts else np.empty(0, dtype=np.int64))


def _count(value: Any, column: str | None, where: Callable[[int], str], number: int) -> int:
    """The token count that `value` is or has."""
    kind = getattr(value, "dtype", None)
    is_scalar = getattr(value, "ndim", None) == 0
    if column is not None and value is None:
        raise InvalidInputError(f"{column} of {where(number)} is null; every sample needs a value")
    if column is not None and (type(value) is int or (is_scalar and "int" in str(kind))):
        if not 0 <= int(value) <= _MOST_TOKENS:
            raise InvalidInputError(
                f"{column} of {where(number)} is {format_integer(int(value))}; a token count is in 0 … 2**63 - 1"
            )
        return int(value)
    found = where(number) if column is None else f"{column} of {where(number)}"
    if isinstance(value, str | bytes | Mapping) or is_scalar or not hasattr(value, "__len__"):
        hint = ""
        if isinstance(value, str):
            hint = ": tokenize the texts first"
        elif column is None and (type(value) is int or is_scalar):
            hint = ": token counts need no counting, td.pack takes them as they are"
        raise InvalidTypeError(
            f"{found} is {format_type(value)}, and tokens are a sequence of integers{hint or _or_a_count(column)}"
        )
    if getattr(value, "ndim", 1) != 1 or (isinstance(value, list | tuple) and value and _is_nested(value[0])):
        shape = getattr(value, "shape", None)
        described = "nested" if shape is None else f"of shape {tuple(shape)}"
        raise InvalidTypeError(f"{found} is {described}, and the tokens of a sample have one dimension")
    return len(value)


def _or_a_count(column: str | None) -> str:
    return "" if column is None else ", or their number"


def _is_nested(entry: Any) -> bool:
    return hasattr(entry, "__len__") and getattr(entry, "ndim", 1) != 0


def rename_keys(sample: Mapping[str, Any], tokens: str, columns: Sequence[str] | None) -> dict[str, Any]:
    """Return the entries of a sample under the names that `PackedDataset` reads.

    Args:
        sample: The sample.
        tokens: The key that becomes `input_ids`.
        columns: Further keys; None takes all.
    """
    taken = {tokens, INPUT_IDS}
    others = [key for key in sample if key not in taken] if columns is None else columns
    return {INPUT_IDS: sample[tokens]} | {key: sample[key] for key in others if key not in taken}


@dataclass(frozen=True)
class PythonSamples:
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
        for name in (self._tokens, *(self._columns or ())):
            choose_column(list(map(str, sample)), name, (), where)
        return rename_keys(sample, self._tokens, self._columns)


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
