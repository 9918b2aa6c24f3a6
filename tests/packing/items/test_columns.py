"""Further columns of samples: carried beside the tokens, once a sample, or refused by name."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Any

import datasets as hf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.packing.samples import Rows
from torch.utils.data import DataLoader

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError


def make_rows(lengths: list[int]) -> list[dict[str, Any]]:
    """Samples whose columns can be computed from their tokens, of which no two are the same."""
    rows, first = [], 0
    for length in lengths:
        tokens = np.arange(first, first + length)
        rows.append(
            {"input_ids": tokens, "loss_weight": tokens / 4, "segment": (tokens % 7).astype(np.int16)}
        )
        rows[-1]["is_code"] = tokens % 2 == 0
        first += length
    return rows


COLUMNS = {"loss_weight": 0.0, "segment": -1, "is_code": False}
DTYPES = {"loss_weight": torch.float32, "segment": torch.int64, "is_code": torch.bool}


@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=12),
    max_length=st.integers(1, 16),
    seed=st.integers(0, 2**31),
)
def test_columns_stay_beside_their_tokens(lengths: list[int], max_length: int, seed: int) -> None:
    plan = td.pack(lengths, max_length, seed=seed, drop_last=False)
    dataset = td.PackedDataset(make_rows(lengths), plan, columns=COLUMNS)
    items = dataset.__getitems__(range(len(dataset)))
    if not items:
        return
    batch = td.PackedCollator()(items)
    for part in (*items, batch):
        tokens = part["input_ids"]
        expected = {"loss_weight": tokens / 4, "segment": tokens % 7, "is_code": tokens % 2 == 0}
        for key, value in expected.items():
            assert part[key].dtype == DTYPES[key]
            assert torch.equal(part[key], value), key
    assert all(item["column_padding"] == COLUMNS for item in items)
    assert set(batch) == {"input_ids", "labels", "position_ids", "use_cache", *COLUMNS}


@pytest.mark.parametrize("form", [None, "numpy", "torch"])
def test_columns_of_hf_datasets(form: str | None) -> None:
    weights = [[0.5, 1.0], [2.0]]
    rows = hf.Dataset.from_dict({"input_ids": [[1, 2], [3]], "loss_weight": weights, "text": ["a b", "c"]})
    dataset = td.PackedDataset(rows.with_format(form), td.pack([2, 1], 3), columns={"loss_weight": 0.0})
    loader = DataLoader(dataset, collate_fn=td.PackedCollator(), num_workers=1)
    assert next(iter(loader))["loss_weight"].tolist() == [[0.5, 1.0, 2.0]]
    assert pickle.loads(pickle.dumps(dataset))[0]["loss_weight"].tolist() == [0.5, 1.0, 2.0]


def test_integers_are_right_for_a_column_of_floats() -> None:
    rows = [{"input_ids": [1, 2], "weight": [1, 0]}, {"input_ids": [3], "weight": np.array([0.1])}]
    weight = td.PackedDataset(rows, td.pack([2, 1], 3), columns={"weight": np.float64(0)})[0]["weight"]
    assert torch.equal(weight, torch.tensor([1, 0, 0.1]))


def test_infinite_values_stay_in_a_column_of_floats() -> None:
    rows = [{"input_ids": [1, 2], "weight": [float("inf"), float("nan")]}]
    weight = td.PackedDataset(rows, td.pack([2], 2), columns={"weight": float("-inf")})[0]["weight"]
    assert weight[0] == float("inf") and weight[1].isnan()


def test_a_key_that_is_left_out_can_be_carried() -> None:
    rows = [{"input_ids": [1, 2], "token_type_ids": [0, 1], "text": "ab"}]
    dataset = td.PackedDataset(rows, td.pack([2], 2), columns={"token_type_ids": 0}, sample_columns=["text"])
    batch = td.PackedCollator()([dataset[0], dataset[0]])
    assert batch["token_type_ids"].tolist() == [[0, 1, 0, 1]]
    assert batch["text"] == ["ab", "ab"]


@pytest.mark.parametrize(
    ("row", "kind", "says"),
    [
        ({"weight": [1.0]}, InvalidInputError, "weight of sample 1 of dataset 0 has 1 entries for 2 input_ids"),
        ({"weight": [[1.0, 1.0]]}, InvalidTypeError, "weight of sample 1 .* is a list of shape .*: give one-dim"),
        ({"weight": ["a", "b"]}, InvalidTypeError, "weight of sample 1 .* is a list of dtype <U1: give floats or int"),
        ({"weight": [True, False]}, InvalidTypeError, "is a list of dtype bool: give floats or integers"),
        ({"weight": None}, InvalidInputError, "sample 1 of dataset 0 has None as its weight"),
        ({}, InvalidInputError, "sample 1 of dataset 0 lacks weight, named in columns or sample_columns"),
        ({"weight": [1.0, 1.0], "segment": [0.0, 1.0]}, InvalidTypeError, "segment of sample 1 .*: give integers"),
        ({"weight": [1, 1], "segment": np.array([0, 2**63], "u8")}, InvalidInputError, "segment of .* below 2"),
        ({"weight": [np.inf, 1e300]}, InvalidInputError, r"weight of .* is 1e\+300 at position 1: .* float32"),
        ({"weight": [1.0, 1.0], 3: [1]}, InvalidInputError, "sample 1 of dataset 0 has the key 3, which is an int"),
    ],
)  # fmt: skip
def test_a_column_that_does_not_fit_is_named(row: dict[str, Any], kind: type[Exception], says: str) -> None:
    rows = [
        {"input_ids": [1, 2], "weight": [1.0, 1.0], "segment": [0, 0]},
        {"input_ids": [3, 4], "segment": [1, 1]} | row,
    ]
    dataset = td.PackedDataset(Rows(rows), td.pack([2, 2], 4), columns={"weight": 0.0, "segment": 0})
    with pytest.raises(kind, match=says):
        dataset[0]


def test_samples_of_token_ids_alone_have_no_columns() -> None:
    for samples in ([[1, 2]], Rows([[1, 2]])):
        with pytest.raises(
            InvalidInputError, match="sample 0 of dataset 0 is a list of token ids, and has no weight"
        ):
            td.PackedDataset(samples, td.pack([2], 2), columns={"weight": 0.0})[0]


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"columns": ["weight"]}, InvalidTypeError, "columns is a list: give the padding value of each"),
        ({"columns": {"weight": None}}, InvalidTypeError, r"columns\['weight'\] is None: give the padding value"),
        ({"columns": {"weight": "0"}}, InvalidTypeError, r"columns\['weight'\] is a str"),
        ({"columns": {"weight": 2**63}}, InvalidInputError, r"columns\['weight'\] is 9223372036854775808, beyond"),
        ({"columns": {"weight": 1e300}}, InvalidInputError, r"columns\['weight'\] is 1e\+300, beyond the float32"),
        ({"columns": {1: 0}}, InvalidTypeError, "columns names 1, which is an int"),
        ({"columns": {"labels": 0}}, InvalidInputError, "columns names 'labels': take it out, because .* any case"),
        ({"columns": {"loss_mask": 0}}, InvalidInputError, "columns names 'loss_mask': .* labels of -100"),
        ({"columns": {"attention_mask": 1}}, InvalidInputError, "columns names 'attention_mask': .* no padding"),
        ({"columns": {"position_ids": 0}}, InvalidInputError, "columns names 'position_ids': .* makes it"),
        ({"sample_columns": ["seq_idx"]}, InvalidInputError, "sample_columns names 'seq_idx': .* makes it"),
        ({"sample_columns": "image"}, InvalidTypeError, "sample_columns is a str: give a list of names"),
        ({"sample_columns": [None]}, InvalidTypeError, "sample_columns names None"),
        ({"columns": {"a": 0}, "sample_columns": ["a"]}, InvalidInputError, "'a' is in columns and in sample_columns"),
    ],
)  # fmt: skip
def test_arguments_are_checked(arguments: dict[str, Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        td.PackedDataset([{"input_ids": [1]}], td.pack([1], 1), **arguments)


def test_rows_that_a_function_makes_are_checked_as_they_are_read() -> None:
    def transform(rows: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": [[len(text)] for text in rows["words"]], "loss_mask": [[0]] * len(rows["words"])}

    rows = hf.Dataset.from_dict({"words": ["a", "bc"]}).with_transform(transform)
    assert td.PackedDataset(rows, td.pack([1, 1], 2))[0]["labels"].tolist() == [-100, -100]


def test_every_new_set_of_keys_is_checked() -> None:
    rows = Rows(
        [{"input_ids": [1]}] * 3 + [{"input_ids": [2], "labels": [3]}, {"input_ids": [4], "weights": [1]}]
    )
    dataset = td.PackedDataset(rows, td.pack([1] * 5, 1))
    assert [dataset[number]["labels"].tolist() for number in range(4)] == [[1], [1], [1], [3]]
    for _ in range(2):
        with pytest.raises(InvalidInputError, match=r"sample 4 of dataset 0 has \['weights'\]"):
            dataset[4]


def images_of(shapes: list[Any]) -> list[dict[str, Any]]:
    """Samples of two tokens, with an image of each shape; None for no image."""
    draws = np.random.default_rng(0)
    return [
        {"input_ids": [number, number], "image": None if shape is None else draws.random(shape)}
        for number, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("make", [np.asarray, torch.tensor])
def test_tensors_of_samples_are_concatenated_in_the_order_of_the_pieces(make: Any) -> None:
    rows = images_of([(2, 3), None, (0, 3), (1, 3), (4, 3), None])
    for row in rows:
        row["image"] = row["image"] if row["image"] is None else make(row["image"])
    # Sample 4 is cut, and gives its image to both packs; the last pack has none.
    order = [3, 0, 4, 2, 1, 5]
    plan = td.pack([2] * 6, 5, order=order, drop_last=False)
    dataset = td.PackedDataset(rows, plan, sample_columns=["image"])
    items = dataset.__getitems__([0, 1, 2])
    pieces = [[3, 0, 4], [4, 2, 1], [5]]
    expected = [
        np.concatenate(
            [np.asarray(rows[sample]["image"]) for sample in pack if rows[sample]["image"] is not None]
        )
        for pack in pieces[:2]
    ]
    for item, images in zip(items, expected, strict=False):
        assert torch.equal(item["image"], torch.from_numpy(images))
    assert "image" not in items[2]
    batch = td.PackedCollator()(items)
    assert torch.equal(batch["image"], torch.from_numpy(np.concatenate(expected)))
    assert "image" not in td.PackedCollator()([items[2]])
    items[0]["image"].fill_(7)
    assert not (np.asarray(rows[0]["image"]) == 7).any()


def test_other_values_of_samples_become_a_list() -> None:
    values: list[Any] = [
        torch.zeros(1, 2),
        torch.zeros(1, 3),
        "c",
        4,
        torch.zeros(()),
        np.array(["x"]),
        [5, 6],
        None,
    ]
    rows = [{"input_ids": [number, number], "value": value} for number, value in enumerate(values)]
    dataset = td.PackedDataset(rows, td.pack([2] * 8, 8), sample_columns=["value"])
    items = list(dataset)
    for item, expected in zip(items, (values[:4], values[4:7]), strict=True):
        assert all(found is value for found, value in zip(item["value"], expected, strict=True))
    batch = td.PackedCollator()(items)
    assert all(found is value for found, value in zip(batch["value"], values[:7], strict=True))


def test_a_tensor_and_a_list_in_a_batch_become_a_list() -> None:
    shapes = [(1, 2), (2, 2), (1, 3), (1, 2)]
    rows = images_of(shapes)
    items = list(td.PackedDataset(rows, td.pack([2] * 4, 4), sample_columns=["image"]))
    found = td.PackedCollator()(items)["image"]
    assert [tuple(value.shape) for value in found] == [(3, 2), (1, 3), (1, 2)]


@pytest.mark.parametrize(
    "other", [torch.zeros(1, 2, dtype=torch.float64), torch.zeros(1, 2).to_sparse(), np.zeros((1, 2))]
)
def test_tensors_of_another_kind_are_not_concatenated(other: Any) -> None:
    rows = [{"input_ids": [1], "value": torch.zeros(1, 2)}, {"input_ids": [2], "value": other}]
    for order in ([0, 1], [1, 0]):
        plan = td.pack([1, 1], 2, order=order)
        assert isinstance(td.PackedDataset(rows, plan, sample_columns=["value"])[0]["value"], list)


def test_samples_without_tokens_leave_no_value() -> None:
    rows = [{"input_ids": [1], "name": "a"}, {"input_ids": [], "name": "b"}, {"input_ids": [2], "name": "c"}]
    assert td.PackedDataset(rows, td.pack([1, 0, 1], 2), sample_columns=["name"])[0]["name"] == ["a", "c"]


def test_a_missing_sample_column_is_refused() -> None:
    rows = Rows([{"input_ids": [1], "image": None}, {"input_ids": [2]}])
    with pytest.raises(InvalidInputError, match=r"sample 1 of dataset 0 lacks image, .* has None there"):
        td.PackedDataset(rows, td.pack([1, 1], 2), sample_columns=["image"])[0]


def column_items() -> list[dict[str, Any]]:
    rows = [{"input_ids": [1, 2], "weight": [1.0, 2.0]}, {"input_ids": [3, 4], "weight": [3.0, 4.0]}]
    return list(td.PackedDataset(rows, td.pack([2, 2], 2), columns={"weight": 0.0}))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"weight": torch.zeros(3)}, r"weight of item 1 of the batch has the shape \(3,\), and its input_ids \(2,\)"),
        ({"weight": torch.zeros(1, 2)}, r"weight of item 1 of the batch has the shape \(1, 2\)"),
        ({"weight": torch.zeros(2, dtype=torch.int64)}, "has the dtype int64, and that of item 0 float32"),
        ({"weight": [0.0, 0.0]}, "weight of item 1 of the batch is no dense tensor on the CPU"),
        ({"weight": None}, "weight of item 1 of the batch is no dense tensor on the CPU"),
        ({"column_padding": {}}, r"item 1 .* has the columns \[\], and item 0 has \['weight'\]"),
        ({"reward": 0.5}, "item 1 of the batch has 'reward', which no PackedDataset gives: .* sample_columns"),
        ({"seq_idx": torch.zeros(2)}, "item 1 of the batch has 'seq_idx', which no PackedDataset gives"),
    ],
)  # fmt: skip
def test_the_collator_drops_nothing_in_silence(changed: dict[str, Any], says: str) -> None:
    first, second = column_items()
    with pytest.raises(InvalidInputError, match=says):
        td.PackedCollator()([first, second | changed])


def test_the_collator_keeps_pieces_and_columns_together() -> None:
    batch = td.PackedCollator(return_flash_attn_kwargs=True, return_seq_idx=True)(column_items())
    bounds = batch["cu_seq_lens_q"].tolist()
    pieces = [batch["weight"][0, start:stop].tolist() for start, stop in pairwise(bounds)]
    assert pieces == [[1.0, 2.0], [3.0, 4.0]]
