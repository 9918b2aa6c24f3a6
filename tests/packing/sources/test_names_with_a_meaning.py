"""Labels and masks are read or refused in every source, whatever their type: they are never left out in silence."""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets as hf
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.soak import covering

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError

NAMES = ["labels", "completion_mask", "assistant_masks", "loss_mask", "attention_mask", "token_type_ids"]
IDS = [5, 6, 7, 8]

# Four tokens' worth of something that is no mask and no labels.
WRONG: dict[str, Callable[[], pa.Array]] = {
    "strings": lambda: pa.array([["0", "0", "1", "0"]]),
    "decimals": lambda: pa.array([[decimal.Decimal(number) for number in (0, 0, 1, 0)]]),
    "binary": lambda: pa.array([[b"0", b"0", b"1", b"0"]]),
    "floats": lambda: pa.array([[0.5, 0.0, 1.0, 0.0]]),
    "days": lambda: pa.array([[datetime.date(2000, 1, 1)] * 4]),
    "nested": lambda: pa.array([[[0], [0], [1], [0]]]),
    "a text": lambda: pa.array(["0010"]),
    "bytes": lambda: pa.array([b"\0\0\1\0"]),
    "a number": lambda: pa.array([1]),
    "a struct": lambda: pa.array([{"from": 2, "to": 3}]),
    "a map": lambda: pa.array([[(0, 1)]], pa.map_(pa.int64(), pa.int64())),
    "a dictionary": lambda: pa.array(["0010"]).dictionary_encode(),
    "nulls": lambda: pa.array([[None] * 4]),
    "a null among others": lambda: pa.array([[0, None, 1, 0]]),
    "too few": lambda: pa.array([[0, 1]]),
}


def packed(samples: Any) -> list[Any]:
    return [item["labels"].tolist() for item in td.PackedDataset(samples, td.pack([4], 4))]


def table_of(name: str, values: pa.Array) -> pa.Table:
    return pa.table({"input_ids": [IDS], name: values})


def in_arrow_file(table: pa.Table, folder: Path) -> Path:
    with pa.OSFile(str(folder / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return folder / "a.arrow"


def in_parquet_file(table: pa.Table, folder: Path) -> Path:
    pq.write_table(table, folder / "a.parquet")
    return folder / "a.parquet"


def in_json_lines(table: pa.Table, folder: Path) -> Path:
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    return folder / "a.jsonl"


def as_dataset(table: pa.Table) -> hf.Dataset:
    return hf.Dataset(table)


SOURCES: dict[str, Callable[[pa.Table, Path], Any]] = {
    "Table": lambda table, _: packed(td.packing.open_samples(table)),
    "Arrow file": lambda table, folder: packed(td.packing.open_samples(in_arrow_file(table, folder))),
    "Parquet file": lambda table, folder: packed(td.packing.open_samples(in_parquet_file(table, folder))),
    "JSON Lines": lambda table, folder: packed(td.packing.open_samples(in_json_lines(table, folder))),
    "list": lambda table, _: packed(td.packing.open_samples(table.to_pylist())),
    "Dataset": lambda table, _: packed(as_dataset(table)),
    "samples of a Dataset": lambda table, _: packed(td.packing.open_samples(as_dataset(table))),
    "pack_dataset": lambda table, _: td.hf.pack_dataset(as_dataset(table), 4)["labels"],
    "pack_dataset of JSON Lines": lambda table, folder: td.hf.pack_dataset(in_json_lines(table, folder), 4)["labels"],
    "stream": lambda table, _: list(td.PackedStream(table.to_pylist(), 4)),
    "stream of a Dataset": lambda table, _: list(td.PackedStream(as_dataset(table).to_iterable_dataset(), 4)),
}  # fmt: skip


@pytest.mark.parametrize(("source", "kind"), covering(SOURCES, WRONG))
def test_what_is_no_mask_and_no_labels_is_refused(source: str, kind: str, tmp_path: Path) -> None:
    for name in NAMES:
        table = table_of(name, WRONG[kind]())
        try:
            if "JSON" in source:
                in_json_lines(table, tmp_path)
            elif "Parquet" in source:
                in_parquet_file(table, tmp_path)
            elif "ataset" in source:
                next(iter(as_dataset(table)))
        except (TypeError, ValueError, NotImplementedError, pa.ArrowException):
            # The format cannot hold such a value.
            continue
        with pytest.raises((InvalidTypeError, InvalidInputError), match=name):
            SOURCES[source](table, tmp_path)


def test_masks_of_dictionaries_are_read_or_refused(tmp_path: Path) -> None:
    """Some formats keep the dictionary, others its values."""
    mask = pa.array([[0, 0, 1, 0]], pa.list_(pa.dictionary(pa.int8(), pa.int64())))
    for read in SOURCES.values():
        try:
            found = read(table_of("completion_mask", mask), tmp_path)
        except (TypeError, ValueError, pa.ArrowException):
            continue
        labels = found[0]["labels"] if isinstance(found[0], dict) else found[0]
        assert list(labels) == [-100, -100, 7, -100]


WHOLE = [pa.bool_(), pa.int8(), pa.uint8(), pa.int16(), pa.uint32(), pa.int64(), pa.uint64()]


@pytest.mark.parametrize(("source", "kind"), covering(SOURCES, WHOLE), ids=str)
def test_masks_of_booleans_and_of_integers_are_read(source: str, kind: pa.DataType, tmp_path: Path) -> None:
    for name in ("completion_mask", "assistant_masks", "loss_mask"):
        found = SOURCES[source](table_of(name, pa.array([[0, 0, 1, 0]]).cast(pa.list_(kind))), tmp_path)
        labels = found[0]["labels"] if isinstance(found[0], dict) else found[0]
        assert list(labels) == [-100, -100, 7, -100], name


@pytest.mark.parametrize(("source", "kind"), covering(SOURCES, ["null", "list of nothing"]))
def test_a_value_that_is_null_is_none(source: str, kind: str, tmp_path: Path) -> None:
    values = pa.nulls(1) if kind == "null" else pa.array([None], pa.list_(pa.int64()))
    for name in NAMES:
        found = SOURCES[source](table_of(name, values), tmp_path)
        labels = found[0]["labels"] if isinstance(found[0], dict) else found[0]
        # pack_dataset masks the first token of each piece.
        assert list(labels)[1:] == [6, 7, 8], name


def test_two_columns_of_one_name_are_refused() -> None:
    for name in NAMES:
        mask = pa.array([[0, 0, 1, 0]])
        twice = pa.Table.from_arrays([pa.array([IDS]), mask, mask], ["input_ids", name, name])
        with pytest.raises(InvalidInputError, match=f"2 columns named '{name}'; rename them"):
            td.packing.open_samples(twice)
    weights = pa.array([[0.5, 0.5, 1.0, 1.0]])
    for other in (weights, pa.array(["n/a"])):
        twice = pa.Table.from_arrays([pa.array([IDS]), weights, other], ["input_ids", "w", "w"])
        with pytest.raises(InvalidInputError, match="2 columns named 'w'; rename them"):
            td.packing.open_samples(twice)


def test_what_is_made_of_the_pieces_is_refused(tmp_path: Path) -> None:
    """A column with the positions of its own would be left out, too."""
    for values in (["0", "1"], [1, 2]):
        table = pa.table({"input_ids": [[5, 6]], "position_ids": [values]})
        for source in (table, in_json_lines(table, tmp_path)):
            with pytest.raises((InvalidTypeError, InvalidInputError), match="position_ids"):
                list(td.PackedDataset(td.packing.open_samples(source), td.pack([2], 2)))


def test_columns_that_are_named_leave_out_the_others() -> None:
    table = table_of("completion_mask", pa.array([["0", "0", "1", "0"]]))
    assert packed(td.packing.open_samples(table, columns=[])) == [IDS]
