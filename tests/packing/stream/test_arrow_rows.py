"""Streams of Hugging Face give the same packs, whether their rows are read as tables or as lists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets as hf
import pytest
from support.packing.streams import assert_same_items, planned_items

import tundish as td
from tundish.errors import InvalidTypeError
from tundish.packing.stream_source import in_arrow_format

OPTIONS = {"mode": "ordered", "window": 2, "max_length": 16}
LENGTHS = [number * 5 % 13 for number in range(30)]


def row(number: int) -> dict[str, Any]:
    """A row whose further columns are of many types."""
    length = LENGTHS[number]
    mask = [index % 2 for index in range(length)]
    return {
        "input_ids": [100 * number + index for index in range(length)],
        # A key that rows may lack, as after a concatenation.
        "completion_mask": mask if number % 3 else None,
        "assistant_masks": [value == 0 for value in mask],
        "weight": [value / 4 for value in mask],
        "kind": mask,
        "image_grid": [[1, number], [2, number]],
        "sizes": [number, number],
        "messages": [{"role": "user", "content": str(number)}],
    }


ROWS = hf.Dataset.from_list([row(number) for number in range(len(LENGTHS))])
CARRIED = {"columns": {"weight": 0.0, "kind": -1}, "sample_columns": ["image_grid", "sizes"]}
CARRIED_KEYS = ["input_ids", "weight", "kind", "image_grid", "sizes"]


def stream() -> hf.IterableDataset:
    return ROWS.to_iterable_dataset(num_shards=3)


def begun() -> hf.IterableDataset:
    source = stream()
    next(iter(source))
    source.load_state_dict(source.state_dict())
    return source


IN_TABLES: dict[str, Callable[[], hf.IterableDataset]] = {
    "plain": stream,
    "default format": lambda: stream().with_format(None),
    "some columns": lambda: stream().select_columns(CARRIED_KEYS),
    "some rows": lambda: stream().skip(3).take(20),
    "shuffled": lambda: stream().shuffle(seed=1, buffer_size=4),
    "joined": lambda: hf.concatenate_datasets([stream(), stream().select_columns(CARRIED_KEYS)]),
    "cast": lambda: stream().cast_column("input_ids", hf.LargeList(hf.Value("uint64"))),
}
IN_LISTS: dict[str, Callable[[], hf.IterableDataset]] = {
    "mapped": lambda: stream().map(lambda row: row),
    "filtered": lambda: stream().filter(lambda row: len(row["input_ids"]) > 3),
    "numpy": lambda: stream().with_format("numpy"),
    "begun": begun,
    "generated": lambda: hf.IterableDataset.from_generator(lambda: map(row, range(len(LENGTHS)))),
}


@pytest.mark.parametrize("source", [*IN_TABLES, *IN_LISTS])
def test_the_packs_are_those_of_the_rows(source: str) -> None:
    make = (IN_TABLES | IN_LISTS)[source]
    assert (in_arrow_format(make()) is not None) == (source in IN_TABLES)
    expected = planned_items(list(make()), OPTIONS, **CARRIED)
    assert_same_items(list(td.PackedStream(make(), **OPTIONS, **CARRIED)), expected)


def test_each_epoch_has_its_order() -> None:
    orders = []
    for epoch in range(2):
        source = stream().shuffle(seed=1, buffer_size=4)
        source.set_epoch(epoch)
        orders.append([sample["input_ids"] for sample in source])
        packs = td.PackedStream(source, **OPTIONS, **CARRIED)
        assert_same_items(list(packs), planned_items(list(source), OPTIONS, **CARRIED))
    assert orders[0] != orders[1]


def test_rows_of_parquet_files(tmp_path: Path) -> None:
    ROWS.to_parquet(tmp_path / "rows.parquet", batch_size=7)
    source = hf.IterableDataset.from_parquet(str(tmp_path / "rows.parquet"), cache_dir=str(tmp_path))
    assert in_arrow_format(source) is not None
    assert_same_items(
        list(td.PackedStream(source, **OPTIONS, **CARRIED)),
        planned_items(ROWS.to_list(), OPTIONS, **CARRIED),
    )


@pytest.mark.parametrize("key", ["input_ids", "completion_mask", "assistant_masks", "weight"])
def test_entries_without_a_value_are_refused(key: str) -> None:
    has_gap = row(7)
    has_gap[key] = [*has_gap[key][1:], None]
    source = hf.Dataset.from_list([row(1), has_gap]).to_iterable_dataset()
    with pytest.raises(InvalidTypeError, match=f"{key} of sample 1 of dataset 0"):
        list(td.PackedStream(source, **OPTIONS, **CARRIED))


def test_columns_that_are_decoded_are_read_as_rows() -> None:
    features = hf.Features({"input_ids": hf.List(hf.Value("int64")), "image": hf.Image()})
    rows = hf.Dataset.from_dict({"input_ids": [[1]], "image": [None]}, features=features)
    assert in_arrow_format(rows.to_iterable_dataset()) is None
