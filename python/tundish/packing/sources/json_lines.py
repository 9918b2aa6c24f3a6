"""JSON Lines: one JSON object a line. Lines of nothing but white space are no samples."""

from __future__ import annotations

import bisect
import itertools
import json
import mmap
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tundish.errors import InvalidInputError, InvalidTypeError, format_type
from tundish.packing.arguments import IntegerArray
from tundish.packing.sources.columns import INPUT_IDS, concatenated
from tundish.packing.sources.sample_counts import count_samples, rename_keys
from tundish.packing.sources.sample_rows import SampleRows

__all__ = ["JsonLinesFiles"]

# Bytes of whole lines that are in memory at once.
_READ_BYTES = 2**18


@dataclass(frozen=True)
class JsonLinesFiles:
    """Files of JSON Lines whose lines are the samples, file after file."""

    paths: Sequence[Path]

    def lengths(self, column: str | None) -> IntegerArray:
        readers = map(_Lines, self.paths)
        return concatenated(count_samples(lines, column, lines.describe) for lines in readers)

    def samples(self, column: str | None, columns: Sequence[str] | None) -> JsonLinesSamples:
        return JsonLinesSamples(self.paths, column or INPUT_IDS, columns)


class JsonLinesSamples(SampleRows):
    """Lines as samples. A sample has its tokens as `input_ids`, and either `columns` or all other lists of numbers."""

    def __init__(self, paths: Sequence[Path], tokens: str, columns: Sequence[str] | None) -> None:
        self._paths = list(paths)
        self._tokens = tokens
        self._columns = columns
        self._starts = [_line_starts(path) for path in paths]
        self._ends = list(itertools.accumulate(map(len, self._starts)))
        self._maps: dict[int, mmap.mmap] = {}

    def __len__(self) -> int:
        return self._ends[-1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}

    def _read(self, number: int) -> dict[str, Any]:
        place = bisect.bisect_right(self._ends, number)
        own = number - (self._ends[place] - len(self._starts[place]))
        mapped = self._mapped(place)
        start = self._starts[place][own]
        stop = mapped.find(b"\n", start)
        where = f"sample {own} of {self._paths[place]}"
        sample = _parse(mapped[start : stop if stop >= 0 else len(mapped)], where)
        columns = self._columns
        if columns is None:
            columns = [key for key, value in sample.items() if _is_number_list(value)]
        return rename_keys(sample, self._tokens, columns, where)

    def _mapped(self, place: int) -> mmap.mmap:
        if place not in self._maps:
            with self._paths[place].open("rb") as file:
                self._maps[place] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[place]


class _Lines:
    """The samples of a file. `describe` names the one that was given last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        before = 0
        with self._path.open("rb") as file:
            while lines := file.readlines(_READ_BYTES):
                held = [(number, line) for number, line in enumerate(lines, before + 1) if not line.isspace()]
                before += len(lines)
                samples = _parse_together([line for _, line in held])
                for (self._number, line), sample in zip(held, samples, strict=True):
                    yield _parse(line, self.describe(0)) if sample is None else sample

    def describe(self, _: int) -> str:
        return f"line {self._number} of {self._path}"


def _line_starts(path: Path) -> array[int]:
    """The first byte of each line that is a sample."""
    starts = array("q")
    position = 0
    with path.open("rb") as file:
        for line in file:
            if not line.isspace():
                starts.append(position)
            position += len(line)
    return starts


def _parse_together(lines: Sequence[bytes]) -> Sequence[dict[str, Any] | None]:
    """The objects of several lines, parsed in one call, which saves half the time. Nones if a line is no object."""
    try:
        samples = json.loads(b"[%s]" % b",".join(lines))
    except (ValueError, RecursionError):
        samples = []
    are_objects = len(samples) == len(lines) and set(map(type, samples)) <= {dict}
    return samples if are_objects else [None] * len(lines)


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        sample = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{where} is no JSON object: {error}; write one object a line") from error
    if not isinstance(sample, dict):
        raise InvalidTypeError(
            f"{where} is {format_type(sample)}, and a sample is a JSON object; write one a line"
        )
    return sample


def _is_number_list(value: Any) -> bool:
    return isinstance(value, list) and (not value or isinstance(value[0], int | float))
