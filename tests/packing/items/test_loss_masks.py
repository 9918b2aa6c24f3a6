"""Masks of samples become labels, against a walk through the tokens one by one."""

from __future__ import annotations

import re
from typing import Any

import datasets as hf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.packing.samples import Rows

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError

MASKS = ("completion_mask", "assistant_masks", "loss_mask")


def make_rows(draws: np.random.Generator, lengths: list[int]) -> list[dict[str, Any]]:
    """Samples that have some of the masks, and some of them labels."""
    rows = []
    for length in lengths:
        row: dict[str, Any] = {"input_ids": draws.integers(0, 1000, length)}
        if draws.random() < 0.5:
            row["labels"] = np.where(draws.random(length) < 0.3, -100, draws.integers(0, 1000, length))
        for key in MASKS:
            if draws.random() < 0.5:
                mask = draws.random(length) < draws.choice([0, 0.6, 1])
                row[key] = [mask, mask.astype(np.int32), mask.tolist(), torch.tensor(mask)][draws.integers(4)]
        rows.append(row)
    return rows


def expected_labels(rows: list[dict[str, Any]]) -> list[int]:
    labels = []
    for row in rows:
        for place in range(len(row["input_ids"])):
            learned = all(int(row[key][place]) == 1 for key in MASKS if key in row)
            labels.append(int(row.get("labels", row["input_ids"])[place]) if learned else -100)
    return labels


@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=12),
    max_length=st.integers(1, 16),
    seed=st.integers(0, 2**31),
)
def test_a_token_is_learned_where_all_masks_are_one(lengths: list[int], max_length: int, seed: int) -> None:
    rows = make_rows(np.random.default_rng(seed), lengths)
    dataset = td.PackedDataset(rows, td.pack(lengths, max_length, drop_last=False))
    items = dataset.__getitems__(range(len(dataset)))
    assert [label for item in items for label in item["labels"].tolist()] == expected_labels(rows)
    tokens = [int(token) for row in rows for token in row["input_ids"]]
    assert [token for item in items for token in item["input_ids"].tolist()] == tokens
    for item in items:
        assert set(item) == {"input_ids", "labels", "position_ids", "cu_seqlens", "max_seqlen", "dataset_id"}
    if items:
        batch = td.PackedCollator()(items)
        starts = torch.cat([item["position_ids"] for item in items]) == 0
        expected = torch.tensor(expected_labels(rows)).masked_fill(starts, -100)
        assert torch.equal(batch["labels"][0], expected)


@pytest.mark.parametrize("form", [None, "numpy", "torch"])
@pytest.mark.parametrize("key", MASKS)
def test_masks_of_hf_datasets(form: str | None, key: str) -> None:
    masked = hf.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5]], key: [[0, 1, 1], [0, 0]]})
    plain = hf.Dataset.from_dict({"input_ids": [[6, 7]]})
    # Rows of the joined datasets have None where theirs had no column.
    rows = hf.concatenate_datasets([masked, plain]).with_format(form)
    item = td.PackedDataset(rows, td.pack([3, 2, 2], 7))[0]
    assert item["labels"].tolist() == [-100, 2, 3, -100, -100, 6, 7]


def test_masks_of_unsigned_ids_and_labels() -> None:
    row: dict[str, Any] = {
        "input_ids": np.array([7, 8], dtype=np.uint64),
        "loss_mask": np.array([0, 1], dtype=np.uint8),
    }
    assert td.PackedDataset([row], td.pack([2], 2))[0]["labels"].tolist() == [-100, 8]
    row["labels"] = np.array([9, 10], dtype=np.uint16)
    assert td.PackedDataset([row], td.pack([2], 2))[0]["labels"].tolist() == [-100, 10]


def test_a_row_and_its_mask_stay_as_they_are() -> None:
    row = {"input_ids": np.arange(4), "labels": np.arange(4), "loss_mask": np.array([0, 1, 0, 1])}
    td.PackedDataset([row], td.pack([4], 4), mask_first_token=True)[0]["labels"].fill_(5)
    assert row["labels"].tolist() == row["input_ids"].tolist() == [0, 1, 2, 3]
    assert row["loss_mask"].tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("key", MASKS)
@pytest.mark.parametrize(
    ("mask", "kind", "says"),
    [
        ([1], InvalidInputError, "has 1 entries for 2 input_ids"),
        ([1, 0, 1], InvalidInputError, "has 3 entries for 2 input_ids"),
        ([], InvalidInputError, "has 0 entries for 2 input_ids"),
        ([1.0, 0.0], InvalidTypeError, "is a list of dtype float64: give booleans or integers"),
        (["1", "0"], InvalidTypeError, "is a list of dtype <U1: give booleans or integers"),
        ([None, 1], InvalidTypeError, "is a list of dtype object: give booleans or integers"),
        ([[1, 0]], InvalidTypeError, "is a list of shape (1, 2): give one-dimensional zeros and ones"),
        (1, InvalidTypeError, "is an int of shape (): give one-dimensional zeros and ones"),
        ([[1], [0, 1]], InvalidTypeError, "cannot be read as an array of zeros and ones"),
        ([1, 2], InvalidInputError, "is 2 at position 1: a mask holds 0 and 1; carry weights"),
        (np.array([-1, 0]), InvalidInputError, "is -1 at position 0: a mask holds 0 and 1"),
        (np.array([1, 255], dtype=np.uint8), InvalidInputError, "is 255 at position 1"),
        (torch.tensor([0.5, 1]), InvalidTypeError, "is a Tensor of dtype float32: give booleans or integers"),
    ],
)  # fmt: skip
def test_what_is_no_mask_is_refused(key: str, mask: Any, kind: type[Exception], says: str) -> None:
    samples = [{"input_ids": [1, 2], key: [1, 1]}, {"input_ids": [3, 4], key: mask}]
    dataset = td.PackedDataset([Rows([[0] * 4]), Rows(samples)], td.pack_datasets([[4], [2, 2]], 4))
    with pytest.raises(kind, match=re.escape(f"{key} of sample 1 of dataset 1 {says}")):
        dataset[1]
    assert dataset[0]["labels"].tolist() == [0] * 4


def test_a_wrong_value_is_named_by_its_position_in_the_sample() -> None:
    mask = np.ones(8, dtype=np.int64)
    mask[6] = 3
    dataset = td.PackedDataset([{"input_ids": np.arange(8), "loss_mask": mask}], td.pack([8], 4))
    # Only what a pack takes is looked at.
    assert dataset[0]["labels"].tolist() == [0, 1, 2, 3]
    with pytest.raises(InvalidInputError, match="loss_mask of sample 0 of dataset 0 is 3 at position 6"):
        dataset[1]


@pytest.mark.parametrize(
    ("key", "good", "bad", "says"),
    [
        ("attention_mask", [1, 1, 1], [1, 1, 0], "is 0 at position 2: packs hold no padding; tokenize without"),
        ("attention_mask", [True] * 3, [False, True, True], "is 0 at position 0: packs hold no padding"),
        ("token_type_ids", [0, 0, 0], [0, 1, 1], "is 1 at position 1: .*columns={'token_type_ids': 0}"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_what_tokenizers_add_is_left_out_while_it_says_nothing(
    key: str, good: Any, bad: Any, says: str, make: Any
) -> None:
    plan = td.pack([3, 3], 6)
    rows = [{"input_ids": [1, 2, 3], key: make(good)}, {"input_ids": [4, 5, 6], key: None}]
    item = td.PackedDataset(rows, plan)[0]
    assert item["labels"].tolist() == [1, 2, 3, 4, 5, 6]
    assert key not in item
    rows[1][key] = make(bad)
    with pytest.raises(InvalidInputError, match=f"{key} of sample 1 of dataset 0 {says}"):
        td.PackedDataset(rows, plan)[0]
    rows[1][key] = make(good[:2])
    with pytest.raises(InvalidInputError, match=f"{key} of sample 1 of dataset 0 has 2 entries for 3"):
        td.PackedDataset(rows, plan)[0]


def test_the_output_of_a_tokenizer_is_a_sample() -> None:
    transformers = pytest.importorskip("transformers")
    rows = [
        transformers.BatchEncoding({"input_ids": [5, 6], "attention_mask": [1, 1], "assistant_masks": [0, 1]})
    ]
    assert td.PackedDataset(rows, td.pack([2], 2))[0]["labels"].tolist() == [-100, 6]
