"""Sources of samples in the place of lengths are refused with what to pass instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets as hf
import numpy as np
import pytest
import torch

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError


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
