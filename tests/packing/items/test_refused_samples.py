"""`PackedDataset` refuses samples, datasets and arguments that it cannot use, and names them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.packing.samples import BatchedRows, Rows, make_nested
from torch.utils.data import DataLoader, IterableDataset

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError, NoSuchPackError, PlanMismatchError


def test_labels_of_another_length_are_refused_and_the_sample_named() -> None:
    rows = [{"input_ids": [1, 2]}, {"input_ids": [3, 4], "labels": [3]}]
    with pytest.raises(InvalidInputError, match="sample 1 of dataset 0 has 2 input_ids but 1 labels"):
        td.PackedDataset(rows, td.pack([2, 2], 4))[0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": [1, 2]}, "sample 1 of dataset 0 has no input_ids; its keys are ['tokens']"),
        ([1.0, 2.0], "sample 1 of dataset 0 is a list of dtype float64: give integers"),
        ({"input_ids": [True, False]}, "input_ids of sample 1 of dataset 0 is a list of dtype bool: give integers"),
        ({"input_ids": [[1, 2]]}, "input_ids of sample 1 of dataset 0 is a list of shape (1, 2): give one-dimensional"),
        ({"input_ids": [1, 2], "labels": [1.0, 2.0]}, "labels of sample 1 of dataset 0 is a list of dtype float64"),
        ([[1], [2, 3]], "sample 1 of dataset 0 cannot be read"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "sample 1 of dataset 0 cannot be read as an array of "
         "token ids: it is a tensor on the meta device, which holds no values; make samples on the CPU"),
        ({"input_ids": [1, 2], "labels": torch.zeros(2, device="meta")}, "labels of sample 1 of dataset 0 cannot be"),
        (torch.ones(2).to_sparse(), "sample 1 of dataset 0 cannot be read as an array of token ids: can't convert"),
        (torch.nested.nested_tensor([torch.ones(1)] * 2, layout=torch.jagged),
         "sample 1 of dataset 0 is a nested tensor, which holds several tensors: give each as a sample of its own"),
        ({"input_ids": make_nested()},
         "input_ids of sample 1 of dataset 0 is a nested tensor"),
        (torch.ones(1, 2, dtype=torch.int64), "sample 1 of dataset 0 is a Tensor of shape (1, 2): give one-dimensional "
         "token ids; a tokenizer gives rows with return_tensors=: leave that out, or take row [0]"),
        (np.ma.masked_less([1, 2], 2), "sample 1 of dataset 0 is a masked array; give its data, and the mask as"),
        ("ab", "sample 1 of dataset 0 is a str of shape (): give one-dimensional"),
        (None, "sample 1 of dataset 0 is None of shape (): give one-dimensional"),
    ],
)  # fmt: skip
def test_samples_of_something_else_are_refused(row: Any, message: str) -> None:
    dataset = td.PackedDataset(Rows([[1, 2], row]), td.pack([2, 2], 4))
    with pytest.raises(InvalidTypeError, match=re.escape(message)):
        dataset[0]


@pytest.mark.parametrize(
    ("datasets", "kind", "message"),
    [
        ([[1, 2], [3]], PlanMismatchError, "dataset 0 has 2 samples, the plan was made for 3"),
        ([[1], [2], [3], [4]], PlanMismatchError, "dataset 0 has 4 samples, the plan was made for 3"),
        ([Rows([[1]] * 3)] * 2, PlanMismatchError, "made for 1 dataset, and 2 datasets were given"),
        ({"train": [[1], [2], [3]]}, InvalidTypeError, "dataset 0 is a dict"),
        ("samples", InvalidTypeError, "dataset 0 is a str"),
        (
            np.arange(3),
            InvalidTypeError,
            "dataset 0 is an ndarray of one dimension, which is one sample: .* is a list of it",
        ),
        (
            torch.arange(3),
            InvalidTypeError,
            "dataset 0 is a Tensor of one dimension, which is one sample: .* is a list of it",
        ),
        (
            [Rows([[1]] * 3), np.arange(3)],
            InvalidTypeError,
            "dataset 1 is an ndarray of one dimension, which is one sample",
        ),
        ((n for n in range(3)), InvalidTypeError, "dataset 0 is a generator"),
        ([iter([[1]])], InvalidTypeError, "dataset 0 is a list_iterator"),
        (None, InvalidTypeError, "dataset 0 is None"),
        # The samples are of the wrong type.
        (
            [[1.0], [2.0], [3.0]],
            PlanMismatchError,
            "a sample is .* integers, .* first is a list of float",
        ),
        (
            [[[1]], [[2]], [[3]]],
            PlanMismatchError,
            "a sample is .* integers, .* first is a list of list",
        ),
        ([None] * 3, InvalidTypeError, "a sample is .* integers, and the first is None"),
        (["a"] * 3, InvalidTypeError, "a sample is .* integers, and the first is a str"),
    ],
)
def test_datasets_that_do_not_fit_are_refused(datasets: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        td.PackedDataset(datasets, td.pack([1, 1, 1], 1))


@pytest.mark.parametrize(
    "nested", [make_nested(), torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)]
)
def test_nested_tensors_are_refused_by_name(nested: torch.Tensor) -> None:
    pairs: list[tuple[Any, int]] = [(nested, 2), ([nested, nested], 2), ([nested], 1)]
    for given_datasets, samples in pairs:
        with pytest.raises(InvalidTypeError, match=r"is a nested tensor, .* unbind\(\)"):
            td.PackedDataset(given_datasets, td.pack([1] * samples, 1))


def test_rows_of_a_tokenizer_are_refused_with_what_to_do() -> None:
    rows = [torch.ones(1, length, dtype=torch.int64) for length in (2, 3)]
    advice = (
        r"of shape \(1, 2\).* a tokenizer gives rows with return_tensors=: leave that out, or take row \[0\]"
    )
    with pytest.raises(PlanMismatchError, match=f"the first is a Tensor {advice}"):
        td.PackedDataset(rows, td.pack([2, 3], 4))
    with pytest.raises(InvalidTypeError, match=f"sample 0 is {advice}"):
        td.packing.lengths(rows)
    with pytest.raises(InvalidTypeError, match=f"input_ids of sample 0 is {advice}"):
        td.packing.lengths([{"input_ids": row} for row in rows])


def test_one_of_something_is_said_in_the_singular() -> None:
    with pytest.raises(NoSuchPackError, match=r"pack 1 does not exist: the plan has 1 pack$"):
        td.pack([1], 1)[1]
    dataset = td.PackedDataset([[1]], td.pack([1], 1))
    with pytest.raises(NoSuchPackError, match=r"the plan has 1 pack$"):
        dataset[1]
    with pytest.raises(PlanMismatchError, match="dataset 0 has 1 sample, the plan was made for 2"):
        td.PackedDataset([[1]], td.pack([1, 1], 1))


def test_other_arguments_are_checked() -> None:
    with pytest.raises(InvalidTypeError, match="plan is a list: give a PackPlan"):
        td.PackedDataset([[1]], [0])  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="mask_first_token"):
        td.PackedDataset([[1]], td.pack([1], 1), mask_first_token=1)  # type: ignore[arg-type]


def test_batches_in_the_place_of_numbers_are_told_from_them() -> None:
    plan = td.pack([1, 1, 1], 1)
    sampler = td.PackedBatchSampler(plan, 2, 0, 1)
    loader = DataLoader(td.PackedDataset([[1], [2], [3]], plan), sampler=sampler)
    with pytest.raises(InvalidTypeError, match=r"asked for by its number, got \[.*batch_sampler="):
        next(iter(loader))


def test_a_dataset_that_gives_too_few_rows_is_refused() -> None:
    class Short(BatchedRows):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return super().__getitems__(indices)[:-1]

    with pytest.raises(InvalidTypeError, match="__getitems__ of dataset 0 gave 1 sample for 2 indices"):
        td.PackedDataset(Short([[1], [2]]), td.pack([1, 1], 2))[0]


@pytest.mark.parametrize(
    ("gives", "named"),
    [(None, "None"), (np.array(1), "an ndarray"), ({"input_ids": [[1], [2]]}, "a dict"), (2, "an int")],
)
def test_what_is_no_list_of_rows_is_refused(gives: Any, named: str) -> None:
    class Odd(BatchedRows):
        def __getitems__(self, indices: list[int]) -> Any:
            return gives

    with pytest.raises(
        InvalidTypeError,
        match=f"__getitems__ of dataset 0 gave {named}: it must give a list",
    ):
        td.PackedDataset(Odd([[1], [2]]), td.pack([1, 1], 2))[0]


def test_an_error_of_a_sample_that_is_no_tensor_is_its_own() -> None:
    class Lazy:
        def __array__(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        td.PackedDataset(Rows([Lazy(), [2]]), td.pack([1, 1], 2))[0]


def test_an_index_error_of_a_dataset_is_raised_and_ends_no_loop() -> None:
    class Broken(Rows):
        def __getitem__(self, index: int) -> Any:
            return [super().__getitem__(index)][index]

    with pytest.raises(IndexError, match="list index"):
        list(td.PackedDataset(Broken([[1], [2], [3]]), td.pack([1, 1, 1], 1)))


@pytest.mark.parametrize("key", ["input_ids", "labels"])
@pytest.mark.parametrize("dtype", ["<u8", ">u8"])
def test_an_id_that_int64_does_not_hold_is_refused(key: str, dtype: str) -> None:
    rows = [{"input_ids": np.arange(6, dtype=np.uint64)} for _ in range(4)]
    values = np.arange(6, dtype=dtype)
    values[[4, 5]] = 2**63, 2**64 - 1
    rows[2] = {"input_ids": np.arange(6), "labels": np.arange(6)} | {key: values}
    plan = td.pack_datasets([[6, 6], [6, 6]], 2)
    dataset = td.PackedDataset([rows[:2], rows[2:]], plan)
    # Only what a pack takes is looked at.
    for pack in (6, 7, 9, 11):
        first = 2 * (pack % 3)
        assert dataset[pack]["input_ids"].tolist() == [first, first + 1]
    with pytest.raises(
        InvalidInputError,
        match=f"{key} of sample 0 of dataset 1 is 9223372036854775808 at position 4: .*2.*63",
    ):
        dataset[8]


@pytest.mark.parametrize("number", [3, -4, 2**63, 10**5000], ids=["behind", "before", "64 bits", "digits"])
def test_a_pack_that_does_not_exist_is_named(number: int) -> None:
    dataset = td.PackedDataset([[1, 2, 3]], td.pack([3], 1))
    with pytest.raises(
        NoSuchPackError, match=r"pack (\S+|an integer of 16610 bits) does not exist: .* 3 packs"
    ):
        dataset[number]
    with pytest.raises(IndexError):
        dataset[number]


@pytest.mark.parametrize("package", ["pyarrow", "pandas"])
def test_tables_are_refused(package: str) -> None:
    """Of a table, a number is that of a column."""
    tables = pytest.importorskip(package)
    columns = {"input_ids": [[1, 2], [3, 4]]}
    table = tables.table(columns) if package == "pyarrow" else tables.DataFrame(columns)
    plan = td.pack([2, 2], 4)
    with pytest.raises(InvalidTypeError, match="gives columns by numbers or names"):
        td.PackedDataset(table, plan)
    column = table["input_ids"].to_pylist() if package == "pyarrow" else table["input_ids"].tolist()
    assert td.PackedDataset(column, plan)[0]["input_ids"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("form", ["arrow", "polars"])
def test_a_dataset_that_gives_tables_for_rows_is_refused(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = pytest.importorskip("datasets")
    rows = hf.Dataset.from_dict({"input_ids": [[1, 2], [3, 4]]})
    if form == "arrow":
        tables = rows.with_format(form)
    else:
        # Without polars `with_format` refuses by itself.
        tables = rows.with_format(None)
        monkeypatch.setattr(tables, "_format_type", form)
    plan = td.pack_datasets([[2, 2], [2, 2]], 4)
    with pytest.raises(
        InvalidTypeError, match=rf"dataset 1 is a Dataset with the format '{form}'.*with_format\(None"
    ):
        td.PackedDataset([rows, tables], plan)
    assert td.PackedDataset([rows, tables.with_format(None)], plan)[1]["input_ids"].tolist() == [1, 2, 3, 4]


class Stream(IterableDataset[Any]):
    """A stream of torch; its own `__getitem__` raises NotImplementedError."""

    def __iter__(self) -> Iterator[Any]:
        yield [1]

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("form", ["torch", "hf", "hf in a list", "generator"])
def test_streams_are_refused_with_what_to_use(form: str) -> None:
    hf = pytest.importorskip("datasets")
    table = hf.Dataset.from_dict({"input_ids": [[1], [2], [3]]})
    makers: dict[str, Any] = {
        "torch": Stream,
        "hf": table.to_iterable_dataset,
        "hf in a list": lambda: [table.to_iterable_dataset()],
        "generator": lambda: iter([[1], [2], [3]]),
    }
    with pytest.raises(
        InvalidTypeError,
        match=r"which gives samples in an order of its own.* map-style dataset, .* or a list",
    ):
        td.PackedDataset(makers[form](), td.pack([1, 1, 1], 1))


@pytest.mark.parametrize("make", [str, Path])
def test_paths_are_refused_with_what_to_use(make: Any) -> None:
    with pytest.raises(
        InvalidTypeError, match=r"dataset 0 is an? \w+, .*: td\.packing\.open_samples\('data\.parquet'\)"
    ):
        td.PackedDataset(make("data.parquet"), td.pack([1, 1, 1], 1))


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20))
def test_tokens_in_lists_are_those_of_numpy(tokens: list[int]) -> None:
    dataset = td.PackedDataset([tokens], td.pack([len(tokens)], len(tokens)))
    assert np.array_equal(dataset[0]["input_ids"].numpy(), np.asarray(tokens, dtype=np.int64))


@pytest.mark.parametrize("entry", [3, True, np.int32(3)], ids=repr)
def test_other_integers_among_them_are_taken_as_numpy_does(entry: Any) -> None:
    assert td.PackedDataset([[1, 2, entry]], td.pack([3], 3))[0]["input_ids"].tolist() == [1, 2, int(entry)]


@pytest.mark.parametrize(
    ("sample", "kind", "says"),
    [
        ([1, 2.0], InvalidTypeError, "is a list of dtype float64: give integers"),
        ([True, False], InvalidTypeError, "is a list of dtype bool: give integers"),
        ([1, "2"], InvalidTypeError, "is a list of dtype <U21: give integers"),
        ([1, None], InvalidTypeError, "is a list of dtype object: give integers"),
        ([1, 2**64], InvalidTypeError, "is a list of dtype object: give integers"),
        ([2**63, 2**63 + 1], InvalidInputError, "is 9223372036854775808 at position 0"),
    ],
)
def test_lists_of_anything_else_are_refused(sample: list[Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=f"sample 0 of dataset 0 {says}"):
        td.PackedDataset([sample], td.pack([2], 2))[0]


def test_integers_are_no_booleans() -> None:
    samples = [{"input_ids": [1, 2], "kept": [1, 0]}]
    with pytest.raises(InvalidTypeError, match=r"kept of sample 0 of dataset 0 is .*: give booleans"):
        td.PackedDataset(samples, td.pack([2], 2), columns={"kept": False})[0]
