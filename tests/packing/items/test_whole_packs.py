"""`PackedDataset`, sampler and collator over plans of whole samples."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.packing.plans import changed
from support.packing.samples import make_samples
from support.packing.whole_plan import Options, packed_in_order, parts_of
from torch.utils.data import DataLoader

import tundish as td
from tundish.errors import PlanMismatchError, TundishError

MODES = ["best_fit", "ordered", "sequential"]
Samples = list[list[int]]
PADDING = 99_999


def check_item(item: dict[str, Any], pieces: Samples, align: int = 1) -> None:
    paddings = [-len(piece) % align for piece in pieces]
    padded = [piece + [PADDING] * padding for piece, padding in zip(pieces, paddings, strict=True)]
    labels = [piece + [-100] * padding for piece, padding in zip(pieces, paddings, strict=True)]
    assert item["input_ids"].tolist() == [token for piece in padded for token in piece]
    assert item["labels"].tolist() == [label for piece in labels for label in piece]
    assert item["position_ids"].tolist() == [place for piece in padded for place in range(len(piece))]
    assert item["cu_seqlens"].tolist() == np.cumsum([0, *map(len, padded)]).tolist()
    assert item["max_seqlen"] == max(map(len, padded))


@given(
    lengths=st.lists(st.integers(0, 30), max_size=25),
    max_length=st.integers(1, 3).map(lambda n: 6 * n),
    mode=st.sampled_from(MODES),
    overlong=st.sampled_from(["split", "truncate", "drop"]),
    align=st.sampled_from([1, 2, 3]),
    attached=st.booleans(),
)
def test_items_are_the_packs(
    lengths: list[int], max_length: int, mode: str, overlong: str, align: int, attached: bool
) -> None:
    samples = make_samples(lengths)
    plan = td.pack(lengths, max_length, mode=mode, overlong=overlong, align=align)
    options = Options(max_length, overlong, align=align)
    parts = parts_of(lengths, list(range(len(lengths))), options)
    pieces = [samples[part.sample][part.start : part.stop] for part in parts]
    dataset = td.PackedDataset(samples, plan if attached else changed(plan), pad_token_id=PADDING)
    items = dataset.__getitems__(range(len(dataset)))
    assert sum(len(item["input_ids"]) for item in items) == sum(map(options.taken, parts))
    if mode != "best_fit":
        window = 64 if mode == "ordered" else 1
        packs = packed_in_order(parts, options, window)
        expected = [[samples[part.sample][part.start : part.stop] for part in pack] for pack in packs]
        for item, pack in zip(items, expected, strict=True):
            check_item(item, pack, align)
    found = []
    for number, item in enumerate(items):
        bounds = item["cu_seqlens"].tolist()
        tokens = item["input_ids"].tolist()
        padded = [tokens[start:stop] for start, stop in pairwise(bounds)]
        own = [[token for token in piece if token != PADDING] for piece in padded]
        check_item(item, own, align)
        check_item(dataset[number], own, align)
        found += own
    assert sorted(found) == sorted(pieces)


@pytest.mark.parametrize("global_pack", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_several_datasets(mode: str, global_pack: bool) -> None:
    lengths = [[9, 4, 0, 3], [], [5, 17, 2]]
    samples = make_samples([length for part in lengths for length in part])
    datasets = [samples[:4], [], samples[4:]]
    plan = td.pack_datasets(lengths, 8, mode=mode, overlong="split", seed=2, global_pack=global_pack)
    dataset = td.PackedDataset(datasets, plan)
    tokens = [token for item in dataset for token in item["input_ids"].tolist()]
    assert sorted(tokens) == [token for sample in samples for token in sample]
    for pack, item in zip(plan, dataset, strict=True):
        if not global_pack:
            assert all((token < 16) == (pack.dataset_id == 0) for token in item["input_ids"].tolist())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("overlong", ["split", "truncate", "drop"])
def test_batches_hold_the_packed_tokens(mode: str, overlong: str) -> None:
    lengths = np.random.default_rng(0).integers(0, 90, 300).tolist()
    plan = td.pack(lengths, 64, mode=mode, overlong=overlong, seed=1)
    dataset = td.PackedDataset(make_samples(lengths), plan)
    sampler = td.PackedBatchSampler(
        plan, 4, rank=0, world_size=1, drop_last=True, group_by_longest=True, seed=5
    )
    loader: Any = DataLoader(dataset, batch_sampler=sampler, collate_fn=td.PackedCollator())
    batches = list(loader)
    assert len(batches) == len(plan) // 4
    joined = torch.cat([batch["input_ids"][0] for batch in batches]).tolist()
    assert len(set(joined)) == len(joined)
    chosen = [number for step in sampler for number in step]
    assert len(joined) == sum(len(dataset[number]["input_ids"]) for number in chosen)
    whole = sum(len(item["input_ids"]) for item in dataset)
    assert whole == plan.stats()["tokens_packed"] <= len(plan) * 64


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("overlong", ["error", "split", "truncate", "drop"])
@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("change", [1, -1])
def test_samples_that_do_not_fit_the_plan_are_refused(
    mode: str, overlong: str, attached: bool, change: int
) -> None:
    # One sample a pack, so that its length is known in every plan.
    lengths = [7, 6, 5, 7]
    plan = td.pack(lengths, 8, mode=mode, overlong=overlong)
    samples = make_samples(lengths)
    samples[2] = list(range(5 + change))
    dataset = td.PackedDataset(samples, plan if attached else changed(plan))
    number = next(number for number, pack in enumerate(plan) if pack.pieces[0].sample == 2)
    if not attached and change > 0 and overlong in ("split", "truncate"):
        # The plan then says which tokens are taken, and not where the sample ends.
        assert len(dataset[number]["input_ids"]) == 5
        return
    with pytest.raises(PlanMismatchError, match=rf"sample 2\b.* has {5 + change}\b"):
        dataset[number]


def test_a_pack_that_would_be_too_long_is_refused() -> None:
    plan = changed(td.pack([3, 3], 8, mode="sequential"))
    with pytest.raises(PlanMismatchError, match="pack 0 of dataset 0 holds 9 tokens"):
        td.PackedDataset([[1] * 6, [1] * 3], plan)[0]


def test_columns_of_aligned_pieces_have_their_padding_values() -> None:
    rows = [
        {
            "input_ids": [1, 2, 3],
            "labels": [7, 8, 9],
            "weight": [0.5] * 3,
            "kind": [1] * 3,
            "code": [True] * 3,
        },
        {"input_ids": [4], "loss_mask": [1], "weight": [0.25], "kind": [2], "code": [False]},
    ]
    columns = {"weight": 9.5, "kind": -1, "code": True}
    plan = td.pack([3, 1], 8, mode="sequential", align=4)
    for row in rows:
        row.setdefault("loss_mask", None)
        row.setdefault("labels", None)
    item = td.PackedDataset(rows, plan, columns=columns, mask_first_token=True)[0]
    assert item["input_ids"].tolist() == [1, 2, 3, 0, 4, 0, 0, 0]
    assert item["labels"].tolist() == [-100, 8, 9, -100, -100, -100, -100, -100]
    assert item["weight"].tolist() == [0.5, 0.5, 0.5, 9.5, 0.25, 9.5, 9.5, 9.5]
    assert item["kind"].tolist() == [1, 1, 1, -1, 2, -1, -1, -1]
    assert item["code"].tolist() == [True, True, True, True, False, True, True, True]
    assert (item["weight"].dtype, item["code"].dtype) == (torch.float32, torch.bool)


@pytest.mark.parametrize("wrong", [-1, 2**63, True, "0", 0.5])
def test_a_wrong_padding_token_is_refused(wrong: Any) -> None:
    with pytest.raises(TundishError, match="pad_token_id"):
        td.PackedDataset([[1]], td.pack([1], 4), pad_token_id=wrong)
    with pytest.raises(TundishError, match="pad_token_id"):
        td.PackedCollator(pad_token_id=wrong)


def test_a_pack_that_would_be_too_long_with_its_padding_is_refused() -> None:
    plan = changed(td.pack([5, 1, 2], 16, mode="sequential", align=4))
    with pytest.raises(PlanMismatchError, match="pack 0 of dataset 0 holds 20 tokens"):
        td.PackedDataset([[1] * 5, [1] * 5, [1] * 2], plan)[0]
