"""The masks of `PackedCollator(attention=...)`: losses against pieces apart, blocks against FlexAttention's own."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from support.packing.small_llama import k_gradient, loss_apart, small_llama
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.data import DataLoader

import tundish as td
from tundish.errors import TundishError

VOCABULARY = 60


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
    with_positions = model(**batch, use_cache=False).loss
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
