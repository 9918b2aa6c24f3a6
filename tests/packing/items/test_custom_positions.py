"""`PackedDataset(positions=...)`: Qwen2-VL on packs against its pieces apart, and positions that are refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from support.packing.samples import make_nested
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError

IMAGE = 50


def make_model() -> Qwen2VLForConditionalGeneration:
    torch.manual_seed(0)
    text = {
        "vocab_size": 60,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    }
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 2}
    special = {
        "image_token_id": IMAGE,
        "video_token_id": 51,
        "vision_start_token_id": 52,
        "vision_end_token_id": 53,
    }
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **special))


def make_rows() -> list[dict[str, Any]]:
    """Samples with no, one and two images, which begin and end with text."""
    draws = np.random.default_rng(0)
    rows = []
    for grids in ([(1, 4, 6)], [], [(1, 2, 2), (1, 6, 4)], [], [(1, 8, 2)]):
        tokens = draws.integers(0, IMAGE, 4).tolist()
        for time, height, width in grids:
            tokens += [IMAGE] * (time * height * width // 4) + draws.integers(0, IMAGE, 3).tolist()
        patches = sum(time * height * width for time, height, width in grids)
        pixels = torch.from_numpy(draws.standard_normal((patches, 24), dtype=np.float32))
        ids = np.array(tokens)
        rows.append(
            {
                "input_ids": ids,
                "mm_token_type_ids": (ids == IMAGE).astype(np.int64),
                "pixel_values": pixels if grids else None,
                "image_grid_thw": torch.tensor(grids) if grids else None,
            }
        )
    return rows


@pytest.mark.parametrize("align", [1, 8])
def test_the_loss_of_packs_with_images_is_that_of_the_pieces_apart(align: int) -> None:
    rows, model = make_rows(), make_model()
    lengths = [len(row["input_ids"]) for row in rows]
    plan = td.pack(lengths, 32, mode="sequential", align=align)
    assert 1 < len(plan) < len(rows)

    def positions(piece: dict[str, Any]) -> torch.Tensor:
        assert set(piece) == set(rows[0])
        found, _ = model.model.get_rope_index(
            piece["input_ids"][None], piece["mm_token_type_ids"][None], image_grid_thw=piece["image_grid_thw"]
        )
        return found[:, 0]

    carried: Any = {
        "columns": {"mm_token_type_ids": 0},
        "sample_columns": ["pixel_values", "image_grid_thw"],
    }
    items = list(td.PackedDataset(rows, plan, positions=positions, **carried))
    total, learned = torch.zeros(()), 0
    for row in rows:
        tokens = torch.from_numpy(row["input_ids"])
        alone = {key: row[key] for key in ("pixel_values", "image_grid_thw")}
        kinds = torch.from_numpy(row["mm_token_type_ids"])[None]
        # Alone, the model computes its own positions.
        output = model(input_ids=tokens[None], mm_token_type_ids=kinds, use_cache=False, **alone)
        total = total + torch.nn.functional.cross_entropy(output.logits[0, :-1], tokens[1:], reduction="sum")
        learned += len(tokens) - 1
    apart = total.item() / learned
    for options in ({}, {"pad_to": 128}):
        batch = td.PackedCollator(**options)(items)
        assert batch["position_ids"].shape == (4, 1, batch["input_ids"].shape[1])
        assert abs(model(**batch).loss.item() - apart) < 1e-5
    # Positions that count tokens give another loss.
    plain = td.PackedCollator()(list(td.PackedDataset(rows, plan, **carried)))
    assert abs(model(**plain).loss.item() - apart) > 1e-3


def make_dataset(positions: Any, align: int = 1) -> td.PackedDataset:
    return td.PackedDataset(
        [[1, 2, 3], [4], [5, 6, 7, 8]],
        td.pack([3, 1, 4], 12, mode="sequential", align=align),
        positions=positions,
    )


def doubled(piece: dict[str, Any]) -> Any:
    tokens = len(piece["input_ids"])
    return np.stack([np.arange(tokens, dtype=np.int32) * 2, piece["input_ids"].numpy()])


def test_rows_stand_under_the_positions_of_the_text() -> None:
    item = make_dataset(doubled)[0]
    expected = [[0, 1, 2, 0, 0, 1, 2, 3], [0, 2, 4, 0, 0, 2, 4, 6], [1, 2, 3, 4, 5, 6, 7, 8]]
    assert item["position_ids"].tolist() == expected
    assert item["position_ids"].dtype == torch.int64
    batch = td.PackedCollator(pad_to=10)([item])
    paddings = ([0, 1], [0, 1], [1, 2])
    assert batch["position_ids"].tolist() == [
        [[*row, *padding]] for row, padding in zip(expected, paddings, strict=True)
    ]


def test_transformers_finds_the_bounds_of_padding_wherever_positions_begin() -> None:
    """Models whose positions begin at 2, such as RoBERTa's kind, tell pieces by the least position."""
    from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

    for first in (0, 1, 2, 7):
        item = make_dataset(lambda piece: first + np.arange(len(piece["input_ids"])))[0]  # noqa: B023 (called at once)
        batch = td.PackedCollator(pad_to=10, return_flash_attn_kwargs=True)([item])
        (found, _), _ = prepare_fa_kwargs_from_position_ids(batch["position_ids"])
        assert found.tolist() == batch["cu_seq_lens_q"].tolist() == [0, 3, 4, 8, 10]


def test_the_padding_of_a_piece_continues_its_positions() -> None:
    item = make_dataset(doubled, align=4)[0]
    assert item["position_ids"].tolist() == [
        [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3],
        [0, 2, 4, 5, 0, 1, 2, 3, 0, 2, 4, 6],
        [1, 2, 3, 4, 4, 5, 6, 7, 5, 6, 7, 8],
    ]


def test_one_row_replaces_the_positions() -> None:
    item = make_dataset(lambda piece: [5 + place for place in range(len(piece["input_ids"]))])[0]
    assert item["position_ids"].tolist() == [5, 6, 7, 5, 5, 6, 7, 8]
    assert td.PackedCollator()([item])["position_ids"].shape == (1, 8)


def test_pieces_of_a_sample_that_is_cut_are_called_apart() -> None:
    called = []

    def positions(piece: dict[str, Any]) -> Any:
        called.append(piece["input_ids"].tolist())
        return torch.arange(len(called[-1]))

    dataset = td.PackedDataset(
        [[1, 2, 3, 4, 5], [6, 7]], td.pack([5, 2], 4, drop_last=False), positions=positions
    )
    for item in dataset:
        own = called[-(len(item["cu_seqlens"]) - 1) :]
        bounds = item["cu_seqlens"].tolist()
        assert own == [item["input_ids"][start:stop].tolist() for start, stop in pairwise(bounds)]
    assert called == [[1, 2, 3, 4], [5], [6, 7]]


NESTED = make_nested()


@pytest.mark.parametrize(
    ("given", "kind", "says"),
    [
        ([0, 1], InvalidInputError, r"shape \(2,\) for a piece of sample 0 of dataset 0 with 3 tokens: give \(3,\)"),
        (torch.zeros(3, 1, 3).long(), InvalidInputError, r"shape \(3, 1, 3\)"),
        (torch.zeros(0, 3).long(), InvalidInputError, r"shape \(0, 3\)"),
        (torch.zeros(3), InvalidTypeError, "a Tensor of dtype float32 for sample 0 of dataset 0: positions are"),
        (None, InvalidTypeError, "positions gave None of dtype object for sample 0"),
        (np.array([0, 1, 2**63], np.uint64), InvalidInputError, "9223372036854775808 for sample 0 .*: .* int64"),
        (NESTED, InvalidTypeError, "positions gave a Tensor for sample 0"),
        ([[0, 1, 2], [0]], InvalidTypeError, "positions gave a list for sample 0 of dataset 0"),
    ],
)  # fmt: skip
def test_wrong_positions_are_named(given: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        make_dataset(lambda piece: given)[0]


def test_rows_that_change_are_refused() -> None:
    def positions(piece: dict[str, Any]) -> Any:
        tokens = len(piece["input_ids"])
        return np.zeros((tokens, tokens), int)

    with pytest.raises(
        InvalidInputError, match=r"\(1, 1\) for sample 1 of dataset 0, and \(3, 3\) for a piece"
    ):
        make_dataset(positions)[0]
    items = [make_dataset(doubled)[0], make_dataset(None)[0]]
    with pytest.raises(
        InvalidInputError, match=r"item 1 of the batch has position_ids of shape \(8,\), .* \(3,\)"
    ):
        td.PackedCollator()(items)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match="positions is a list: give a function"):
        make_dataset([0, 1, 2])


def test_an_error_of_the_function_names_the_sample() -> None:
    def positions(piece: dict[str, Any]) -> Any:
        raise KeyError("image_grid_thw")

    with pytest.raises(KeyError, match="image_grid_thw") as caught:
        make_dataset(positions)[0]
    assert caught.value.__notes__ == ["raised by positions for a piece of sample 0 of dataset 0"]
