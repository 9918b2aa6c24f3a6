"""`PackedCollator` against transformers' own collator: batches, padding and attention masks."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.packing.samples import make_nested, pieces_of
from support.packing.small_llama import k_gradient, loss_apart, small_llama
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError, TundishError

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
        assert ours.pop("use_cache") is False
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


NESTED = make_nested()


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
        ({"input_ids": NESTED}, InvalidTypeError, "input_ids nested: .* one dimension"),
        ({"position_ids": NESTED}, InvalidTypeError, "position_ids nested"),
        ({"cu_seqlens": NESTED}, InvalidTypeError, "cu_seqlens nested"),
        ({"max_seqlen": "a"}, InvalidTypeError, "the max_seqlen 'a', which is a str: it is an integer"),
        ({"max_seqlen": None}, InvalidTypeError, "the max_seqlen None"),
        ({"max_seqlen": 2.5}, InvalidTypeError, "the max_seqlen 2.5"),
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


def test_a_batch_without_tokens_is_padding_alone() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    item = item_of(
        input_ids=none, labels=none, position_ids=none, cu_seqlens=torch.zeros(1, dtype=torch.int32)
    )
    batch = td.PackedCollator(pad_to=4, pad_token_id=9)([item])
    assert batch["input_ids"].tolist() == [[9] * 4] and batch["labels"].tolist() == [[-100] * 4]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3]]


def test_a_batch_beyond_what_its_bounds_can_say_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # The limit itself is 16 GiB of tokens.
    monkeypatch.setattr("tundish.packing.batches.collator._MOST_TOKENS", 8)
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
    packed = model(**batch).loss
    gradient = k_gradient(model, packed)
    apart = loss_apart(model, items)
    assert abs(packed.item() - apart.item()) < 1e-5
    torch.testing.assert_close(gradient, k_gradient(model, apart), rtol=1e-4, atol=1e-6)
    # The same row with pieces that see each other: the comparison above is able to fail.
    del batch["position_ids"]
    assert abs(model(**batch).loss.item() - apart.item()) > 1e-2


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
    with pytest.raises(InvalidTypeError, match=r"td\.PackedCollator\(\).* remove_unused_columns=False"):
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


def weighted_dataset(align: int = 1) -> td.PackedDataset:
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
    items = weighted_dataset(align).__getitems__(packs)
    tokens = sum(len(item["input_ids"]) for item in items)
    row = options.get("pad_to") or -(-tokens // options["pad_to_multiple_of"]) * options["pad_to_multiple_of"]
    padding = {"input_ids": [59] * (row - tokens), "labels": [-100] * (row - tokens)}
    more = {"return_flash_attn_kwargs": True, "return_seq_idx": True}
    # A piece without tokens is none.
    expected = DataCollatorWithFlattening(return_tensors="pt", **more)([*pieces_of(items), padding])
    batch = td.PackedCollator(**options, **more, pad_token_id=59, use_cache=None)(items)
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
    dataset = weighted_dataset()
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
    items = weighted_dataset(align).__getitems__([1, 2])
    apart = loss_apart(model, items).item()
    for options in ({}, {"pad_to": 200}, {"pad_to_multiple_of": 64}):
        batch = td.PackedCollator(**options)(items)
        del batch["weight"]
        loss = model(**batch).loss
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


def make_items(lengths: list[int], max_length: int) -> list[dict[str, Any]]:
    draws = np.random.default_rng(0)
    samples = [draws.integers(0, VOCABULARY, length) for length in lengths]
    plan = td.pack(lengths, max_length, mode="sequential")
    return list(td.PackedDataset(samples, plan))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("pad_to", [None, 80])
def test_a_mask_keeps_pieces_apart_in_a_model_that_is_told_no_positions(
    attention: str, pad_to: int | None
) -> None:
    items = make_items([9, 20, 1, 2, 17, 14], 32)
    model = small_llama(VOCABULARY, attention)
    apart = loss_apart(model, items)
    expected = k_gradient(model, apart)
    batch = td.PackedCollator(attention="mask", pad_to=pad_to)(items)
    with_positions = model(**batch).loss
    # Rotary positions count relative to each other, so that only the mask tells pieces apart. The cache is on.
    del batch["position_ids"]
    packed = model(**batch).loss
    assert abs(with_positions.item() - apart.item()) < 1e-5
    assert abs(packed.item() - apart.item()) < 1e-5
    torch.testing.assert_close(k_gradient(model, packed), expected, rtol=1e-4, atol=1e-6)
    # Without it, the comparison above fails.
    del batch["attention_mask"]
    assert abs(model(**batch).loss.item() - apart.item()) > 1e-2


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_mask_fits_weights_of_half_precision(attention: str) -> None:
    items = make_items([9, 20, 3], 32)
    model = small_llama(VOCABULARY, attention)
    apart = loss_apart(model, items).item()
    loss = model.bfloat16()(**td.PackedCollator(attention="mask")(items)).loss
    assert abs(loss.item() - apart) < 0.05


# FlexAttention has no backward on the CPU.
@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_block_mask_keeps_pieces_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    # It takes ten seconds to compile it for the CPU.
    def unfused(query: Any, key: Any, value: Any, training: bool = False, **options: Any) -> Any:
        return flex_attention(query, key, value, **options)

    monkeypatch.setattr("transformers.integrations.flex_attention.compile_friendly_flex_attention", unfused)
    items = make_items([90, 200, 1, 30, 17, 14], 300)
    model = small_llama(VOCABULARY, "flex_attention")
    apart = loss_apart(small_llama(VOCABULARY, "sdpa"), items)
    batch = td.PackedCollator(attention="flex")(items)
    assert batch["document_ids"].dtype == torch.int32
    del batch["position_ids"]
    assert abs(model(**batch).loss.item() - apart.item()) < 1e-5
    tokens = batch["input_ids"].shape[1]
    batch["attention_mask"] = create_block_mask(
        lambda b, h, query, key: query >= key, 1, None, tokens, tokens, device="cpu"
    )
    assert abs(model(**batch).loss.item() - apart.item()) > 1e-2


def blocks_of(counts: torch.Tensor, indices: torch.Tensor) -> list[set[int]]:
    return [set(row[:count].tolist()) for count, row in zip(counts[0, 0], indices[0, 0], strict=True)]


@pytest.mark.parametrize(
    ("lengths", "max_length"),
    [
        ([90, 200, 1, 30, 17, 14], 300),
        ([128, 128, 256, 512], 1024),
        ([1000], 1024),
        ([5], 8),
        ([129, 127, 400, 1, 1, 1, 385], 1024),
        ([64] * 16, 512),
    ],
)
def test_the_blocks_are_those_that_comparing_all_tokens_gives(lengths: list[int], max_length: int) -> None:
    batch = td.PackedCollator(attention="flex", return_seq_idx=True)(make_items(lengths, max_length))
    mask, ids = batch["attention_mask"], batch["document_ids"][0]
    assert torch.equal(batch["document_ids"], batch["seq_idx"])
    tokens = len(ids)
    for moved in (
        mask,
        mask.to("cpu"),
        mask.to(torch.device("cpu"), non_blocking=True),
        pickle.loads(pickle.dumps(mask)),
    ):

        def seen(b: Any, h: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (query >= key) & (ids[query] == ids[key])

        own = create_block_mask(seen, 1, None, tokens, tokens, device="cpu")
        assert moved.shape == own.shape == (1, 1, tokens, tokens)
        for kind in ("kv", "full_kv", "q", "full_q"):
            names = f"{kind}_num_blocks", f"{kind}_indices"
            found, expected = (blocks_of(*(getattr(one, name) for name in names)) for one in (moved, own))
            assert found == expected, kind
        place = torch.arange(tokens)
        zero = torch.zeros((), dtype=torch.int64)
        assert torch.equal(
            moved.mask_mod(zero, zero, place[:, None], place), seen(zero, zero, place[:, None], place)
        )
    # The other kind of mask says the same.
    added = td.PackedCollator(attention="mask")(make_items(lengths, max_length))["attention_mask"]
    assert torch.equal(added[0, 0] == 0, seen(zero, zero, place[:, None], place))


def test_masks_come_from_the_workers_of_a_data_loader() -> None:
    items: Any = make_items([90, 200, 1], 300)
    for attention in ("mask", "flex"):
        collate = td.PackedCollator(attention=attention)  # type: ignore[arg-type]
        (batch,) = DataLoader(items, batch_size=2, collate_fn=collate, num_workers=1)
        mask, expected = batch["attention_mask"], collate(items)["attention_mask"]
        if attention == "mask":
            assert torch.equal(mask, expected)
        else:
            assert torch.equal(mask.to_dense(), expected.to_dense())


def test_the_move_of_a_block_mask_takes_its_document_ids_along() -> None:
    mask = td.PackedCollator(attention="flex")(make_items([90, 200], 300))["attention_mask"]
    moved = mask.to("meta")
    assert moved.kv_indices.device.type == moved.document_ids.device.type == "meta"
    place = torch.arange(290, device="meta")
    assert moved.mask_mod(None, None, place[:, None], place).device.type == "meta"


@pytest.mark.parametrize("attention", ["flash", None, True, 0])
def test_another_kind_of_attention_is_refused(attention: Any) -> None:
    with pytest.raises(TundishError, match=r"attention .* one of 'none', 'mask', 'flex'"):
        td.PackedCollator(attention=attention)


def shapes(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: value.shape if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


@pytest.mark.parametrize(
    "options",
    [{}, {"mode": "best_fit", "align": 4}, {"mode": "sequential", "overlong": "split"}, {"drop_last": False}],
    ids=str,
)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_for_plan_gives_all_batches_one_shape(options: dict[str, Any], batch_size: int) -> None:
    random = np.random.default_rng(5)
    longest = 60 if options.get("overlong") else 32
    samples = [[7] * length for length in random.integers(0, longest, 300).tolist()]
    plan = td.pack(list(map(len, samples)), 32, **options)
    # Some packs hold many samples more than others.
    few = td.pack([32] * 4, 32)
    for packs, data in ((plan, samples), (td.mix([few, plan], [1, 1]), [[[5] * 32] * 4, samples])):
        collator = td.PackedCollator.for_plan(
            packs, batch_size, return_flash_attn_kwargs=True, return_seq_idx=True, attention="mask"
        )
        dataset = td.PackedDataset(data, packs)
        batches = [
            collator(dataset.__getitems__(range(first, min(first + batch_size, len(dataset)))))
            for first in range(0, len(dataset), batch_size)
        ]
        first = shapes(batches[0])
        assert all(shapes(batch) == first for batch in batches)
        assert first["input_ids"] == (1, 32 * batch_size)
        by_dataset = td.PackedCollator.for_plan(packs, batch_size, return_dataset_id=True)
        ids = [by_dataset([item])["dataset_id"].shape for item in dataset]
        assert set(ids) == {(first["cu_seq_lens_q"][0] - 1,)}
        # There is room for a batch of the fullest packs, and for the padding.
        fullest = max(len(item["cu_seqlens"]) - 1 for item in dataset)
        assert first["cu_seq_lens_q"][0] >= fullest * batch_size + 2
        assert "cu_seq_lens_q" not in td.PackedCollator.for_plan(packs, batch_size)(dataset.__getitems__([0]))


def test_arguments_of_for_plan_are_checked() -> None:
    plan = td.pack([4, 4], 4)
    with pytest.raises(InvalidTypeError, match="plan is a list"):
        td.PackedCollator.for_plan([4, 4], 1)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="batch_size is 0"):
        td.PackedCollator.for_plan(plan, 0)
    with pytest.raises(InvalidInputError, match="for_plan computes what pad_to would say"):
        td.PackedCollator.for_plan(plan, 1, pad_to=8)
    with pytest.raises(
        InvalidInputError, match=r"batch_size 1000000000 x max_length 4 = 4000000000 tokens a row"
    ):
        td.PackedCollator.for_plan(plan, 10**9)
