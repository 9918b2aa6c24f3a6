"""`td.pack` and `td.pack_datasets` against their definition, for every kind of input, and what they refuse."""

from __future__ import annotations

import subprocess
import sys
from datetime import date
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any

import datasets as hf
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.packing.plans import columns_of
from support.packing.reference_plan import hard_pack, pieces

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError, format_type

LENGTH = st.one_of(st.integers(0, 3), st.integers(0, 40), st.integers(0, 8).map(lambda n: n * 16))
INTEGER_DTYPES = [np.dtype(f"{kind}{width}") for kind in "iu" for width in (1, 2, 4, 8)]


@given(st.data())
def test_agrees_with_the_definition(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(LENGTH, max_size=50))
    max_length = data.draw(st.integers(1, 50))
    drop_last = data.draw(st.booleans())
    order = data.draw(st.one_of(st.none(), st.permutations(range(len(lengths)))))
    if order is not None:
        order = order[: data.draw(st.integers(0, len(order)))]
    expected = hard_pack(
        [lengths], [list(range(len(lengths))) if order is None else list(order)], max_length, drop_last
    )
    plan = td.pack(np.array(lengths, dtype=np.int64), max_length, order=order, drop_last=drop_last)
    assert columns_of(plan) == expected
    for pack in range(len(plan)):
        found = [tuple(piece) for piece in plan[pack].pieces]
        assert found == pieces(expected, [lengths], pack)
    plan.verify(order=order)


@given(
    st.lists(st.lists(LENGTH, max_size=20), max_size=4),
    st.integers(1, 40),
    st.one_of(st.none(), st.integers(0, 2**32 - 1)),
    st.booleans(),
    st.booleans(),
)
def test_datasets_share_one_random_stream(
    datasets: list[list[int]], max_length: int, seed: int | None, global_pack: bool, drop_last: bool
) -> None:
    parts = [list(chain.from_iterable(datasets))] if global_pack else datasets
    orders = [np.arange(len(part)) for part in parts]
    if seed is not None:
        random = np.random.RandomState(seed)
        for order in orders:
            random.shuffle(order)
    expected = hard_pack(parts, [order.tolist() for order in orders], max_length, drop_last)
    columns = [np.array(lengths, dtype=np.int32) for lengths in datasets]
    plan = td.pack_datasets(columns, max_length, seed=seed, global_pack=global_pack, drop_last=drop_last)
    assert columns_of(plan) == expected
    assert plan.num_samples == tuple(map(len, datasets))
    plan.verify()


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**32 - 1])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 255, 256, 257, 623, 624, 625, 65_537, 300_000])
def test_shuffle_is_numpys(n: int, seed: int) -> None:
    expected = np.arange(n, dtype=np.int64)
    np.random.RandomState(seed).shuffle(expected)
    found = td.packing.shuffled_indices(n, seed)
    assert np.array_equal(found, expected)


def test_a_seed_beside_an_order_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"order and seed are both given, .*: leave one of them out"):
        td.pack([5, 3, 9, 2], 8, seed=7, order=[3, 0, 2])
    assert td.pack([5, 3, 9, 2], 8, order=[3, 0, 2]).seed is None


@pytest.mark.parametrize("dtype", INTEGER_DTYPES, ids=str)
def test_any_integer_dtype_gives_the_same_plan(dtype: np.dtype[np.integer]) -> None:
    values = np.random.default_rng(3).integers(0, 100, 1000)
    expected = td.pack(values, 64, seed=1)
    forms = {
        "contiguous": values.astype(dtype),
        "strided": np.repeat(values, 3).astype(dtype)[::3],
        "reversed": values[::-1].astype(dtype)[::-1],
        "foreign byte order": values.astype(dtype.newbyteorder()),
        "field of a record": np.rec.fromarrays([values.astype(dtype), values.astype("i1")], names="a,b").a,
    }
    for form, array in forms.items():
        plan = td.pack(array, 64, seed=1)
        assert columns_of(plan) == columns_of(expected), form
        assert plan.fingerprint == expected.fingerprint, form


def test_lengths_of_other_libraries(tmp_path: Path) -> None:
    values = np.random.default_rng(3).integers(0, 100, 1000)
    np.save(tmp_path / "lengths.npy", values)
    expected = td.pack(values, 64)
    chunked = pa.chunked_array([values[:400], values[400:]])
    for lengths in (
        torch.from_numpy(values.astype(np.int32)),
        torch.from_numpy(values)[::1],
        pa.array(values),
        pa.array(values)[0:],
        chunked,
        pa.chunked_array([values]),
        np.load(tmp_path / "lengths.npy", mmap_mode="r"),
        values.tolist(),
        tuple(values.tolist()),
    ):
        assert td.pack(lengths, 64).fingerprint == expected.fingerprint, type(lengths)


def test_arrays_are_not_copied() -> None:
    values = np.arange(1, 1000)
    for lengths in (values, torch.from_numpy(values), pa.array(values), values[::2], values[100:]):
        plan = td.pack(lengths, 64)
        assert plan.lengths is not None
        if isinstance(lengths, pa.Array):
            address = lengths.buffers()[1].address
        else:
            address = lengths.data_ptr() if isinstance(lengths, torch.Tensor) else lengths.ctypes.data
        assert plan.lengths[0].ctypes.data == address, type(lengths)


@pytest.mark.parametrize(
    ("lengths", "error", "says"),
    [
        ([1.5, 2.0], InvalidTypeError, r"lengths\[0\] is a float"),
        (np.array([1.5, 2.0]), InvalidTypeError, "float64"),
        ([3, float("nan")], InvalidTypeError, r"lengths\[1\] is a float"),
        (np.array([True]), InvalidTypeError, "bool"),
        ([True, 2], InvalidTypeError, r"lengths\[0\] is a bool"),
        ((2, np.True_), InvalidTypeError, r"lengths\[1\] is a bool"),
        (np.array(["5"]), InvalidTypeError, "<U1"),
        ([2**70], InvalidInputError, r"lengths\[0\] is .* beyond what int64 holds"),
        ([1, None], InvalidTypeError, r"lengths\[1\] is None"),
        (np.array([1, None]), InvalidTypeError, "object"),
        ([3, -1, 5], InvalidInputError, "sample 1 has the negative length -1"),
        (np.array([-5], dtype=np.int8), InvalidInputError, "-5"),
        ([[1, 2], [3, 4]], InvalidInputError, "shape"),
        (7, InvalidInputError, "give one dimension"),
        ([2**62, 2**62], InvalidInputError, "sample 1"),
        (np.array([2**63], dtype=np.uint64), InvalidInputError, "sample 0"),
        (np.ma.masked_array([1, 2], mask=[0, 1]), InvalidTypeError, "masked"),
        (pa.array([1, None]), InvalidTypeError, "nulls"),
        (
            pa.array(["a"]),
            InvalidTypeError,
            "lengths is a StringArray of string: convert it to integers first",
        ),
        (pa.chunked_array([["a"], ["b"]]), InvalidTypeError, "is a StringArray of string"),
        (pa.chunked_array([], pa.string()), InvalidTypeError, "is a StringArray of string"),
        (
            pa.array([[5, 2], [8]]),
            InvalidTypeError,
            "ListArray of list.*: if these are tokens, give .*list_value_length of them",
        ),
        (pa.array([date(2020, 1, 1)]), InvalidTypeError, "of date32.*: convert it"),
        (pa.array([Decimal(3)]), InvalidTypeError, "of decimal128.*: convert it"),
        (pa.array([True]), InvalidTypeError, "of bool"),
        (pa.Tensor.from_numpy(np.arange(3)), InvalidTypeError, "is a Tensor of int64: convert it"),
        (pa.array([1.0]), InvalidTypeError, "float64"),
        (torch.tensor([1.0]), InvalidTypeError, "float32"),
        (torch.tensor([1.0], dtype=torch.bfloat16), InvalidTypeError, "lengths"),
        (iter([1, 2]), InvalidTypeError, "list_iterator"),
    ],
)
def test_bad_lengths_are_refused(lengths: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        td.pack(lengths, 4)


def test_a_total_of_several_datasets_that_is_too_large_is_not_laid_to_the_last_one() -> None:
    with pytest.raises(InvalidInputError, match=r"all lengths up to sample 0 of dataset 1 add up to 2\^63"):
        td.pack_datasets([[2**62], [2**62]], 2**61)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"max_length": 0}, InvalidInputError, "max_length is 0"),
        ({"max_length": 4.0}, InvalidTypeError, "max_length"),
        ({"max_length": True}, InvalidTypeError, "max_length"),
        ({"seed": 1.0}, InvalidTypeError, "seed"),
        ({"seed": True}, InvalidTypeError, "seed"),
        ({"threads": 0}, InvalidInputError, "threads"),
        ({"threads": "2"}, InvalidTypeError, "threads"),
        ({"mode": "soft"}, InvalidInputError, "'hard'"),
        (
            {"mode": np.array(["hard", "soft"])},
            InvalidTypeError,
            "mode must be one of 'hard', 'best_fit', 'ordered', 'sequential', not array",
        ),
        ({"mode": None}, InvalidTypeError, "mode .* not None"),
        ({"drop_last": 1}, InvalidTypeError, "drop_last"),
        ({"order": [0, 1, 3]}, InvalidInputError, r"order\[2\] is 3"),
        ({"order": [-1]}, InvalidInputError, r"order\[0\] is -1"),
        ({"order": [0, 2, 0]}, InvalidInputError, r"order\[2\] names sample 0 again"),
        ({"order": [0.0]}, InvalidTypeError, "order"),
        ({"order": np.broadcast_to(np.int64(0), 2**40)}, InvalidInputError, "for 3 samples"),
        ({"share": "no", "cache_dir": "x"}, InvalidTypeError, "share"),
        (
            {"share": np.array([1, 2])},
            InvalidTypeError,
            r"share must be True or False, not array\(\[1, 2\]\)",
        ),
        ({"share": torch.tensor([1, 2])}, InvalidTypeError, "share must be True or False, not tensor"),
        ({"share": 0}, InvalidTypeError, "share must be True or False, not 0"),
        ({"order": np.array([2**64 - 1], dtype=np.uint64)}, InvalidInputError, r"order\[0\]"),
        ({"out": "a", "cache_dir": "b"}, InvalidInputError, "not both"),
        ({"group": object()}, InvalidInputError, "share"),
        ({"progress": 1}, InvalidTypeError, "progress"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        td.pack([5, 6, 7], **{"max_length": 4, **arguments})


@pytest.mark.parametrize("number", [-1, -(2**70), 2**63, 2**64, 2**70])
@pytest.mark.parametrize(
    ("name", "mode", "smallest", "largest"),
    [
        ("max_length", "hard", 1, 2**63 - 1),
        ("max_length", "best_fit", 1, 2**28),
        ("seed", "hard", 0, 2**32 - 1),
        ("window", "ordered", 1, 2**16),
        ("max_samples", "ordered", 1, 2**63 - 1),
        ("align", "ordered", 1, 2**28),
        ("max_cost", "ordered", 0, 2**63 - 1),
        ("multiple_of", "hard", 1, 2**20),
        ("threads", "hard", 1, 512),
    ],
)
def test_an_integer_out_of_range_is_told_the_range_of_its_option(
    name: str, mode: str, smallest: int, largest: int, number: int
) -> None:
    says = rf"^{name} is {number}; .*must be in {smallest} … {largest}\b"
    with pytest.raises(InvalidInputError, match=says):
        td.pack([5, 6, 7], **{"max_length": 8, "mode": mode, name: number})
    if name == "threads":
        with pytest.raises(InvalidInputError, match=says):
            td.pack([5, 6, 7], 4).verify(threads=number)


@pytest.mark.parametrize("lengths", [{1: 2}, {3}, iter([3]), "123", b"123", bytearray(b"123"), None])
def test_what_is_no_column_is_refused_by_its_type(lengths: object) -> None:
    with pytest.raises(InvalidTypeError, match=f"lengths is {format_type(lengths)}[:,] "):
        td.pack(lengths, 8)


@pytest.mark.parametrize("lengths", [[], np.array([]), [0, 0, 0], [3], np.zeros(0, dtype=np.uint8)])
def test_too_little_for_a_pack_is_the_empty_plan(lengths: object, tmp_path: Path) -> None:
    plan = td.pack(lengths, 4, seed=0)
    assert len(plan) == 0
    assert list(plan) == []
    assert {name: len(column) for name, column in plan.arrays().items()} == dict.fromkeys(plan.arrays(), 0)
    plan.verify()
    plan.save(tmp_path / "plan")
    again = td.PackPlan.load(tmp_path / "plan", lengths)
    again.verify()
    assert again.stats() == plan.stats()
    with pytest.raises(IndexError):
        plan[0]


def test_short_last_pack() -> None:
    plan = td.pack([3, 4, 0], 5, drop_last=False)
    assert [len(pack.pieces) for pack in plan] == [2, 1]
    assert plan[1].pieces == [td.Piece(1, 2, 4)]
    assert td.pack([3], 5, drop_last=False)[0].pieces == [td.Piece(0, 0, 3)]


def test_a_plan_larger_than_memory_is_refused_before_any_work() -> None:
    with pytest.raises(InvalidInputError, match="out="):
        td.pack([2**62], 1)


def test_fingerprint_tells_inputs_apart() -> None:
    values = np.arange(1, 100)
    base = td.pack_datasets([values[:40], values[40:]], 16)
    different = [
        td.pack_datasets([values[:41], values[41:]], 16),
        td.pack_datasets([values[:40], values[40:]], 16, global_pack=True),
        td.pack_datasets([values[:40], values[40:]], 17),
        td.pack_datasets([values[:40], values[40:]], 16, seed=0),
        td.pack_datasets([values[:40], values[40:]], 16, drop_last=False),
        td.pack_datasets([values[40:], values[:40]], 16),
        td.pack_datasets([values[:40], values[40:], []], 16),
        td.pack(values, 16),
        td.pack(values, 16, seed=0),
        td.pack(values, 16, order=np.arange(99)),
        td.pack(values, 16, order=np.arange(98)),
        td.pack(values[::-1], 16),
    ]
    prints = [plan.fingerprint for plan in (base, *different)]
    assert len(set(prints)) == len(prints)
    assert all(len(text) == 32 and int(text, 16) >= 0 for text in prints)


def test_fingerprint_is_the_same_on_every_run() -> None:
    # Written down once: a change of it orphans every cached plan and needs a new format version.
    assert td.pack(np.arange(1000), 64, seed=7).fingerprint == FINGERPRINT


FINGERPRINT = "039e9bf4160b01d9c769605e986a74e5"


def test_torch_is_not_imported() -> None:
    code = (
        "import sys, tundish as td\n"
        "plan = td.pack([5, 6, 7], 4, seed=0)\n"
        "plan[0], plan.stats(), td.PackedBatchSampler\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("form", [None, "numpy", "torch", "pandas"])
def test_a_column_of_a_dataset_is_read_at_once(form: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [5, 3, 9, 0, 2]
    rows = hf.Dataset.from_dict({"length": lengths}).with_format(form)

    def one_by_one(_: Any) -> Any:
        raise AssertionError("of millions of entries this takes minutes")

    monkeypatch.setattr(hf.arrow_dataset.Column, "__iter__", one_by_one)
    assert columns_of(td.pack(rows["length"], 8)) == columns_of(td.pack(lengths, 8))
    both = td.pack_datasets([rows["length"], rows["length"]], 8)
    assert columns_of(both) == columns_of(td.pack_datasets([lengths, lengths], 8))


def make_table() -> Any:
    return hf.Dataset.from_dict({"input_ids": [[1, 2], [3, 4]], "length": [2, 2]})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: "data.parquet", r"is a str: .*; td\.packing\.lengths\('data\.parquet'\) reads them"),
        (lambda: Path("lengths.npy"), r"is a Posix\w+: .*; td\.packing\.lengths\('lengths\.npy'\) reads them"),
        (make_table, r"is a Dataset, which holds samples: .*; td\.packing\.lengths\(dataset\) reads them"),
        (lambda: make_table().to_iterable_dataset(), r"is an IterableDataset, .*; td\.packing\.lengths\(dataset\)"),
        (lambda: hf.DatasetDict(train=make_table()), r"is a DatasetDict, .*; td\.packing\.lengths\(dataset\)"),
        (lambda: [{"input_ids": [1, 2]}], r"\[0\] is a dict: .*; td\.packing\.lengths\(samples\)"),
        (lambda: [[1, 2], [3]], r"\[0\] is a list: .*; td\.packing\.lengths\(samples\)"),
        (lambda: make_table()["input_ids"], r"has the shape \(2, 2\): give one .*; td\.packing\.lengths\(samples\)"),
        (lambda: [[1, 2], [3, 4]], r"has the shape \(2, 2\): give one .*; td\.packing\.lengths\(samples\)"),
        (lambda: torch.ones(2, 3, dtype=torch.int64), r"has the shape .*; td\.packing\.lengths\(samples\)"),
        (lambda: np.array(3), r"has the shape \(\): give one dimension$"),
        (lambda: ["a"], r"\[0\] is a str: give one integer$"),
    ],
)  # fmt: skip
def test_what_holds_samples_is_no_array_of_lengths(make: Any, says: str) -> None:
    refused = (InvalidTypeError, InvalidInputError)
    with pytest.raises(refused, match=f"^lengths ?{says}"):
        td.pack(make(), 8)
    with pytest.raises(refused, match=rf"^lengths\[1\] ?{says}"):
        td.pack_datasets([[1, 2], make()], 8)


@pytest.mark.parametrize("flat", [[5, 6], np.array([5, 6]), torch.tensor([5, 6])])
def test_several_datasets_are_no_single_list(flat: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^lengths\[0\] is a number: .* \[lengths\] for one dataset"):
        td.pack_datasets(flat, 8)


def test_an_order_is_not_read_from_samples() -> None:
    with pytest.raises(
        InvalidTypeError,
        match=r"^order is a str: give an array or a sequence of integers, one a sample$",
    ):
        td.pack([1, 2], 2, order="order.npy")


def test_the_lengths_of_a_dataset_are_planned() -> None:
    assert td.pack(make_table()["length"], 4).num_tokens == 4
