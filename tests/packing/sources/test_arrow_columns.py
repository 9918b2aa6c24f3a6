"""Which columns of Arrow are counted, and how: by Python's `len` of each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.packing.sources import assert_packs_alike

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError

LISTS = [[1, 2], [], [3], [4, 5, 6], [7, 8]]
ARRAYS: dict[str, Callable[[], Any]] = {
    "list": lambda: pa.array(LISTS, pa.list_(pa.int32())),
    "large list": lambda: pa.array(LISTS, pa.large_list(pa.uint16())),
    "list view": lambda: pa.array(LISTS, pa.list_view(pa.int64())),
    "large list view": lambda: pa.array(LISTS, pa.large_list_view(pa.int64())),
    "list view out of order": lambda: pa.ListViewArray.from_arrays(
        [3, 0, 1], [2, 3, 0], pa.array([1, 2, 3, 4, 5])
    ),
    "list of one size": lambda: pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int8(), 2)),
    "lists that are all empty": lambda: pa.array([[], []]),
    "no lists": lambda: pa.array([], pa.list_(pa.int32())),
}


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("name", ARRAYS)
def test_lists_are_counted(name: str, sliced: bool) -> None:
    array = ARRAYS[name]()
    if sliced:
        array = array.slice(1, max(len(array) - 2, 0))
    rows = [{"input_ids": row} for row in array.to_pylist()]
    assert_packs_alike(pa.table({"input_ids": array}), rows)
    assert_packs_alike(array, rows)
    chunked = pa.chunked_array([array, array.slice(0, 1), array.slice(0, 0), array])
    assert_packs_alike(chunked, [*rows, *rows[:1], *rows])


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint32", "int64", "uint64"])
def test_numbers_are_taken_as_they_are(kind: str) -> None:
    values = [5, 0, 100]
    found = td.packing.lengths(pa.table({"length": pa.array(values, kind)}))
    assert (found.tolist(), found.dtype) == (values, np.int32)
    assert td.packing.lengths(pa.record_batch({"n": pa.array(values, kind)}), "n").tolist() == values


def test_counts_beyond_int32_are_int64() -> None:
    found = td.packing.lengths(pa.table({"length": [3, 2**31]}))
    assert (found.tolist(), found.dtype) == ([3, 2**31], np.int64)
    assert td.packing.lengths(pa.table({"length": [3, 2**31 - 1]})).dtype == np.int32


@pytest.mark.parametrize(
    ("column", "kind", "message"),
    [
        (
            pa.array(["some", "text"]),
            InvalidTypeError,
            "holds string, .*tokenize the texts first.*'id' and 'length'",
        ),
        (
            pa.array([1.5, 2.0]),
            InvalidTypeError,
            "holds double, and token counts are integers, or lists of integers",
        ),
        (pa.array([True, False]), InvalidTypeError, "holds bool"),
        (pa.array([b"1", b"2"]), InvalidTypeError, "holds binary"),
        (pa.array([1, 2]).dictionary_encode(), InvalidTypeError, r"holds dictionary<.*\(cast it to int64\)"),
        (pa.array([["a"], []]), InvalidTypeError, "holds list<.*string>"),
        (pa.array([[0.5], []]), InvalidTypeError, "holds list<.*double>"),
        (pa.array([[[1]], []]), InvalidTypeError, "holds list<.*list<"),
        (pa.array([{"a": 1}, {"a": 2}]), InvalidTypeError, "holds struct<"),
        (pa.array([None, None]), InvalidTypeError, "holds null"),
        (
            pa.array([1, None]),
            InvalidInputError,
            "row 1 of column 'length' is null; every sample needs a value",
        ),
        (pa.array([None, [1]]), InvalidInputError, "row 0 of column 'length' is null"),
        (
            pa.array([None, [1]], pa.list_view(pa.int8())),
            InvalidInputError,
            "row 0 of column 'length' is null",
        ),
        (
            pa.array([[1], None], pa.list_(pa.int8(), 1)),
            InvalidInputError,
            "row 1 of column 'length' is null",
        ),
        (
            pa.array([1, -3]),
            InvalidInputError,
            r"row 1 of column 'length' holds -3; a token count is in 0 … 2\*\*63 - 1",
        ),
        (pa.array([1, 2**63], pa.uint64()), InvalidInputError, "row 1 .* holds 9223372036854775808"),
    ],
)
def test_other_columns_are_refused(column: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"the Table: .*{message}"):
        td.packing.lengths(pa.table({"id": [7, 8], "length": column}))


def test_a_missing_column_is_named_with_those_there_are() -> None:
    table = pa.table({"id": [1], "text": ["a"]})
    with pytest.raises(
        InvalidInputError,
        match="the Table has no column 'length' and no 'input_ids': its columns are 'id' and 'text'; name one",
    ):
        td.packing.lengths(table)
    with pytest.raises(
        InvalidInputError, match="has no column 'tokens': its columns are 'id' and 'text'; give the name"
    ):
        td.packing.lengths(table, "tokens")
    with pytest.raises(InvalidInputError, match="has no column 'input_ids'"):
        td.packing.open_samples(table)
    with pytest.raises(
        InvalidTypeError, match="column 'id' holds int64, and the tokens of a sample are a list"
    ):
        td.packing.open_samples(table, "id")
    with pytest.raises(InvalidInputError, match=r"its columns are '0', .*'23' and 76 more"):
        td.packing.lengths(pa.table({str(number): [0] for number in range(100)}))
    with pytest.raises(InvalidInputError, match="it has no columns"):
        td.packing.lengths(pa.table({}))
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["length", "length"])
    with pytest.raises(InvalidInputError, match="has 2 columns named 'length'; rename them"):
        td.packing.lengths(twice)


def test_a_null_among_tokens_is_refused_by_its_row() -> None:
    for array in (
        pa.array([[1], [], [2, None]], pa.list_(pa.int32())),
        pa.array([[1], [], [2, None]], pa.large_list_view(pa.int32())),
        pa.array([[0, 0], [1, 2], [2, None]], pa.list_(pa.int32(), 2)),
        pa.array([[], [], [None]]),
    ):
        table = pa.table({"input_ids": array})
        with pytest.raises(InvalidInputError, match="the Table: row 2 of column 'input_ids' holds a null"):
            td.packing.lengths(table)
        with pytest.raises(InvalidInputError, match="row 1 of column 'input_ids' holds a null"):
            td.packing.lengths(table.slice(1))
        assert len(td.packing.lengths(table.slice(0, 2))) == 2
    samples = td.packing.open_samples(pa.table({"input_ids": [[1], [2, None]]}))
    assert samples[0]["input_ids"].tolist() == [1]
    with pytest.raises(InvalidInputError, match="the Table: row 1 of column 'input_ids' holds a null"):
        samples[1]


def test_rows_are_views_and_booleans_are_read_from_bits() -> None:
    table = pa.table({"input_ids": [[1, 2], [3]], "completion_mask": [[True, False], [True]]}).slice(1)
    sample = td.packing.open_samples(table)[0]
    assert sample["completion_mask"].tolist() == [True]
    assert sample["input_ids"].tolist() == [3]
    assert sample["input_ids"].base is not None
