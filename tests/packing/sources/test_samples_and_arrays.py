"""Token counts of samples in memory and of the files of numpy, and what is refused of them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.packing.samples import Rows, make_nested
from support.packing.sources import assert_packs_alike, draw_rows, write_megatron

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError, StorageError, TundishError

ROWS = draw_rows(30)
TOKENS = [row["input_ids"] for row in ROWS]


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


NESTED = make_nested()


def test_samples_of_every_form() -> None:
    expected = [len(tokens) for tokens in TOKENS]
    for source in (
        ROWS,
        TOKENS,
        tuple(ROWS),
        iter(ROWS),
        (tokens for tokens in TOKENS),
        Stream(),
        Rows(ROWS),
        [np.array(tokens, dtype=np.int16) for tokens in TOKENS],
        [torch.tensor(tokens) for tokens in TOKENS],
        [{"length": torch.tensor(len(tokens))} for tokens in TOKENS],
        [{"length": np.int16(len(tokens)), "input_ids": [1]} for tokens in TOKENS],
    ):
        found = td.packing.lengths(source)
        assert (found.tolist(), found.dtype) == (expected, np.int32)
    assert td.packing.lengths(np.ones((3, 5), dtype=int)).tolist() == [5, 5, 5]
    assert td.packing.lengths([]).tolist() == []
    assert td.packing.lengths([{"length": 2**40}]).dtype == np.int64


def test_samples_in_memory_are_read_as_they_are_unless_a_column_is_named() -> None:
    for source in (ROWS, TOKENS, Rows(ROWS)):
        assert td.packing.open_samples(source) is source
        assert_packs_alike(source, ROWS if source is not TOKENS else TOKENS)
    renamed = [{"tokens": row["input_ids"], "labels": row["labels"], "input_ids": [0]} for row in ROWS]
    assert_packs_alike(renamed, ROWS, "tokens")
    assert td.packing.open_samples(renamed, "tokens", columns=[])[0] == {"input_ids": TOKENS[0]}
    with pytest.raises(
        InvalidInputError, match="sample 1 has no column 'ids': its columns are 'input_ids' and"
    ):
        td.packing.open_samples(ROWS, "ids")[1]
    with pytest.raises(InvalidTypeError, match="sample 0 is a list, which has no columns; column='ids' was"):
        td.packing.open_samples(TOKENS, "ids")[0]


def test_errors_of_a_dataset_are_its_own() -> None:
    class Broken(Rows):
        def __getitem__(self, index: int) -> Any:
            raise IndexError("a bug of the dataset")

    with pytest.raises(IndexError, match="a bug of the dataset"):
        td.packing.lengths(Broken(ROWS))


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        ([[1], 5], InvalidTypeError, "sample 1 is an int, and tokens are a sequence of integers: token counts need no"),
        ([[1], "ab"], InvalidTypeError, "sample 1 is a str, .*: tokenize the texts first"),
        ([[1], None], InvalidTypeError, "sample 1 is None"),
        ([[1], [[1, 2]]], InvalidTypeError, "sample 1 is nested, and the tokens of a sample have one dimension"),
        ([[1], NESTED], InvalidTypeError, "sample 1 is nested, and the tokens of a sample have one dimension"),
        ([{"input_ids": NESTED}], InvalidTypeError, "input_ids of sample 0 is nested"),
        ([{"input_ids": torch.ones(1, 4)}], InvalidTypeError, r"input_ids of sample 0 is of shape \(1, 4\)"),
        ([{"input_ids": [1]}, {"ids": [1]}], InvalidInputError, "sample 1 has no column 'input_ids': its only column"),
        ([{"text": "a", "id": 1}], InvalidInputError, "no column 'length' and no 'input_ids': its columns are 'text'"),
        ([{"input_ids": None}], InvalidInputError, "input_ids of sample 0 is null"),
        ([[1], [1, None]], InvalidInputError, "sample 1 holds a null, and every token needs a value"),
        ([{"input_ids": [None]}], InvalidInputError, "input_ids of sample 0 holds a null"),
        ([{"input_ids": "ab"}], InvalidTypeError, "input_ids of sample 0 is a str"),
        ([{"length": 1.0}], InvalidTypeError, "length of sample 0 is a float, .* or their number"),
        ([{"length": np.float32(1)}], InvalidTypeError, "length of sample 0 is a float32"),
        ([{"length": True}], InvalidTypeError, "length of sample 0 is a bool"),
        ([{"length": -1}], InvalidInputError, "length of sample 0 is -1"),
        ([{"length": np.int8(-1)}], InvalidInputError, "length of sample 0 is -1"),
        (np.array([1.5]), InvalidTypeError, "sample 0 is a float64"),
        ({"input_ids": [1]}, InvalidTypeError, "source is a dict; .*: give one of its entries, which are 'input_ids'"),
        (b"abc", InvalidTypeError, "source is a bytes; give a path, a dataset or samples"),
        (None, InvalidTypeError, "source is None"),
        (7, InvalidTypeError, "source is an int"),
        ("", InvalidTypeError, "source is '': give a path"),
        ("a\0b", InvalidInputError, "source is .* no path can hold a null character"),
    ],
)  # fmt: skip
def test_other_sources_are_refused(source: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        td.packing.lengths(source)
    assert isinstance(caught.value, td.TundishError)


def test_other_names_of_columns_are_refused() -> None:
    for column in (7, "", ["length"]):
        with pytest.raises(InvalidTypeError, match="column must be the name of a column"):
            td.packing.lengths(ROWS, column)  # type: ignore[arg-type]
    for columns in ("labels", 7, [7], [""]):
        with pytest.raises(InvalidTypeError, match="columns must be a list of names"):
            td.packing.open_samples(ROWS, columns=columns)  # type: ignore[arg-type]


def test_arrays_in_memory_and_in_files(tmp_path: Path) -> None:
    counts = np.array([3, 0, 7], dtype=np.uint16)
    np.save(tmp_path / "a.npy", counts)
    np.savez(tmp_path / "one.npz", counts)
    np.savez_compressed(tmp_path / "two.npz", length=counts, order=np.arange(3))
    np.savez(tmp_path / "three.npz", train=counts, test=counts[:2], names=np.array(["a"]))
    mapped = td.packing.lengths(tmp_path / "a.npy")
    assert isinstance(mapped, np.memmap) and mapped.dtype == np.uint16
    for found in (
        mapped,
        td.packing.lengths(counts),
        *(td.packing.lengths(tmp_path / f"{n}.npz") for n in ("one", "two")),
    ):
        np.testing.assert_array_equal(found, counts)
    assert td.packing.lengths(tmp_path / "three.npz", "test").tolist() == [3, 0]

    for source, column, message in (
        (
            "three.npz",
            None,
            "no column 'length' and no 'lengths': its columns are 'train', 'test' and 'names'",
        ),
        ("three.npz", "dev", "no column 'dev': its columns are 'train', 'test' and 'names'"),
        ("a.npy", "length", "is one array without columns"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            td.packing.lengths(tmp_path / source, column)
    with pytest.raises(InvalidTypeError, match=r"three\.npz: array 'names' has the dtype"):
        td.packing.lengths(tmp_path / "three.npz", "names")
    with pytest.raises(InvalidInputError, match="source is an array without columns"):
        td.packing.lengths(counts, "length")
    for name in ("a.npy", "two.npz"):
        with pytest.raises(InvalidInputError, match="holds token counts and no tokens"):
            td.packing.open_samples(tmp_path / name)


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    whole = {}
    for name, save in {"a.npz": np.savez, "b.npz": np.savez_compressed}.items():
        save(tmp_path / name, length=np.arange(10_000))
        whole[name] = (tmp_path / name).read_bytes()
    np.save(tmp_path / "c.npy", np.arange(10_000))
    whole["c.npy"] = (tmp_path / "c.npy").read_bytes()
    draws = random.Random(0)
    for name, content in whole.items():
        damaged = [b"", b"text", b"PK", content[:-40], content[:200] + bytes(200) + content[400:]]
        # Headers and the directory of the archive are at the ends.
        for _ in range(300):
            place = draws.choice([draws.randrange(120), len(content) - 1 - draws.randrange(120)])
            damaged.append(content[:place] + bytes([draws.randrange(256)]) + content[place + 1 :])
        for number, bad in enumerate(damaged):
            (tmp_path / name).write_bytes(bad)
            try:
                said = f"{name} has {len(td.packing.lengths(tmp_path / name))} counts"
            except td.TundishError as error:
                said = str(error)
            # Some bytes say nothing, such as the date of an entry, or are those of counts.
            assert name in said and (number >= 4 or "counts" not in said)
    (tmp_path / "a.csv").write_text("length\n3\n")
    with pytest.raises(
        InvalidInputError, match=r"a\.csv: is of no known kind; .* end in \.npy, \.npz, \.parquet"
    ):
        td.packing.lengths(tmp_path / "a.csv")
    for name in ("b.npy", "c.npy"):
        np.save(tmp_path / name, np.arange(3))
    with pytest.raises(
        InvalidInputError, match=r"2 files of kind npy, each of which is a dataset: .* pack_datasets"
    ):
        td.packing.lengths(tmp_path / "*.npy")


def test_pyarrow_is_needed_for_its_own_files_alone(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    (tmp_path / "a.jsonl").write_text('{"length": 3}\n')
    for name in ("a.parquet", "a.arrow"):
        (tmp_path / name).write_bytes(b"PAR1")
    script = """
import sys
sys.modules["pyarrow"] = None
import tundish as td
for source in ("a.npy", "a.jsonl", [[1, 2]]):
    td.packing.lengths(source)
for source in ("a.parquet", "a.arrow"):
    for ask in td.packing.lengths, td.packing.open_samples:
        try:
            ask(source)
        except td.errors.MissingExtraError as error:
            print(error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.stdout.count("file needs pyarrow: run `pip install 'tundish[arrow]'`") == 4, ran.stderr


def test_what_is_no_regular_file_is_refused_and_nothing_waits(tmp_path: Path) -> None:
    for name in ("a.npy", "a.npz", "a.parquet", "a.arrow", "a.jsonl", "a.idx", "b.bin", "unnamed"):
        os.mkfifo(tmp_path / name)
    os.mkfifo(tmp_path / "b.idx")
    (tmp_path / "saved").mkdir()
    os.mkfifo(tmp_path / "saved" / "state.json")
    write_megatron(tmp_path / "c.idx", [[1, 2]], [1])
    (tmp_path / "c.bin").unlink()
    os.mkfifo(tmp_path / "c.bin")
    sources = [
        tmp_path / name for name in ("a.npy", "a.npz", "a.parquet", "a.arrow", "a.jsonl", "a.idx", "b.bin")
    ]
    sources += [
        tmp_path / "unnamed",
        tmp_path / "b",
        tmp_path / "saved",
        tmp_path / "*.jsonl",
        Path("/dev/zero"),
    ]
    for source in (*sources, [tmp_path / "a.jsonl"], tmp_path / "c.idx"):
        with pytest.raises(TundishError, match=r"is a (FIFO|device)|no such file|is a folder that"):
            td.packing.open_samples(source)
        if source != tmp_path / "c.idx":
            with pytest.raises(TundishError, match=r"is a (FIFO|device)|no such file|is a folder that"):
                td.packing.lengths(source)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.npy", "a.npz", "a.arrow", "a.idx", "unnamed"])
def test_a_file_that_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    # Nothing is mapped at address 0.
    (tmp_path / name).symlink_to("/proc/self/mem")
    for ask in (td.packing.lengths, td.packing.open_samples):
        with pytest.raises(StorageError, match=f"{name}: cannot be read: Input/output error"):
            ask(tmp_path / name)
