"""Sources that raise, end early, give something else than samples, or come from other libraries."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

import datasets as hf
import numpy as np
import pytest
import torch
from support.packing.streams import StatefulSource, assert_same_items, draw_samples, planned_items

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError

OPTIONS = {"mode": "ordered", "window": 2, "max_length": 8}


class Broken(StatefulSource):
    """Raises instead of sample `number`."""

    def __init__(self, samples: list[Any], number: int) -> None:
        super().__init__(samples)
        self.number = number

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            if self._position == self.number + 1:
                self._position = self.number
                raise ConnectionError("the bucket does not answer")
            yield sample


@pytest.mark.parametrize("number", [0, 1, 7, 19])
def test_an_error_of_the_source_is_raised_as_it_is_with_the_number_of_the_sample(number: int) -> None:
    samples = draw_samples([5] * 20, "lists")
    stream = td.PackedStream(Broken(samples, number), **OPTIONS)
    expected = planned_items(samples, OPTIONS)
    found = []
    with pytest.raises(ConnectionError, match="the bucket does not answer") as caught:
        found.extend(stream)
    (note,) = caught.value.__notes__
    assert note == f"raised by the source of a PackedStream when it was asked for sample {number}"
    assert note in "".join(traceback.format_exception(caught.value))
    assert_same_items(found, expected[: len(found)])


def test_an_error_while_samples_are_left_out_has_the_number_of_the_sample() -> None:
    samples = draw_samples([5] * 20, "lists")
    stream = td.PackedStream(samples, **OPTIONS)
    for _ in zip(stream, range(9), strict=False):
        state = stream.state_dict()

    def broken() -> Iterator[Any]:
        yield from samples[:4]
        raise OSError("no such file")

    again = td.PackedStream(broken(), **OPTIONS)
    again.load_state_dict(state)
    with pytest.raises(OSError, match="no such file") as caught:
        next(iter(again))
    assert [note[-8:] for note in caught.value.__notes__] == ["sample 4"]
    # The state is still that of the packs that were given out.
    assert again.state_dict()["samples"] == state["samples"]


def test_an_iterable_that_cannot_begin_is_numbered_too() -> None:
    class Closed:
        def __iter__(self) -> Iterator[Any]:
            raise RuntimeError("closed")

    with pytest.raises(RuntimeError, match="closed") as caught:
        next(iter(td.PackedStream(Closed(), **OPTIONS)))
    assert caught.value.__notes__ == ["raised by the source of a PackedStream when it was asked for sample 0"]


@pytest.mark.parametrize(
    ("sample", "kind", "says"),
    [
        ("text", InvalidTypeError, "sample 2 of dataset 0"),
        (None, InvalidTypeError, "sample 2 of dataset 0"),
        (7, InvalidTypeError, "sample 2 of dataset 0 is an int of shape .*: give one-dimensional token ids"),
        ([1.5], InvalidTypeError, "sample 2 of dataset 0 is a list of dtype float64: give integers"),
        ([[1, 2]], InvalidTypeError, "sample 2 of dataset 0 is a list of shape .*: give one-dimensional"),
        ({"text": "a"}, InvalidTypeError, "sample 2 of dataset 0 has no input_ids"),
        ({"input_ids": [1], "labels": [1, 2]}, InvalidInputError, "sample 2 of dataset 0 has 1 input_ids but 2 labels"),
        ({"input_ids": [1], "reward": 1.0}, InvalidInputError, r"sample 2 of dataset 0 has \['reward'\]"),
        ({"input_ids": [1], "loss_mask": [2]}, InvalidInputError, "loss_mask of sample 2 of dataset 0 is 2"),
        ({"input_ids": [1], "attention_mask": [0]}, InvalidInputError, "attention_mask of sample 2 .* is 0"),
        (np.array([2**63], np.uint64), InvalidInputError, "sample 2 of dataset 0 is 9223372036854775808"),
    ],
)  # fmt: skip
def test_a_sample_of_a_wrong_type_is_numbered(sample: Any, kind: type[Exception], says: str) -> None:
    for mode in ("ordered", "hard"):
        with pytest.raises(kind, match=says):
            list(td.PackedStream([[1], [2, 3], sample, [4]], 8, mode=mode))


def test_columns_that_a_sample_lacks_are_refused() -> None:
    samples = [{"input_ids": [1], "weight": [0.5]}, {"input_ids": [2]}]
    with pytest.raises(InvalidInputError, match="sample 1 of dataset 0 lacks weight"):
        list(td.PackedStream(samples, 8, columns={"weight": 0.0}))


@pytest.mark.parametrize("form", [None, "numpy", "torch"])
def test_streams_of_hugging_face(form: str | None) -> None:
    lengths = np.random.default_rng(1).integers(1, 9, 50).tolist()
    tokens = [sample.tolist() for sample in draw_samples(lengths, "arrays")]
    masks = [[number % 2 for number in sample] for sample in tokens]
    rows = hf.Dataset.from_dict({"input_ids": tokens, "completion_mask": masks})
    stream = td.PackedStream(rows.to_iterable_dataset(num_shards=2).with_format(form), **OPTIONS)
    samples = [
        dict(zip(("input_ids", "completion_mask"), pair, strict=True))
        for pair in zip(tokens, masks, strict=True)
    ]
    assert_same_items(list(stream), planned_items(samples, OPTIONS))


def test_tensors_that_samples_have_once_are_kept_to_their_packs() -> None:
    samples = [{"input_ids": [number], "image": torch.full((1, 2), number)} for number in range(6)]
    stream = td.PackedStream(samples, 4, mode="sequential", sample_columns=["image"])
    first, second = stream
    assert first["image"][:, 0].tolist() == [0, 1, 2, 3] and second["image"][:, 0].tolist() == [4, 5]
    iterator = iter(stream)
    next(iterator)
    stream.load_state_dict(stream.state_dict())
    assert_same_items(list(stream), [second])
