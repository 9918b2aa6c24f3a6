"""`open_samples(…, cache=…)`: samples of Parquet and JSON Lines, converted once to mapped Arrow files."""

from __future__ import annotations

import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from support.distributed.programs import PIPE, Program, run
from support.packing.sources import draw_rows, write_megatron
from support.soak import chosen

import tundish as td
from tundish import _native
from tundish.errors import InvalidInputError, InvalidTypeError, StorageError
from tundish.packing.sources import json_lines, sample_cache, source, tables

ROWS: list[dict[str, Any]] = draw_rows(200, longest=30)


def write_parquet(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    return path


def write_lines(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def entries(cache: Path) -> list[str]:
    return sorted(entry.name for entry in cache.iterdir() if not entry.name.startswith("."))


def assert_samples_alike(found: Any, rows: list[dict[str, Any]]) -> None:
    assert len(found) == len(rows)
    for sample, row in zip(found, rows, strict=True):
        expected = {key: value for key, value in row.items() if value is not None}
        assert {key: np.asarray(value).tolist() for key, value in sample.items()} == expected


@pytest.mark.parametrize("write", [write_parquet, write_lines])
def test_cached_samples_are_those_of_the_files(write: Any, tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.{write.__name__[6:]}", ROWS) for name in "ab"]
    paths = [
        path.rename(path.with_suffix(".parquet" if write is write_parquet else ".jsonl")) for path in paths
    ]
    cache = tmp_path / "deep" / "cache"
    samples = td.packing.open_samples(paths, cache=cache)
    assert_samples_alike(samples, ROWS + ROWS)
    plan = td.pack(td.packing.lengths(paths), 64, seed=1)
    expected = td.PackedDataset(td.packing.open_samples(paths), plan)
    for item, own in zip(td.PackedDataset(samples, plan), expected, strict=True):
        assert item["input_ids"].equal(own["input_ids"]) and item["labels"].equal(own["labels"])
    before = entries(cache)
    assert_samples_alike(td.packing.open_samples(paths, cache=cache), ROWS + ROWS)
    assert entries(cache) == before
    # Rows are views of the mapped file, and cannot be written to.
    with pytest.raises(ValueError, match="read-only"):
        samples[0]["labels"][:] = 1


def test_a_file_that_changed_is_converted_again(tmp_path: Path) -> None:
    path, cache = write_parquet(tmp_path / "a.parquet"), tmp_path / "cache"
    td.packing.open_samples(path, cache=cache)
    write_parquet(path, ROWS[::-1])
    assert_samples_alike(td.packing.open_samples(path, cache=cache), ROWS[::-1])
    # Other columns are another conversion.
    only_tokens = td.packing.open_samples(path, columns=[], cache=cache)
    assert only_tokens[0].keys() == {"input_ids"}
    renamed = td.packing.open_samples(path, "labels", columns=[], cache=cache)
    assert renamed[3]["input_ids"].tolist() == ROWS[-4]["labels"]
    assert len(entries(cache)) == 4


def test_a_file_that_changes_during_its_conversion_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = write_lines(tmp_path / "a.jsonl"), tmp_path / "cache"
    own = sample_cache._write

    def write(*arguments: Any) -> None:
        own(*arguments)
        write_lines(path, ROWS[::-1])

    monkeypatch.setattr(sample_cache, "_write", write)
    with pytest.raises(InvalidInputError, match=r"a\.jsonl: was changed while it was converted"):
        td.packing.open_samples(path, cache=cache)
    assert entries(cache) == []


def test_lines_need_not_be_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "_ENTRIES_AT_ONCE", 3)
    rows = [
        {"input_ids": [1, 2], "weight": [], "text": "a"},
        {"input_ids": [], "weight": [1]},
        {"input_ids": [3, 4], "weight": [1, 2], "loss_mask": None},
        {"input_ids": [5, 6], "weight": [0.5, 2], "loss_mask": [1, 0]},
        {"input_ids": [7, 8], "weight": [3, 4]},
    ]
    path = write_lines(tmp_path / "a.jsonl", rows)
    samples = td.packing.open_samples(path, cache=tmp_path / "cache")
    expected = [{key: value for key, value in row.items() if key != "text"} for row in rows]
    assert_samples_alike(samples, expected)
    assert {sample["weight"].dtype for sample in samples} == {np.dtype(float)}
    # Without any line, and without an entry in any.
    (tmp_path / "none.jsonl").touch()
    assert len(td.packing.open_samples(tmp_path / "none.jsonl", cache=tmp_path / "cache")) == 0
    blank = write_lines(tmp_path / "blank.jsonl", [{"input_ids": []}] * 3)
    assert_samples_alike(td.packing.open_samples(blank, cache=tmp_path / "cache"), [{"input_ids": []}] * 3)


@pytest.mark.parametrize(
    ("row", "columns", "kind", "message"),
    [
        ({"input_ids": [1, 2**70]}, None, InvalidInputError, r"input_ids of sample 1 of .*a\.jsonl or of one after it"),
        ({"input_ids": [1, "a"]}, None, InvalidInputError, r"input_ids of sample 1 of .*a\.jsonl or of one after it"),
        ({"input_ids": [1], "names": ["b"]}, ["names"], InvalidInputError, "sample 0 .* has no column 'names'"),
        ({"input_ids": ["b"]}, None, InvalidTypeError, r"input_ids of sample 1 .* is no list of numbers"),
    ],
)  # fmt: skip
def test_what_a_cache_cannot_hold_is_refused_by_its_name(
    row: Any,
    columns: Any,
    kind: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json_lines, "_ENTRIES_AT_ONCE", 1)
    path = write_lines(tmp_path / "a.jsonl", [{"input_ids": [1]}, row])
    with pytest.raises(kind, match=message):
        td.packing.open_samples(path, columns=columns, cache=tmp_path / "cache")
    assert entries(tmp_path / "cache") == []


def test_sources_that_are_mapped_refuse_a_cache(tmp_path: Path) -> None:
    table = pa.table({"input_ids": [[1, 2]]})
    pyarrow.feather.write_feather(table, tmp_path / "a.arrow")
    write_megatron(tmp_path / "a.idx", [[1, 2]], [1])
    for given in (tmp_path / "a.arrow", tmp_path / "a.idx", table, [{"input_ids": [1, 2]}]):
        with pytest.raises(InvalidInputError, match="cache is for Parquet files and JSON Lines"):
            td.packing.open_samples(given, cache=tmp_path / "cache")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="is not a folder, so it cannot be the cache"):
        td.packing.open_samples(write_parquet(tmp_path / "a.parquet"), cache=tmp_path / "file")


OPEN = """
import logging, sys, tundish as td
logging.basicConfig(level=logging.INFO, format="%(message)s")
samples = td.packing.open_samples(sys.argv[1], cache=sys.argv[2])
print(sum(int(sample["input_ids"].sum()) for sample in samples))
"""


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_of_processes_that_open_at_once_one_converts(name: str, tmp_path: Path) -> None:
    rows = draw_rows(3000, longest=200)
    path = (write_parquet if name == "a.parquet" else write_lines)(tmp_path / name, rows)
    programs = [Program(["-c", OPEN, path, tmp_path / "cache"], stdout=PIPE, stderr=PIPE) for _ in range(4)]
    said = [program.communicate() for program in programs]
    expected = f"{sum(sum(row['input_ids']) for row in rows)}\n"
    assert [out for out, _ in said] == [expected] * 4
    assert sum(err.count("converted") for _, err in said) == 1, said
    assert len(entries(tmp_path / "cache")) == 1


def test_a_killed_conversion_leaves_nothing_that_is_used(tmp_path: Path) -> None:
    assert _native.HAS_FAILPOINTS, "the compiled module has no failpoints: run the tests with `make test`"
    path, trace = write_parquet(tmp_path / "a.parquet"), tmp_path / "trace"
    ran = run(
        ["-c", OPEN, path, tmp_path / "whole"], env=os.environ | {"TUNDISH_FAILPOINT_TRACE": str(trace)}
    )
    assert ran.returncode == 0, ran.stderr
    hits = 2 * len(trace.read_text().splitlines())
    assert hits > 10
    found = set()
    for hit in chosen(range(hits)):
        cache = tmp_path / f"hit-{hit}"
        ran = run(["-c", OPEN, path, cache], env=os.environ | {"TUNDISH_FAILPOINT": f"kill {hit}"})
        assert ran.returncode == -signal.SIGKILL, (hit, ran.stderr)
        found.add(len(entries(cache)))
        assert_samples_alike(td.packing.open_samples(path, cache=cache), ROWS)
        # The next conversion removes what the killed one left.
        td.packing.open_samples(path, columns=[], cache=cache)
        assert sorted(os.listdir(cache)) == [".lock", *entries(cache)] and len(entries(cache)) == 2
    assert found == {0, 1}


def test_a_file_system_without_locks_serves_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = write_parquet(tmp_path / "a.parquet"), tmp_path / "cache"

    def refuse(*_: Any) -> None:
        # As if another process, which no lock keeps waiting, published meanwhile.
        monkeypatch.undo()
        td.packing.open_samples(path, cache=cache)
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(sample_cache.fcntl, "flock", refuse)
    assert_samples_alike(td.packing.open_samples(path, cache=cache), ROWS)
    assert len(entries(cache)) == 1


@pytest.mark.parametrize("write", [write_parquet, write_lines])
def test_reading_that_decodes_again_and_again_is_said_once(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(source, "_KEPT_BYTES", 4096)
    monkeypatch.setattr(source, "_has_said", source.threading.Event())
    path = write(tmp_path / ("a.parquet" if write is write_parquet else "a.jsonl"))
    samples = td.packing.open_samples(path)
    order = np.random.default_rng(0).permutation(len(samples)).tolist()
    for number in range(len(samples)):
        samples[number]
    # Each was decoded once.
    assert not caplog.records
    monkeypatch.setenv("RANK", "1")
    for number in order * 3:
        samples[number]
    assert not caplog.records
    monkeypatch.setenv("RANK", "0")
    for number in order * 3:
        samples[number]
    (record,) = caplog.records
    assert (record.levelno, record.name) == (logging.WARNING, "tundish.packing")
    assert "decoded more than once" in record.getMessage() and "cache=" in record.getMessage()
    # What is mapped says nothing.
    monkeypatch.setattr(source, "_has_said", source.threading.Event())
    samples = td.packing.open_samples(path, cache=tmp_path / "cache")
    for number in order * 3:
        samples[number]
    assert len(caplog.records) == 1


def test_a_line_is_parsed_once_for_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"input_ids": list(range(1000))}, {"input_ids": [7] * 10}]
    path = write_lines(tmp_path / "a.jsonl", rows)
    parsed: list[str] = []
    own = json_lines._parse
    monkeypatch.setattr(json_lines, "_parse", lambda line, where: parsed.append(where) or own(line, where))
    # So that nothing is kept.
    monkeypatch.setattr(source, "_KEPT_BYTES", 1)
    plan = td.pack([1000, 10], 10, seed=0)
    for _ in range(2):
        dataset = td.PackedDataset(td.packing.open_samples(path, cache=tmp_path / "cache"), plan)
        assert sum(len(item["input_ids"]) for item in dataset) == 1010
    assert len(parsed) == 2


def test_row_groups_that_are_large_are_converted_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_VALUES_AT_ONCE", 50)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    assert_samples_alike(td.packing.open_samples(path, cache=tmp_path / "cache"), ROWS)
    (entry,) = entries(tmp_path / "cache")
    with pa.memory_map(str(tmp_path / "cache" / entry / "samples.arrow")) as file:
        sizes = [len(batch.column(0).values) for batch in pa.ipc.open_stream(file)]
    # The largest sample has 30 tokens, and 50 are taken together on average.
    assert len(sizes) > 20 and max(sizes) < 50 * 4
