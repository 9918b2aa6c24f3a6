"""The split over context-parallel ranks: against its definition, and a model on two ranks against the whole row."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.distributed.rank_processes import Job, Line

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError, TundishError

VOCABULARY = 60


def make_batch(lengths: list[int], align: int, **options: Any) -> dict[str, Any]:
    draws = np.random.default_rng(0)
    rows = []
    for length in lengths:
        tokens = draws.integers(1, VOCABULARY, length)
        rows.append({"input_ids": tokens, "loss_mask": draws.integers(0, 2, length), "weight": tokens / 4})
    most = sum(-(-length // align) * align for length in lengths)
    plan = td.pack(lengths, most, mode="sequential", align=align)
    dataset = td.PackedDataset(rows, plan, columns={"weight": 0.0})
    return td.PackedCollator(return_flash_attn_kwargs=True, **options)(list(dataset))


def places_of(bounds: list[int], rank: int, world: int) -> list[int]:
    """The definition: of each piece, chunk `rank` and chunk `2 * world - 1 - rank` of equal ones."""
    places = []
    for start, stop in pairwise(bounds):
        piece = list(range(start, stop))
        size = len(piece) // (2 * world)
        chunks = [piece[chunk * size : (chunk + 1) * size] for chunk in range(2 * world)]
        places += chunks[rank] + chunks[2 * world - 1 - rank]
    return places


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    world=st.integers(1, 4),
    padding=st.integers(0, 3),
)
def test_each_rank_gets_its_chunks_of_every_piece(lengths: list[int], world: int, padding: int) -> None:
    align = 2 * world
    row = sum(-(-length // align) * align for length in lengths) + padding * align
    options: dict[str, Any] = {"pad_to": row, "pad_pieces_to": len(lengths) + 2}
    batch = make_batch(lengths, align, return_seq_idx=True, loss_weights="samples", **options)
    before = {
        key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in batch.items()
    }
    bounds = batch["cu_seq_lens_q"].tolist()
    split = ("input_ids", "labels", "position_ids", "seq_idx", "loss_weights", "weight")
    shifted = {
        "shift_labels": torch.tensor([[*batch["labels"][0, 1:].tolist(), -100]]),
        "shift_loss_weights": torch.tensor([[*batch["loss_weights"][0, 1:].tolist(), 0.0]]),
    }
    parts = []
    for rank in range(world):
        part = td.packing.context_parallel(batch, rank, world, columns=["weight"])
        places = places_of(bounds, rank, world)
        assert len(places) == row // world
        assert set(part) == {*batch, *shifted}
        for key in split:
            assert torch.equal(part[key], batch[key][:, places]), key
            assert part[key].dtype == batch[key].dtype
        for key, value in shifted.items():
            assert torch.equal(part[key], value[:, places]), key
        assert torch.equal(part["cu_seq_lens_q"], batch["cu_seq_lens_q"])
        parts.append(part)
    for key in split:
        joined = td.packing.undo_context_parallel([part[key] for part in parts], batch["cu_seq_lens_q"])
        assert torch.equal(joined, batch[key])
    for key, value in before.items():
        assert not isinstance(value, torch.Tensor) or torch.equal(batch[key], value), key
    total = td.packing.num_items_in_batch(parts)
    assert abs(total - td.packing.num_items_in_batch([batch])) < 1e-5


def test_the_inverse_takes_any_dimension() -> None:
    bounds = torch.tensor([0, 8, 12])
    whole = torch.arange(24.0).reshape(2, 12).repeat(3, 1, 1)
    parts = [whole[:, :, places_of(bounds.tolist(), rank, 2)] for rank in range(2)]
    assert torch.equal(td.packing.undo_context_parallel(parts, bounds, dim=2), whole)
    assert torch.equal(td.packing.undo_context_parallel(parts, bounds, dim=-1), whole)


def test_columns_that_are_not_named_stay_whole() -> None:
    batch = make_batch([8, 4], 4)
    part = td.packing.context_parallel(batch, 0, 2)
    assert torch.equal(part["weight"], batch["weight"])


def test_positions_of_several_dimensions_are_split_by_tokens() -> None:
    batch = make_batch([8, 4], 4)
    batch["position_ids"] = batch["position_ids"].repeat(4, 1)[:, None]
    part = td.packing.context_parallel(batch, 1, 2)
    assert part["position_ids"].shape == (4, 1, 6)
    assert part["position_ids"][2, 0].tolist() == [2, 3, 4, 5, 1, 2]


@pytest.mark.parametrize(
    ("change", "arguments", "kind", "says"),
    [
        ({}, (0, 4), InvalidInputError, r"piece 1 of the batch has 4 tokens, and 4 ranks need mult.* of 8: .*align=8"),
        ({}, (2, 2), InvalidInputError, "rank is 2; it must be in 0 … 1"),
        ({}, (0, 0), InvalidInputError, "world is 0"),
        ({}, (0, 2.0), InvalidTypeError, "world must be an integer"),
        ({"cu_seq_lens_q": None}, (0, 2), InvalidInputError, "return_flash_attn_kwargs=True"),
        ({"attention_mask": torch.ones(1)}, (0, 2), InvalidInputError, 'use attention="none"'),
        ({"labels": None}, (0, 2), InvalidInputError, "the batch has no labels, .*: keep them"),
        ({"input_ids": [1] * 12}, (0, 2), InvalidInputError, "input_ids of the batch is a list"),
        ({"position_ids": torch.ones(1, 11)}, (0, 2), InvalidInputError, r"position_ids .* shape \(1, 11\)"),
        ({"loss_weights": torch.ones(3)}, (0, 2), InvalidInputError, r"loss_weights .* shape \(3,\)"),
        ({"cu_seq_lens_q": torch.tensor([0, 8, 4, 12])}, (0, 2), InvalidInputError, "which do not rise from 0"),
        ({"cu_seq_lens_q": torch.tensor([[0, 12]])}, (0, 2), InvalidInputError, "which do not rise from 0"),
        ({"cu_seq_lens_q": torch.tensor([0, 8])}, (0, 2), InvalidInputError, "end at 8, and the batch has 12 tokens"),
        ({"cu_seq_lens_q": torch.tensor([0.0, 12])}, (0, 2), InvalidTypeError, "bounds of the pieces are a Tensor"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused(
    change: dict[str, Any], arguments: tuple[Any, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        td.packing.context_parallel(make_batch([8, 4], 4) | change, *arguments)


def test_wrong_columns_and_parts_are_refused() -> None:
    batch = make_batch([8, 4], 4)
    with pytest.raises(InvalidInputError, match="the batch has no length, named in columns"):
        td.packing.context_parallel(batch, 0, 2, columns=["length"])
    with pytest.raises(InvalidTypeError, match="list of names"):
        td.packing.context_parallel(batch, 0, 2, columns="weight")
    with pytest.raises(InvalidTypeError, match="batch is a list"):
        td.packing.context_parallel([batch], 0, 2)  # type: ignore[arg-type]
    bounds = batch["cu_seq_lens_q"]
    with pytest.raises(
        InvalidInputError, match=r"parts\[1\] has the shape \(1, 5\), and a rank has 6 tokens"
    ):
        td.packing.undo_context_parallel([torch.ones(1, 6), torch.ones(1, 5)], bounds)
    pair = [torch.ones(1, 6), torch.ones(1, 6)]
    for changed in (torch.tensor([0, 8, 4, 12]), torch.tensor([4, 12]), torch.tensor([]).int(), bounds[None]):
        with pytest.raises(InvalidInputError, match=r"bounds of the pieces are .* which do not rise from 0"):
            td.packing.undo_context_parallel(pair, changed)
    with pytest.raises(InvalidTypeError, match="bounds of the pieces are a list"):
        td.packing.undo_context_parallel(pair, bounds.tolist())
    with pytest.raises(InvalidInputError, match="dim is 2"):
        td.packing.undo_context_parallel(pair, bounds, dim=2)
    with pytest.raises(InvalidInputError, match=r"parts\[1\] has the shape \(2, 6\)"):
        td.packing.undo_context_parallel([torch.ones(1, 6), torch.ones(2, 6)], bounds)
    for parts, says in (
        ([], "is empty"),
        (torch.ones(2, 6), "is a Tensor"),
        ([bounds, 3], r"\[1\] is an int"),
    ):
        with pytest.raises(TundishError, match=f"^parts ?{says}: give .*one tensor for each rank"):
            td.packing.undo_context_parallel(parts, bounds)  # type: ignore[arg-type]


def make_model(attention: str) -> Any:
    from support.packing.small_llama import small_llama

    model = small_llama(VOCABULARY, attention)
    model.loss_function = td.packing.weighted_loss
    return model


def whole_batch() -> dict[str, Any]:
    batch = make_batch([21, 4, 11, 2], 4, loss_weights="samples", pad_to=48)
    del batch["weight"]
    return batch


def train(rank: int, line: Line) -> None:
    """Loss, logits and a gradient of a context-parallel model, in which every rank gathers the keys and values."""
    from torch.distributed.nn.functional import all_gather
    from transformers import AttentionInterface

    whole = whole_batch()
    bounds = whole["cu_seq_lens_q"]
    tokens = whole["input_ids"].shape[1]
    place = torch.arange(tokens)
    piece = torch.bucketize(place, bounds[1:], right=True)
    seen = (piece[:, None] == piece) & (place[:, None] >= place)

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        keys, values = (
            td.packing.undo_context_parallel(all_gather(part.contiguous()), bounds, dim=2)
            for part in (key, value)
        )
        output = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=seen[options["place"][0]], scale=options["scaling"]
        )
        return output.transpose(1, 2), None

    AttentionInterface.register("gathered", attend)
    model = make_model("gathered")
    whole["place"] = place[None]
    part = td.packing.context_parallel(whole, rank, 2, columns=["place"])
    items = td.packing.num_items_in_batch([part])
    output = model(**part, num_items_in_batch=items)
    output.loss.backward()
    gradient = model.model.layers[0].self_attn.k_proj.weight.grad
    line.say(output.loss.item(), output.logits.detach().numpy(), gradient.numpy())
    line.hear()


def test_a_model_on_two_ranks_computes_what_it_computes_on_one(tmp_path: Path) -> None:
    whole = whole_batch()
    model = make_model("sdpa")
    output = model(**whole)
    output.loss.backward()
    expected = model.model.layers[0].self_attn.k_proj.weight.grad
    with Job(train, 2, tmp_path) as job:
        said = job.hear_all()
        job.tell_all()
        job.expect_end()
    losses, logits, gradients = zip(*said, strict=True)
    assert abs(sum(losses) - output.loss.item()) < 1e-5
    joined = td.packing.undo_context_parallel(
        [torch.from_numpy(part) for part in logits], whole["cu_seq_lens_q"]
    )
    torch.testing.assert_close(joined, output.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.from_numpy(sum(gradients)), expected, rtol=1e-4, atol=1e-5)
