"""`PackedCollator` against transformers: its own collator, and models on packs and on pieces apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.packing.samples import pieces_of
from support.packing.small_llama import k_gradient, loss_apart, small_llama
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError

VOCABULARY = 120


def make_dataset(own_labels: bool, *, mask_first_token: bool = False, seed: int = 0) -> Any:
    """Packs with cut samples, pieces of one token, samples without tokens and a short last pack."""
    draws = np.random.default_rng(seed)
    lengths = np.concatenate([draws.integers(0, 40, 40), [0, 1, 1, 1, 150, 1]])
    rows: list[dict[str, Any]] = []
    for length in lengths:
        tokens = draws.integers(0, VOCABULARY, length)
        rows.append({"input_ids": tokens})
        if own_labels:
            rows[-1]["labels"] = np.where(draws.random(length) < 0.4, -100, tokens)
    plan = td.pack(lengths, 64, seed=seed, drop_last=False)
    return td.PackedDataset(rows, plan, mask_first_token=mask_first_token)


def batches_of(dataset: Any) -> list[list[int]]:
    last = len(dataset) - 1
    return [[0], [last], [0, 1, 2], [last, 3], list(range(len(dataset)))]


@pytest.mark.parametrize("own_labels", [False, True])
@pytest.mark.parametrize("mask_first_token", [False, True])
@pytest.mark.parametrize("return_flash_attn_kwargs", [False, True])
@pytest.mark.parametrize("return_seq_idx", [False, True])
def test_yields_what_transformers_own_collator_yields(
    own_labels: bool, mask_first_token: bool, return_flash_attn_kwargs: bool, return_seq_idx: bool
) -> None:
    dataset = make_dataset(own_labels, mask_first_token=mask_first_token)
    options = {"return_flash_attn_kwargs": return_flash_attn_kwargs, "return_seq_idx": return_seq_idx}
    for indices in batches_of(dataset):
        items = dataset.__getitems__(indices)
        ours = td.PackedCollator(**options)(items)
        theirs = DataCollatorWithFlattening(return_tensors="pt", **options)(pieces_of(items))
        assert set(ours) == set(theirs)
        for key, value in theirs.items():
            if isinstance(value, torch.Tensor):
                assert ours[key].dtype == value.dtype, key
                assert ours[key].shape == value.shape, key
                assert torch.equal(ours[key], value), key
            else:
                assert type(ours[key]) is type(value), key
                assert ours[key] == value, key


ITEM = {
    "input_ids": torch.tensor([1]),
    "labels": torch.tensor([1]),
    "position_ids": torch.tensor([0]),
    "cu_seqlens": torch.tensor([0, 1], dtype=torch.int32),
    "max_seqlen": 1,
}


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ([5], "item 0 of the batch is an int"),
        ([ITEM, None], "item 1 of the batch is None"),
        (["input_ids labels position_ids cu_seqlens max_seqlen"], "item 0 of the batch is a str"),
        ([ITEM | {"labels": [1], "cu_seqlens": [0, 1]}], "item 0 .* no tensor as its labels, cu_seqlens"),
        (
            [ITEM, {"input_ids": ITEM["input_ids"]}],
            "item 1 .* lacks labels, position_ids, cu_seqlens, max_seqlen",
        ),
        (ITEM, "the batch is a dict: give a list of items of a PackedDataset"),
        (iter([ITEM]), "the batch is a list_iterator"),
        (None, "the batch is None"),
        ("items", "the batch is a str"),
    ],
)
def test_what_is_no_batch_is_refused(items: Any, says: str) -> None:
    with pytest.raises(InvalidTypeError, match=says):
        td.PackedCollator()(items)
    assert td.PackedCollator()([ITEM, ITEM])["input_ids"].tolist() == [[1, 1]]


def item_of(**changed: Any) -> dict[str, Any]:
    """A good item of two pieces and four tokens, but for what is changed."""
    return {
        "input_ids": torch.tensor([1, 2, 3, 4]),
        "labels": torch.tensor([1, 2, 3, 4]),
        "position_ids": torch.tensor([0, 0, 1, 2]),
        "cu_seqlens": torch.tensor([0, 1, 4], dtype=torch.int32),
        "max_seqlen": 3,
        **changed,
    }


@pytest.mark.parametrize(
    ("changed", "kind", "says"),
    [
        ({"labels": torch.ones(4, requires_grad=True)}, InvalidTypeError, "labels of dtype float32: .* integers"),
        ({"input_ids": torch.ones(4, dtype=torch.bool)}, InvalidTypeError, "input_ids of dtype bool"),
        ({"position_ids": torch.zeros(4, dtype=torch.uint64)}, InvalidTypeError, "position_ids of dtype uint64"),
        ({"input_ids": torch.tensor([[1, 2, 3, 4]])}, InvalidTypeError, r"input_ids of shape \(1, 4\)"),
        ({"labels": torch.ones((), dtype=torch.int64)}, InvalidTypeError, r"labels of shape \(\)"),
        ({"cu_seqlens": torch.tensor([0, 4], device="meta")}, InvalidTypeError, "cu_seqlens on meta: .* the CPU"),
        ({"labels": torch.arange(4).to_sparse()}, InvalidTypeError, "labels on sparse_coo: .* the CPU"),
        ({"labels": torch.tensor([1, 2, 3])}, InvalidInputError, "4 input_ids but 3 labels"),
        ({"position_ids": torch.arange(5)}, InvalidInputError, "4 input_ids but 5 position_ids"),
        ({"cu_seqlens": torch.tensor([0, 1, 5])}, InvalidInputError, r"cu_seqlens \[0, 1, 5\], .* from 0 to 4"),
        ({"cu_seqlens": torch.tensor([0, 1, 3])}, InvalidInputError, r"cu_seqlens \[0, 1, 3\]"),
        ({"cu_seqlens": torch.tensor([1, 4])}, InvalidInputError, r"cu_seqlens \[1, 4\]"),
        ({"cu_seqlens": torch.tensor([0, 4, 4])}, InvalidInputError, r"cu_seqlens \[0, 4, 4\]"),
        ({"cu_seqlens": torch.tensor([0, 3, 1, 4])}, InvalidInputError, r"cu_seqlens \[0, 3, 1, 4\]"),
        ({"cu_seqlens": torch.tensor([0, 2**32 + 4])}, InvalidInputError, r"cu_seqlens \[0, 4294967300\]"),
        ({"cu_seqlens": torch.arange(99)}, InvalidInputError, r"cu_seqlens \[0, 1, 2, 3, …, 98\]"),
        ({"cu_seqlens": torch.arange(0)}, InvalidInputError, r"cu_seqlens \[\]"),
    ],
)  # fmt: skip
def test_an_item_whose_tensors_do_not_fit_is_named(
    changed: dict[str, Any], kind: type[Exception], says: str
) -> None:
    collate = td.PackedCollator(return_flash_attn_kwargs=True, return_seq_idx=True)
    with pytest.raises(kind, match=f"item 1 of the batch has .*{says}"):
        collate([item_of(), item_of(**changed)])


def test_a_batch_beyond_what_its_bounds_can_say_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # The limit itself is 16 GiB of tokens.
    monkeypatch.setattr("tundish.packing.collator._MOST_TOKENS", 8)
    assert td.PackedCollator()([item_of()] * 2)["input_ids"].shape == (1, 8)
    with pytest.raises(InvalidInputError, match=r"the batch has 12 tokens, .* end at 8"):
        td.PackedCollator()([item_of()] * 3)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_integers_of_any_width_come_out_as_the_documented_dtypes(dtype: torch.dtype) -> None:
    collate = td.PackedCollator(return_flash_attn_kwargs=True, return_seq_idx=True)
    keys = ("input_ids", "labels", "position_ids", "cu_seqlens")
    narrow = item_of(**{key: item_of()[key].to(dtype) for key in keys})
    # Enough of them that their bounds are beyond a byte.
    for first in (narrow, item_of()):
        found, expected = collate([first] + [narrow] * 99), collate([item_of()] * 100)
        for key, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert found[key].dtype == value.dtype, key
                assert torch.equal(found[key], value), key
            else:
                assert found[key] == value, key


def test_items_stay_as_they_are() -> None:
    items = make_dataset(own_labels=False).__getitems__([0])
    before = items[0]["labels"].clone()
    td.PackedCollator()(items)["input_ids"].zero_()
    assert torch.equal(items[0]["labels"], before)
    assert torch.equal(items[0]["input_ids"], before)


def test_the_default_device_of_a_script_changes_nothing() -> None:
    collate = td.PackedCollator(return_flash_attn_kwargs=True, return_seq_idx=True)
    expected = collate([ITEM, ITEM])
    # A script sets it to "cuda"; any device but the host's will do.
    with torch.device("meta"):
        found = collate([ITEM, ITEM])
    for key, value in expected.items():
        assert not isinstance(value, torch.Tensor) or torch.equal(found[key], value), key


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("own_labels", [False, True])
@pytest.mark.parametrize("return_flash_attn_kwargs", [False, True])
def test_the_loss_of_packs_is_that_of_their_pieces_apart(
    attention: str, own_labels: bool, return_flash_attn_kwargs: bool
) -> None:
    dataset = make_dataset(own_labels)
    items = dataset.__getitems__([0, 3, len(dataset) - 1])
    model = small_llama(VOCABULARY, attention)
    batch = td.PackedCollator(return_flash_attn_kwargs=return_flash_attn_kwargs)(items)
    packed = model(**batch, use_cache=False).loss
    gradient = k_gradient(model, packed)
    apart = loss_apart(model, items)
    assert abs(packed.item() - apart.item()) < 1e-5
    torch.testing.assert_close(gradient, k_gradient(model, apart), rtol=1e-4, atol=1e-6)
    # The same row with pieces that see each other: the comparison above is able to fail.
    del batch["position_ids"]
    assert abs(model(**batch, use_cache=False).loss.item() - apart.item()) > 1e-2


def test_as_the_collate_fn_of_a_data_loader_with_workers() -> None:
    dataset = make_dataset(own_labels=True)
    sampler = td.PackedBatchSampler(dataset.plan, 3, seed=5)
    collator = td.PackedCollator(return_flash_attn_kwargs=True)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collator, num_workers=2)
    received = list(loader)
    assert len(received) == len(sampler)
    for batch, indices in zip(received, list(sampler), strict=True):
        for key, value in collator(dataset.__getitems__(indices)).items():
            assert torch.equal(torch.as_tensor(batch[key]), torch.as_tensor(value)), key


@pytest.mark.parametrize("keeps", [True, False])
def test_as_the_data_collator_of_a_trainer(keeps: bool, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
    )
    arguments.remove_unused_columns = not keeps
    trainer = Trainer(
        LlamaForCausalLM(config),
        arguments,
        train_dataset=make_dataset(own_labels=True),
        data_collator=td.PackedCollator(),
    )
    if keeps:
        assert trainer.train().global_step == 2
        return
    with pytest.raises(
        InvalidTypeError, match=r"lacks cu_seqlens, max_seqlen: .* remove_unused_columns=False"
    ):
        trainer.train()


def test_what_is_no_batch_of_packs_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="at least one item"):
        td.PackedCollator()([])
    good = make_dataset(own_labels=False)[0]
    with pytest.raises(
        InvalidTypeError, match="item 1 of the batch lacks position_ids, cu_seqlens, max_seqlen"
    ):
        td.PackedCollator()([good, {"input_ids": torch.zeros(1), "labels": torch.zeros(1)}])
    with pytest.raises(InvalidTypeError, match="return_seq_idx must be True or False"):
        td.PackedCollator(return_seq_idx=1)  # type: ignore[arg-type]
