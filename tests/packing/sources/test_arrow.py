"""Arrow and Parquet: columns of every type, files, folders and damage."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from support.packing.sources import assert_packs_alike, draw_rows

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError, NotFoundError, StorageError, TundishError
from tundish.packing.sources import source as shared
from tundish.packing.sources import tables

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


ROWS = draw_rows(90)
TABLE = pa.Table.from_pylist(ROWS)


def write_stream(table: pa.Table, path: Path, **settings: Any) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema, **settings) as writer:
        writer.write_table(table, max_chunksize=7)


def write_file(table: pa.Table, path: Path, **settings: Any) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema, **settings) as writer:
        writer.write_table(table, max_chunksize=7)


def test_arrow_files_in_both_formats(tmp_path: Path) -> None:
    write_stream(TABLE, tmp_path / "stream.arrow")
    write_file(TABLE, tmp_path / "file.arrow")
    write_file(TABLE, tmp_path / "compressed.arrow", options=pa.ipc.IpcWriteOptions(compression="zstd"))
    pyarrow.feather.write_feather(TABLE, tmp_path / "table.feather")
    # Told by its content.
    (tmp_path / "unnamed").write_bytes((tmp_path / "file.arrow").read_bytes())
    for name in ("stream.arrow", "file.arrow", "compressed.arrow", "table.feather", "unnamed"):
        assert_packs_alike(tmp_path / name, ROWS)
    assert_packs_alike([tmp_path / "file.arrow", tmp_path / "stream.arrow"], ROWS + ROWS)
    for write in (write_stream, write_file):
        write(TABLE.slice(0, 0), tmp_path / "none.arrow")
        assert_packs_alike(tmp_path / "none.arrow", [])


def test_parquet_files_by_path_glob_folder_and_list(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    pq.write_table(TABLE.slice(0, 40), folder / "part-0.parquet", row_group_size=9)
    pq.write_table(TABLE.slice(40, 0), folder / "part-1.parquet")
    pq.write_table(TABLE.slice(40), folder / "part-2.parquet", use_dictionary=False, data_page_version="2.0")
    (folder / "_SUCCESS").touch()
    (folder / ".part-0.parquet.crc").touch()
    assert_packs_alike(folder / "part-0.parquet", ROWS[:40])
    for source in (folder, str(folder), folder / "*.parquet", f"{tmp_path}/**/part-?.parquet"):
        assert_packs_alike(source, ROWS)
    assert_packs_alike([folder / "part-2.parquet", folder / "part-0.parquet"], ROWS[40:] + ROWS[:40])
    assert_packs_alike(folder / "part-1.parquet", [])


def test_a_folder_of_other_files_is_refused_by_their_names(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "a.parquet")
    write_file(TABLE, tmp_path / "b.arrow")
    with pytest.raises(
        InvalidInputError, match=r"files of several kinds, .*a\.parquet \(parquet\) and .*b\.arrow \(arrow\)"
    ):
        td.packing.lengths(tmp_path)
    with pytest.raises(InvalidInputError, match="files of several kinds"):
        td.packing.lengths(tmp_path / "*")
    (tmp_path / "b.arrow").rename(tmp_path / "README.md")
    (tmp_path / "more").mkdir()
    with pytest.raises(
        InvalidInputError,
        match=r"is a folder that holds README\.md, more, and not .*glob such as .*\*\.parquet",
    ):
        td.packing.lengths(tmp_path)
    with pytest.raises(InvalidInputError, match="is a folder that holds no files"):
        td.packing.lengths(tmp_path / "more")
    assert len(td.packing.lengths(tmp_path / "*.parquet")) == len(ROWS)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    for source, message in (
        (tmp_path / "none.parquet", "there is no such file or folder"),
        (tmp_path / "*.parquet", "no file matches this glob"),
        ([tmp_path / "none.parquet"], "there is no such file"),
    ):
        with pytest.raises(NotFoundError, match=message) as caught:
            td.packing.lengths(source)
        assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["damaged.parquet", "damaged.arrow"])
def test_a_damaged_file_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    write = pq.write_table if name.endswith("parquet") else write_file
    write(TABLE, path)
    whole = path.read_bytes()
    middle = bytearray(whole)
    middle[60 : len(whole) // 2] = b"\xff" * (len(whole) // 2 - 60)
    for content in (b"", b"some text, no table", whole[:-9], bytes(middle)):
        path.write_bytes(content)
        for ask in (td.packing.lengths, td.packing.open_samples):
            if ask is td.packing.open_samples and content == bytes(middle) and name.endswith("parquet"):
                # Its pages are read with its samples.
                with pytest.raises(InvalidInputError, match=r"damaged\.parquet"):
                    td.packing.open_samples(path)[0]
                continue
            with pytest.raises(InvalidInputError, match=name.replace(".", r"\.")):
                ask(path)


@pytest.mark.parametrize("offsets", [(0, 2, 2**30), (0, 2**30, 3), (0, 2, -1)])
def test_offsets_beyond_the_tokens_are_refused(offsets: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    write_file(pa.table({"input_ids": [[11, 12], [13]]}), path)
    whole, own = path.read_bytes(), struct.pack("<3i", 0, 2, 3)
    assert whole.count(own) == 1
    path.write_bytes(whole.replace(own, struct.pack("<3i", *offsets)))
    with pytest.raises(InvalidInputError, match=r"a\.arrow: "):
        td.packing.lengths(path)
    with pytest.raises(InvalidInputError, match=r"a\.arrow: cannot be read as an Arrow IPC file: "):
        list(td.packing.open_samples(path))


def test_counts_beyond_int32_are_int64_in_files_too(tmp_path: Path) -> None:
    table = pa.table({"length": [3, 5, 2**31, 7]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    write_file(table, tmp_path / "a.arrow")
    for name in ("a.parquet", "a.arrow"):
        found = td.packing.lengths(tmp_path / name)
        assert (found.tolist(), found.dtype) == ([3, 5, 2**31, 7], np.int64)


def test_refusals_name_the_file_and_the_row_in_it(tmp_path: Path) -> None:
    good, bad = pa.table({"length": [1, 2, 3]}), pa.table({"length": [1, 2, 3, None, 5]})
    pq.write_table(good, tmp_path / "a.parquet")
    pq.write_table(bad, tmp_path / "b.parquet", row_group_size=2)
    with pytest.raises(InvalidInputError, match=r"b\.parquet: row 3 of column 'length' is null"):
        td.packing.lengths(tmp_path)
    write_file(good, tmp_path / "a.arrow")
    write_stream(pa.concat_tables([good] * 4 + [bad]), tmp_path / "b.arrow")
    with pytest.raises(InvalidInputError, match=r"b\.arrow: row 15 of column 'length' is null"):
        td.packing.lengths(tmp_path / "*.arrow")
    pq.write_table(pa.table({"tokens": ["a"], "id": [1]}), tmp_path / "b.parquet")
    with pytest.raises(
        InvalidInputError, match=r"b\.parquet has no column 'length' .* columns are 'tokens' and 'id'"
    ):
        td.packing.lengths(tmp_path / "*.parquet")
    with pytest.raises(InvalidTypeError, match=r"b\.parquet: column 'tokens' holds string"):
        td.packing.lengths(tmp_path / "b.parquet", "tokens")


def test_a_null_among_tokens_is_refused_when_it_is_counted(tmp_path: Path) -> None:
    table = pa.table({"input_ids": [[1]] * 20 + [[2, None], [3]]})
    write_file(table, tmp_path / "a.arrow")
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=9)
    for name in ("a.arrow", "a.parquet"):
        with pytest.raises(InvalidInputError, match=f"{name}: row 20 of column 'input_ids' holds a null"):
            td.packing.lengths(tmp_path / name)


def test_files_of_one_source_have_the_same_columns_of_samples(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "a.parquet")
    pq.write_table(TABLE.select(["input_ids"]), tmp_path / "b.parquet")
    with pytest.raises(
        InvalidInputError, match=r"b\.parquet: its columns of lists .* differ from .*a\.parquet in 'labels'"
    ):
        td.packing.open_samples(tmp_path)
    found = td.packing.open_samples(tmp_path, columns=[])
    assert [sample["input_ids"].tolist() for sample in found] == [row["input_ids"] for row in ROWS + ROWS]


def test_a_damaged_file_that_asks_for_all_memory_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    table = pa.table({"input_ids": [list(range(9999))]})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    write_file(table, path, options=options)
    size, whole = struct.pack("<q", 9999 * 8), path.read_bytes()
    assert whole.count(size) > 0
    path.write_bytes(whole.replace(size, struct.pack("<q", 2**54)))
    for ask in (td.packing.lengths, lambda source: td.packing.open_samples(source)[0]):
        with pytest.raises(TundishError, match=r"a\.arrow: cannot be read as an Arrow IPC file"):
            ask(path)


def test_labels_that_are_all_null_in_one_file_are_none_there(tmp_path: Path) -> None:
    """Such a column may have the type null in its file, and that of lists in others."""
    first = pa.table({"input_ids": [[1, 2]], "labels": [[-100, 2]]})
    second = pa.table({"input_ids": [[3]], "labels": pa.nulls(1)})
    for number, table in enumerate((first, second)):
        write_file(table, tmp_path / f"{number}.arrow")
        pq.write_table(table, tmp_path / f"{number}.parquet")
    for ending in ("arrow", "parquet"):
        samples = td.packing.open_samples(tmp_path / f"*.{ending}")
        packs = td.PackedDataset(samples, td.pack([2, 1], 3))
        assert packs[0]["labels"].tolist() == [-100, 2, 3]


def test_a_column_of_numbers_whatever_its_encoding(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(0, 70_000, 5000)
    table = pa.table({"length": pa.array(lengths, pa.uint32()), "text": ["some text"] * 5000})
    for settings in (
        {},
        {"use_dictionary": False},
        {"column_encoding": "DELTA_BINARY_PACKED", "use_dictionary": False},
    ):
        pq.write_table(
            table.select(["length"]) if settings else table,
            tmp_path / "a.parquet",
            row_group_size=999,
            **settings,
        )
        found = td.packing.lengths(tmp_path / "a.parquet")
        np.testing.assert_array_equal(found, lengths)
        assert found.dtype == np.int32


def test_a_row_group_is_decoded_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a large row group are never in memory together."""
    count, tokens = 4000, 1000
    offsets = np.arange(count + 1, dtype=np.int32) * tokens
    values = np.random.default_rng(0).integers(0, 50_000, count * tokens, dtype=np.int32)
    table = pa.table({"input_ids": pa.ListArray.from_arrays(offsets, values), "id": np.arange(count)})
    pq.write_table(table, tmp_path / "large.parquet", row_group_size=count, use_dictionary=False)
    del table
    monkeypatch.setattr(tables, "_VALUES_AT_ONCE", 100_000)
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    before = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        found = td.packing.lengths(tmp_path / "large.parquet")
    finally:
        pa.set_memory_pool(before)
    assert found.tolist() == [tokens] * count
    assert pool.max_memory() < values.nbytes / 3


def test_decoded_row_groups_are_kept_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(TABLE, tmp_path / "a.parquet", row_group_size=10)
    read: list[int] = []
    own = tables._ParquetFile.read

    def counted(self: Any, part: int, names: Any) -> Any:
        read.append(part)
        return own(self, part, names)

    monkeypatch.setattr(tables._ParquetFile, "read", counted)
    found = td.packing.open_samples(tmp_path / "a.parquet")
    for _ in range(2):
        assert [sample["input_ids"].tolist() for sample in found] == [row["input_ids"] for row in ROWS]
    assert read == list(range(9))
    assert len(pickle.dumps(found)) < 2000

    monkeypatch.setattr(shared, "_KEPT_BYTES", 1)
    read.clear()
    found = td.packing.open_samples(tmp_path / "a.parquet")
    for number in (5, 6, 85, 5, 84):
        assert found[number]["labels"].tolist() == ROWS[number]["labels"]
    assert read == [0, 8, 0, 8]


def test_a_sample_that_does_not_exist_is_an_index_error(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "a.parquet")
    found = td.packing.open_samples(tmp_path / "a.parquet")
    assert found[-1]["input_ids"].tolist() == ROWS[-1]["input_ids"]
    for number in (90, -91, 10**400):
        with pytest.raises(IndexError, match="does not exist: the source has 90 samples") as caught:
            found[number]
        assert isinstance(caught.value, td.errors.NoSuchSampleError)
    with pytest.raises(InvalidTypeError, match="asked for by its number, got 'a'"):
        found["a"]  # type: ignore[index]


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may list any folder, so the system's refusal is acted.
    monkeypatch.setattr(
        "os.listdir", lambda _: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
    )
    with pytest.raises(StorageError, match="cannot be read: Permission denied"):
        td.packing.lengths(tmp_path)
