"""Lists of Python integers become the arrays that numpy makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError


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
