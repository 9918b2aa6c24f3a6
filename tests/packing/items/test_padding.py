"""Rows of one length: the padding of `PackedCollator`, against transformers' collator with one more piece."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.packing.samples import pieces_of
from support.packing.small_llama import loss_apart, small_llama
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError

VOCABULARY = 60


def make_dataset(align: int = 1) -> td.PackedDataset:
    draws = np.random.default_rng(0)
    lengths = draws.integers(1, 30, 40)
    rows = [
        {"input_ids": draws.integers(1, VOCABULARY, length), "weight": draws.random(length)}
        for length in lengths
    ]
    plan = td.pack(lengths, 64, mode="sequential", align=align)
    return td.PackedDataset(rows, plan, columns={"weight": 2.5})


@pytest.mark.parametrize(("packs", "align"), [([0], 1), ([1, 2, 3], 1), ([1, 2], 8)])
@pytest.mark.parametrize("options", [{"pad_to": 192}, {"pad_to_multiple_of": 256}, {"pad_to_multiple_of": 7}])
def test_padding_is_one_more_piece(packs: list[int], align: int, options: dict[str, int]) -> None:
    items = make_dataset(align).__getitems__(packs)
    tokens = sum(len(item["input_ids"]) for item in items)
    row = options.get("pad_to") or -(-tokens // options["pad_to_multiple_of"]) * options["pad_to_multiple_of"]
    padding = {"input_ids": [59] * (row - tokens), "labels": [-100] * (row - tokens)}
    more = {"return_flash_attn_kwargs": True, "return_seq_idx": True}
    # A piece without tokens is none.
    expected = DataCollatorWithFlattening(return_tensors="pt", **more)([*pieces_of(items), padding])
    batch = td.PackedCollator(**options, **more, pad_token_id=59)(items)
    weight = batch.pop("weight")
    assert set(batch) == set(expected)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert batch[key].dtype == value.dtype
            assert torch.equal(batch[key], value), key
        else:
            assert batch[key] == value, key
    assert weight.shape == (1, row) and weight.dtype == torch.float32
    assert torch.equal(weight[0, :tokens], torch.cat([item["weight"] for item in items]))
    assert (weight[0, tokens:] == 2.5).all()


def test_every_batch_of_an_epoch_has_the_same_shapes() -> None:
    dataset = make_dataset()
    sampler = td.PackedBatchSampler(dataset.plan, 2, rank=0, world_size=1, drop_last=True, seed=0)
    most = max(len(pack.pieces) for pack in dataset.plan)
    collate = td.PackedCollator(
        pad_to=128, pad_pieces_to=2 * most + 1, return_flash_attn_kwargs=True, return_seq_idx=True
    )
    plain = td.PackedCollator(return_flash_attn_kwargs=True)
    loader: Any = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
    batches = list(loader)
    shapes = {tuple((key, np.shape(value)) for key, value in batch.items()) for batch in batches}
    assert len(batches) == len(sampler) > 3 and len(shapes) == 1
    for batch, packs in zip(batches, sampler, strict=True):
        own = plain(dataset.__getitems__(packs))["cu_seq_lens_q"].tolist()
        bounds = batch["cu_seq_lens_q"]
        assert bounds.shape == (2 * most + 2,) and bounds.dtype == torch.int32
        assert bounds.tolist() == own + [128] * (len(bounds) - len(own))
        assert torch.equal(bounds, batch["cu_seq_lens_k"])
        assert batch["max_length_q"] == batch["max_length_k"] == 128


@pytest.mark.parametrize("align", [1, 8])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padding_does_not_change_the_loss(attention: str, align: int) -> None:
    model = small_llama(VOCABULARY, attention)
    items = make_dataset(align).__getitems__([1, 2])
    apart = loss_apart(model, items).item()
    for options in ({}, {"pad_to": 200}, {"pad_to_multiple_of": 64}):
        batch = td.PackedCollator(**options)(items)
        del batch["weight"]
        loss = model(**batch, use_cache=False).loss
        assert abs(loss.item() - apart) < 1e-5


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"pad_to": 0}, InvalidInputError, "pad_to is 0; it must be in 1"),
        ({"pad_to": 2**31}, InvalidInputError, "pad_to is 2147483648"),
        ({"pad_to": 64.0}, InvalidTypeError, "pad_to must be an integer"),
        ({"pad_to_multiple_of": True}, InvalidTypeError, "pad_to_multiple_of must be an integer"),
        ({"pad_to": 64, "pad_to_multiple_of": 8}, InvalidInputError, "exclude each other"),
        ({"pad_pieces_to": 8, "pad_to": 64}, InvalidInputError, "return_flash_attn_kwargs=True"),
        ({"pad_pieces_to": 8, "return_flash_attn_kwargs": True}, InvalidInputError, "give pad_to"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        td.PackedCollator(**options)


def test_a_batch_that_does_not_fit_is_refused_by_name() -> None:
    items = td.PackedDataset(
        [[1] * 7, [2] * 9, [3] * 2], td.pack([7, 9, 2], 9, mode="sequential")
    ).__getitems__([0, 1, 2])
    with pytest.raises(
        InvalidInputError, match="18 tokens, and pad_to is 17; its longest pack, item 1, has 9"
    ):
        td.PackedCollator(pad_to=17)(items)
    exact = td.PackedCollator(pad_to=18, pad_pieces_to=3, return_flash_attn_kwargs=True)(items)
    assert exact["cu_seq_lens_q"].tolist() == [0, 7, 16, 18]
    with pytest.raises(
        InvalidInputError, match=r"4 pieces with its padding, and pad_pieces_to is 3: .* max_samples"
    ):
        td.PackedCollator(pad_to=19, pad_pieces_to=3, return_flash_attn_kwargs=True)(items)
