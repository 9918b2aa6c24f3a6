"""JSON Lines: one JSON object a line. Lines of white space alone, also after a byte order mark, are no samples."""

from __future__ import annotations

import bisect
import codecs
import itertools
import json
import mmap
import secrets
from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tundish import _native
from tundish.errors import InvalidInputError, InvalidTypeError, format_type
from tundish.packing.arguments import IntegerArray
from tundish.packing.samples import MEANINGFUL_KEYS
from tundish.packing.sources.python import count_samples, rename_keys
from tundish.packing.sources.sample_cache import converted
from tundish.packing.sources.source import INPUT_IDS, Kept, SampleRows, concatenated
from tundish.packing.sources.tables import ArrowSamples, import_pyarrow, ipc_files, number_lists
from tundish.regular_files import open_regular_file

# Bytes of whole lines that are in memory at once.
_READ_BYTES = 2**18
_KIND = "a file of JSON Lines"
# Entries of lists that a cache converts together.
_ENTRIES_AT_ONCE = 2**19
# About what Python takes for a sample, and for an entry of a list.
_SAMPLE_BYTES, _ENTRY_BYTES = 1024, 40
# Stands between two lines that are parsed together. No file holds it, so lines that end within an object are noticed.
_SEPARATOR = secrets.token_hex(8)


class JsonLinesFiles(NamedTuple):
    """Files of JSON Lines whose lines are the samples, file after file."""

    paths: Sequence[Path]

    def lengths(self, column: str | None) -> IntegerArray:
        readers = map(_Lines, self.paths)
        return concatenated(count_samples(lines, column, lines.describe) for lines in readers)

    def samples(self, column: str | None, columns: Sequence[str] | None) -> JsonLinesSamples:
        samples = JsonLinesSamples(self.paths, column or INPUT_IDS, columns)
        # Finds the lines now: copies in the workers of a `DataLoader` get their places.
        len(samples)
        return samples

    def cached_samples(
        self, column: str | None, columns: Sequence[str] | None, cache: Path, progress: bool | None
    ) -> ArrowSamples:
        import_pyarrow("a cache of samples")
        lines = JsonLinesSamples(self.paths, column or INPUT_IDS, columns)
        # One Arrow file for all: the lines need not have the same keys.
        file = converted(cache, self.paths, lines.reads(), lines.tables, lines.__len__, progress)
        return ipc_files([file]).samples(None, None)


class JsonLinesSamples(SampleRows):
    """Lines as samples. A sample has its tokens as `input_ids`, and either `columns`, or labels, masks and numbers.

    Another key is read if a list in the first lines of the first file has a number there. So each line is read in the
    same way, also those where the list is empty. A list with a number under a key that is not read is refused.
    """

    def __init__(self, paths: Sequence[Path], tokens: str, columns: Sequence[str] | None) -> None:
        self._paths = list(paths)
        self._tokens = tokens
        self._columns = columns
        self._number_keys = _number_keys(paths[0]) if columns is None else set()
        self._files: dict[int, mmap.mmap] = {}
        self._kept: Kept[dict[str, Any]] = Kept(str(paths[0]))

    @cached_property
    def _starts(self) -> list[array[int]]:
        """The first byte of each line of each file. Finding them reads all files, which a cache saves."""
        return list(map(_line_starts, self._paths))

    @cached_property
    def _ends(self) -> list[int]:
        """The number of samples up to the end of each file."""
        return list(itertools.accumulate(map(len, self._starts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}

    def _read(self, number: int) -> dict[str, Any]:
        return dict(self._kept.get(number) or self._parsed(number))

    def reads(self) -> list[Any]:
        """What is read of the lines, for the key of a cache."""
        return [self._tokens, self._columns, sorted(self._number_keys)]

    def tables(self) -> Iterator[Any]:
        """Yield the samples as tables of pyarrow, of some `_VALUES_AT_ONCE` entries. The first one has no rows."""
        import pyarrow

        yield pyarrow.table({INPUT_IDS: number_lists([], str(self._paths[0]))})
        first, samples, entries = 0, [], 0
        for number in range(len(self)):
            sample = self._row(number)
            samples.append(sample)
            entries += sum(len(value) for value in sample.values() if isinstance(value, list))
            if entries < _ENTRIES_AT_ONCE and number + 1 < len(self):
                continue
            where = f"{self._where(first)} or of one after it"
            keys = dict.fromkeys(itertools.chain.from_iterable(samples))
            columns = {
                key: number_lists([sample.get(key) for sample in samples], f"{key} of {where}")
                for key in keys
            }
            yield pyarrow.table(columns)
            first, samples, entries = number + 1, [], 0

    def _place(self, number: int) -> tuple[int, int]:
        """The file of a sample, and its number there."""
        place = bisect.bisect_right(self._ends, number)
        return place, number - (self._ends[place] - len(self._starts[place]))

    def _where(self, number: int) -> str:
        place, own = self._place(number)
        return f"sample {own} of {self._paths[place]}"

    def _row(self, number: int) -> dict[str, Any]:
        """Parse a line, and choose its columns."""
        place, own = self._place(number)
        mapped = self._mapped(place)
        start = self._starts[place][own]
        stop = mapped.find(b"\n", start)
        line = _content(mapped[start : stop if stop >= 0 else len(mapped)])
        where = self._where(number)
        sample = _parse(line, where)
        columns = self._columns
        if columns is None:
            columns = [key for key, value in sample.items() if self._is_read(key, value, where)]
        return rename_keys(sample, self._tokens, columns, where)

    def _parsed(self, number: int) -> dict[str, Any]:
        """Parse a line, once for all packs that take a part of it."""
        sample = self._row(number)
        size = _SAMPLE_BYTES
        for key, value in sample.items():
            if type(value) is not list:
                continue
            if (integers := _native.integers_of_list(value)) is None:
                size += _ENTRY_BYTES * len(value)
                continue
            # Arrays take a fifth of the memory of lists.
            integers.flags.writeable = False
            sample[key] = integers
            size += integers.nbytes
        return self._kept.add(number, sample, size)

    def _is_read(self, key: str, value: Any, where: str) -> bool:
        if key in MEANINGFUL_KEYS:
            return True
        if key in self._number_keys:
            return True
        if key not in (self._tokens, INPUT_IDS) and _has_number(value):
            raise InvalidInputError(
                f"{key} of {where} is a list with numbers, and the first lines of {self._paths[0]} have none: name the "
                "columns to read with columns="
            )
        return False

    def _mapped(self, place: int) -> mmap.mmap:
        if place not in self._files:
            with open_regular_file(self._paths[place], _KIND) as file:
                self._files[place] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._files[place]


class _Lines:
    """The samples of a file. `describe` names the one that was given last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        before = 0
        with open_regular_file(self._path, _KIND) as file:
            while lines := file.readlines(_READ_BYTES):
                held = [
                    (number, content)
                    for number, line in enumerate(lines, before + 1)
                    if (content := _content(line))
                ]
                before += len(lines)
                samples = _parse_together([content for _, content in held])
                for (self._number, content), sample in zip(held, samples, strict=True):
                    yield _parse(content, self.describe(0)) if sample is None else sample

    def describe(self, _: int) -> str:
        return f"line {self._number} of {self._path}"


def _content(line: bytes) -> bytes:
    """A line without white space and byte order mark; empty if the line is no sample."""
    return line.removeprefix(codecs.BOM_UTF8).strip()


def _line_starts(path: Path) -> array[int]:
    """The first byte of each line that is a sample."""
    starts = array("q")
    position = 0
    with open_regular_file(path, _KIND) as file:
        for line in file:
            # Most lines are told by their first byte.
            if line[:1] == b"{" or _content(line):
                starts.append(position)
            position += len(line)
    return starts


def _number_keys(path: Path) -> set[str]:
    """The keys that have a list with a number in one of the first lines."""
    found: set[str] = set()
    with open_regular_file(path, _KIND) as file:
        for content in filter(None, map(_content, file.readlines(_READ_BYTES))):
            try:
                sample = json.loads(content)
            except (ValueError, RecursionError):
                # Reading the sample says what is wrong with it.
                continue
            if isinstance(sample, dict):
                found.update(key for key, value in sample.items() if key not in found and _has_number(value))
    return found


def _parse_together(lines: Sequence[bytes]) -> Sequence[dict[str, Any] | None]:
    """The objects of several lines, parsed in one call, which saves half the time. Nones if a line is no object."""
    separator = b',"%s",' % _SEPARATOR.encode()
    try:
        parsed = json.loads(b"[%s]" % separator.join(lines))
    except (ValueError, RecursionError):
        parsed = []
    samples, between = parsed[0::2], parsed[1::2]
    are_lines = len(samples) == len(lines) and between == [_SEPARATOR] * (len(lines) - 1)
    are_objects = are_lines and set(map(type, samples)) <= {dict}
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


def _has_number(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(entry, int | float) for entry in value)
