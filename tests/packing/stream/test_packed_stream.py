"""The packs of a stream against those of the plan of the same samples."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.packing.streams import (
    PlainSource,
    assert_same_items,
    carried,
    draw_samples,
    planned_items,
    stream_options,
)

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError


def twice(piece: dict[str, Any]) -> np.ndarray[Any, Any]:
    return np.arange(len(piece["input_ids"])) * 2


@given(
    stream_options(),
    st.sampled_from(["arrays", "lists", "rows"]),
    st.fixed_dictionaries({"mask_first_token": st.booleans(), "positions": st.sampled_from([None, twice])}),
)
def test_the_packs_are_those_of_the_plan(
    case: tuple[dict[str, Any], list[int]], form: str, further: dict[str, Any]
) -> None:
    options, lengths = case
    samples = draw_samples(lengths, form)
    arguments = {"pad_token_id": 7, **carried(form), **further}
    stream = td.PackedStream(PlainSource(samples), **options, **arguments)
    expected = planned_items(samples, options, **arguments)
    for _ in range(2):
        assert_same_items(list(stream), expected)


@pytest.mark.parametrize(
    ("mode", "window", "open_after"), [("ordered", 5, 5), ("ordered", None, 64), ("sequential", None, 1)]
)
def test_a_pack_is_given_out_when_so_many_packs_were_opened_after_it(
    mode: str, window: int | None, open_after: int
) -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 2000)
    source = PlainSource(draw_samples(lengths.tolist(), "arrays"))
    plan = td.pack(lengths, 64, mode=mode, window=window)
    opened = [min(piece.sample for piece in pack.pieces) for pack in plan]
    for number, _ in enumerate(td.PackedStream(source, 64, mode=mode, window=window)):
        opens = number + open_after
        assert source.given == (opened[opens] + 1 if opens < len(plan) else len(lengths))


def test_a_pack_of_hard_packing_is_given_out_when_it_is_full() -> None:
    source = PlainSource([[1] * 4, [2] * 9, [3], [4] * 3])
    stream = td.PackedStream(source, 4, mode="hard", drop_last=False)
    assert [(len(item["input_ids"]), source.given) for item in stream] == [
        (4, 1),
        (4, 2),
        (4, 2),
        (4, 4),
        (1, 4),
    ]


@pytest.mark.parametrize(
    "options", [{"mode": "ordered", "window": 8}, {"mode": "sequential"}, {"mode": "hard"}]
)
@pytest.mark.parametrize("form", ["long", "views", "truncated"])
def test_memory_is_bounded_in_tokens(options: dict[str, Any], form: str) -> None:
    if form == "truncated":
        if options["mode"] == "hard":
            return
        options = options | {"overlong": "truncate"}

    def samples() -> Iterator[np.ndarray[Any, Any]]:
        for number in range(2000 if form == "long" else 200):
            # A sample that is a view of 800 kB must not keep them.
            array = np.full(1000 if form == "long" else 100_000, number)
            yield array[:700] if form == "views" else array

    tracemalloc.start()
    try:
        count = sum(1 for _ in td.PackedStream(samples(), 1024, **options))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count > 100
    # Nine packs of 8 kB, what numpy and torch take for them, and two of the large arrays.
    assert peak < 9 * 8192 * 2 + 2 * 800_000 + 100_000, peak


def test_a_sample_is_checked_before_its_first_token_is_packed() -> None:
    mask = np.ones(1000, np.int8)
    mask[950] = 2
    samples = [np.arange(50), {"input_ids": np.arange(1000), "loss_mask": mask}]
    with pytest.raises(InvalidInputError, match="loss_mask of sample 1 of dataset 0 is 2 at position 950"):
        next(iter(td.PackedStream(samples, 100, mode="hard")))
    # Tokens that no pack takes are not looked at.
    assert len(list(td.PackedStream(samples, 900, mode="sequential", overlong="truncate"))) == 2


def test_a_sample_that_is_too_long_is_numbered() -> None:
    samples = [[1, 2], [3], [4] * 9]
    for mode in ("ordered", "sequential"):
        with pytest.raises(
            InvalidInputError, match="sample 2 of dataset 0 has 9 tokens, longer than max_length=8"
        ) as caught:
            list(td.PackedStream(samples, 8, mode=mode))
        assert all(f"overlong='{choice}'" in str(caught.value) for choice in ("split", "truncate", "drop"))


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"mode": "best_fit"}, InvalidInputError, "mode 'best_fit' sorts all samples .* mode='ordered'"),
        ({"mode": "first"}, InvalidInputError, "mode is 'first'"),
        ({"mode": None}, InvalidTypeError, "mode must be one of"),
        ({"max_length": 0}, InvalidInputError, "max_length is 0"),
        ({"max_length": "8"}, InvalidTypeError, "max_length must be an integer"),
        ({"max_length": 2**28 + 1}, InvalidInputError, "max_length is 268435457"),
        ({"window": 0}, InvalidInputError, "window is 0"),
        ({"window": 8, "mode": "sequential"}, InvalidInputError, "mode 'sequential' takes no window"),
        ({"overlong": "split", "mode": "hard"}, InvalidInputError, "mode 'hard' takes no overlong"),
        ({"overlong": "cut"}, InvalidInputError, "overlong is 'cut'"),
        ({"drop_last": True}, InvalidInputError, "mode 'ordered' takes no drop_last"),
        ({"align": 3}, InvalidInputError, "max_length is 8, which is no multiple of align=3"),
        ({"max_samples": 2, "mode": "hard"}, InvalidInputError, "mode 'hard' takes no max_samples"),
        ({"pad_token_id": -1}, InvalidInputError, "pad_token_id is -1"),
        ({"positions": 3}, InvalidTypeError, "positions is an int"),
        ({"window": 2**12, "max_length": 2**20}, InvalidInputError, "window is 4096 and max_length is 1048576"),
        ({"num_packs": 0}, InvalidInputError, "num_packs is 0"),
        ({"num_packs": 2.0}, InvalidTypeError, "num_packs must be an integer"),
        ({"mask_first_token": 1}, InvalidTypeError, "mask_first_token must be True or False"),
        ({"columns": ["weight"]}, InvalidTypeError, "columns is a list"),
        ({"sample_columns": "name"}, InvalidTypeError, "sample_columns is a str"),
        ({"samples": "train.parquet"}, InvalidTypeError, r"samples is a str, .*open_samples\('train.parquet'\)"),
        ({"samples": {"input_ids": [1]}}, InvalidTypeError, "samples is a dict, which is one sample at most"),
        ({"samples": np.arange(3)}, InvalidTypeError, "samples is an ndarray, which is one sample at most"),
        ({"samples": torch.arange(3)}, InvalidTypeError, "samples is a Tensor, which is one sample at most"),
        ({"samples": 7}, InvalidTypeError, "samples is an int: give an iterable of samples"),
    ],
)  # fmt: skip
def test_arguments_are_checked(arguments: dict[str, Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        td.PackedStream(**{"samples": [[1, 2]], "max_length": 8} | arguments)


@pytest.mark.parametrize(
    "samples",
    [[], [[]], iter([]), np.zeros((0, 4), np.int64)],
    ids=["list", "empty sample", "iterator", "rows"],
)
@pytest.mark.parametrize("mode", ["ordered", "sequential", "hard"])
def test_a_stream_without_tokens_has_no_packs(samples: Any, mode: str) -> None:
    assert list(td.PackedStream(samples, 8, mode=mode)) == []


def test_rows_of_an_array_and_of_a_tensor_are_samples() -> None:
    rows = np.arange(12).reshape(4, 3)
    for samples in (rows, torch.from_numpy(rows)):
        (item,) = td.PackedStream(samples, 12)
        assert item["input_ids"].tolist() == list(range(12))
        assert item["cu_seqlens"].tolist() == [0, 3, 6, 9, 12]


def test_a_generator_passes_once() -> None:
    stream = td.PackedStream(iter([[1, 2], [3]]), 4)
    assert len(list(stream)) == 1
    with pytest.raises(InvalidInputError, match=r"source of this PackedStream \(list_iterator\) passes once"):
        iter(stream)


def test_two_iterations_do_not_disturb_each_other() -> None:
    samples = draw_samples([3, 4, 5, 6, 7, 8], "arrays")
    stream = td.PackedStream(samples, 8, mode="sequential")
    first, second = iter(stream), iter(stream)
    expected = planned_items(samples, {"max_length": 8, "mode": "sequential"})
    for pair in zip(first, second, expected, strict=True):
        assert_same_items(pair[:2], [pair[2]] * 2)


def test_items_own_their_memory() -> None:
    tokens = np.arange(4)
    (item,) = td.PackedStream([tokens], 4)
    item["input_ids"].fill_(7)
    assert tokens.tolist() == [0, 1, 2, 3] and item["labels"].tolist() == [0, 1, 2, 3]


def test_a_source_may_fill_one_buffer_again_and_again() -> None:
    def samples() -> Iterator[np.ndarray[Any, Any]]:
        buffer = np.empty(3, np.int64)
        for number in range(6):
            buffer[:] = number
            yield buffer

    assert [item["input_ids"].tolist() for item in td.PackedStream(samples(), 7)] == [
        [0] * 3 + [1] * 3,
        [2] * 3 + [3] * 3,
        [4] * 3 + [5] * 3,
    ]


def test_the_collator_makes_batches_of_the_items() -> None:
    samples = draw_samples([3, 4, 5, 6], "rows")
    items = list(td.PackedStream(samples, 8, **carried("rows")))
    batch = td.PackedCollator()(items)
    assert batch["input_ids"].shape == batch["weight"].shape == (1, 18)
    assert batch["name"] == [f"sample {number}" for number in range(4)]
