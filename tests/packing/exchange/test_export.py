"""Exports, read back by the layout that each trainer documents."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest

import tundish as td
from tundish.errors import (
    AlreadyExistsError,
    InvalidInputError,
    InvalidTypeError,
    NotFoundError,
    PlanMismatchError,
)

DRAWS = np.random.default_rng(0)
LENGTHS = np.concatenate([DRAWS.integers(0, 30, 60), [1, 1, 40]])
# Every token of a sample says which sample it is of, and where it is in it.
SAMPLES = [[100 * sample + token for token in range(length)] for sample, length in enumerate(LENGTHS)]
WHOLE: dict[str, Any] = {"mode": "best_fit", "overlong": "split", "seed": 1}


def pieces_of(pack: td.Pack) -> list[td.Piece]:
    return [piece for piece in pack.pieces if piece.stop != piece.start]


# ---- XTuner: xtuner/v1/datasets/preset_pack.py, preset_sampler.py ----


def read_preset(folder: Path) -> Iterator[list[tuple[str, int, int, int]]]:
    """The slices of each pack: path, sample, first token, one past the last."""
    paths = json.loads((folder / "paths.json").read_text())
    boundaries = np.load(folder / "boundaries.npy", mmap_mode="r")
    rows = np.load(folder / "samples.npy", mmap_mode="r")
    assert boundaries.dtype == rows.dtype == np.int64
    assert boundaries[0] == 0 and boundaries[-1] == len(rows) and rows.shape[1] == 6
    for start, stop in pairwise(boundaries.tolist()):
        yield [
            (paths[path], sample, first, last)
            for path, sample, char_start, char_end, first, last in rows[start:stop].tolist()
            if char_start == char_end == -1 and last > first
        ]


@pytest.mark.parametrize(
    "options", [WHOLE, {"seed": 3}, {"drop_last": False}, {**WHOLE, "overlong": "truncate"}]
)
def test_a_preset_has_the_pieces_of_the_plan(options: dict[str, Any], tmp_path: Path) -> None:
    plan = td.pack(LENGTHS, 32, **options)
    td.packing.export(plan, tmp_path / "preset", "xtuner-preset", paths=["a.jsonl"])
    assert list(read_preset(tmp_path / "preset")) == [
        [("a.jsonl", *piece) for piece in pieces_of(pack)] for pack in plan
    ]
    assert np.load(tmp_path / "preset" / "order.npy").tolist() == list(range(len(plan)))
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "boundaries.npy",
        "order.npy",
        "paths.json",
        "preset",
        "samples.npy",
    ]


@pytest.mark.parametrize("global_pack", [False, True])
def test_a_preset_of_several_data_sets(global_pack: bool, tmp_path: Path) -> None:
    lengths = [LENGTHS[:20], LENGTHS[:0], LENGTHS[20:]]
    plan = td.pack_datasets(lengths, 48, mode="best_fit", global_pack=global_pack)
    order = [2, 0, 2]
    names = ["a", "empty", "b"]
    td.packing.export(plan, tmp_path / "preset", "xtuner-preset", paths=names, pack_order=order)
    found = list(read_preset(tmp_path / "preset"))
    assert len(found) == len(plan)
    for slices, pack in zip(found, plan, strict=True):
        assert len(slices) == len(pack.pieces)
        for (path, sample, first, last), piece in zip(slices, pack.pieces, strict=True):
            offset = {"a": 0, "b": 20}[path] if global_pack else 0
            assert names.index(path) == pack.dataset_id or global_pack
            assert (sample + offset, first, last) == piece
    assert np.load(tmp_path / "preset" / "order.npy").tolist() == order


# ---- Megatron-Core: megatron/core/datasets/gpt_dataset.py ----


def read_megatron(folder: Path, prefix: str = "") -> Iterator[list[int]]:
    """The tokens of each sequence, with the one more that `add_extra_token_to_sequence` reads."""
    documents, index, shuffle = (
        np.load(folder / f"{prefix}{name}_index.npy", mmap_mode="r")
        for name in ("document", "sample", "shuffle")
    )
    for sequence in shuffle.tolist():
        (first, start), (last, stop) = index[sequence].tolist(), index[sequence + 1].tolist()
        found: list[int] = []
        for place in range(first, last + 1):
            tokens = SAMPLES[documents[place]]
            found += tokens[start if place == first else 0 : stop + 1 if place == last else None]
        yield found


@pytest.mark.parametrize(
    ("options", "given"),
    [({}, {}), ({"seed": 5}, {}), ({"order": [*range(60, 5, -1)]}, {"order": [*range(60, 5, -1)]})],
)
def test_megatron_reads_the_packs(options: dict[str, Any], given: dict[str, Any], tmp_path: Path) -> None:
    plan = td.pack(LENGTHS, 32, **options)
    packs = td.PackedDataset(SAMPLES, plan)
    td.packing.export(plan, tmp_path / "indices", "megatron", prefix="ab12-GPTDataset-train-", **given)
    found = list(read_megatron(tmp_path / "indices", "ab12-GPTDataset-train-"))
    # Megatron needs a token after a sequence, so a last pack that ends the stream is none of its sequences.
    assert len(plan) - 1 <= len(found) <= len(plan)
    for number, tokens in enumerate(found):
        assert tokens[:-1] == packs[number]["input_ids"].tolist()
        assert len(tokens) == 33
    description = json.loads((tmp_path / "indices" / "ab12-GPTDataset-train-description.txt").read_text())
    assert description["sequences"] == len(found)


def test_megatron_takes_packs_in_another_order(tmp_path: Path) -> None:
    plan = td.pack(LENGTHS, 32)
    td.packing.export(plan, tmp_path / "indices", "megatron", pack_order=np.array([4, 1, 4]))
    packs = td.PackedDataset(SAMPLES, plan)
    assert [tokens[:-1] for tokens in read_megatron(tmp_path / "indices")] == [
        packs[number]["input_ids"].tolist() for number in (4, 1, 4)
    ]


# ---- Megatron-Bridge: megatron/bridge/data/packing/parquet.py, gpt_sft.py ----

MASKED: list[dict[str, Any]] = [
    {"input_ids": tokens, "completion_mask": [int(token % 3 > 0) for token in range(len(tokens))]}
    for tokens in SAMPLES
]


def test_nemo_learns_the_tokens_of_the_masks(tmp_path: Path) -> None:
    plan = td.pack(LENGTHS, 48, mode="best_fit", seed=1)
    td.packing.export(plan, tmp_path / "nemo", "nemo-parquet", samples=MASKED)
    (file,) = (tmp_path / "nemo").glob("*.parquet")
    assert file.name.endswith(".idx.parquet")
    rows = pq.read_table(file)
    assert {field.name: str(field.type) for field in rows.schema} == {
        "input_ids": "list<element: int32>",
        "seq_start_id": "list<element: int32>",
        "loss_mask": "list<element: int8>",
    }
    assert len(rows) == len(plan)
    learned: list[tuple[int, int]] = []
    inputs = []
    for row, pack in zip(rows.to_pylist(), plan, strict=True):
        bounds = [*row["seq_start_id"], len(row["input_ids"])]
        assert [stop - start for start, stop in pairwise(bounds)] == [piece.stop for piece in pack.pieces]
        assert len(row["loss_mask"]) == len(row["input_ids"])
        for start, stop in pairwise(bounds):
            # As `GPTSFTPackedDataset.collate_fn` makes inputs, labels and loss mask of a piece.
            tokens, labels = row["input_ids"][start : stop - 1], row["input_ids"][start + 1 : stop]
            mask = row["loss_mask"][start : stop - 1]
            learned += [pair for pair, one in zip(zip(tokens, labels, strict=True), mask, strict=True) if one]
        inputs.append(len(row["input_ids"]) - len(bounds) + 1)
    expected = [
        (row["input_ids"][token - 1], row["input_ids"][token])
        for row in MASKED
        for token in range(1, len(row["input_ids"]))
        if row["completion_mask"][token]
    ]
    assert sorted(learned) == sorted(expected)
    (packing,) = json.loads((tmp_path / "nemo" / "packing_metadata.json").read_text())
    assert packing["dataset_max_seqlen"] == LENGTHS.max() - 1
    assert packing["max_samples_per_bin"] == max(len(pack.pieces) for pack in plan)
    assert packing["min_packed_seqlen"] == min(inputs)
    assert packing["packing_efficiency"] == round(100 * sum(inputs) / len(plan) / 48, 2)


def test_many_packs_are_written_in_row_groups(tmp_path: Path) -> None:
    plan = td.pack(np.full(1203, 4), 4, mode="sequential")
    td.packing.export(plan, tmp_path / "nemo", "nemo-parquet", samples=[[7] * 4] * 1203)
    file = pq.ParquetFile(tmp_path / "nemo" / "packs.idx.parquet")
    assert [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)] == [
        500,
        500,
        203,
    ]


# ---- TRL: datasets.load_from_disk; TRL's collator reads it in tests/integrations/test_trl.py ----


@pytest.mark.parametrize("options", [WHOLE, {"seed": 3}])
def test_a_saved_dataset_has_the_packs(options: dict[str, Any], tmp_path: Path) -> None:
    plan = td.pack(LENGTHS, 32, **options)
    td.packing.export(plan, tmp_path / "trl", "trl", samples=MASKED)
    rows = datasets.load_from_disk(tmp_path / "trl")
    assert rows.column_names == ["input_ids", "labels", "seq_lengths"] and len(rows) == len(plan)
    for row, item in zip(rows, td.PackedDataset(MASKED, plan, mask_first_token=True), strict=True):
        assert row["input_ids"] == item["input_ids"].tolist()
        assert row["labels"] == item["labels"].tolist()
        assert row["seq_lengths"] == item["cu_seqlens"].diff().tolist()
    # It can be packed and counted as any other.
    assert td.packing.lengths(tmp_path / "trl").tolist() == [len(row["input_ids"]) for row in rows]


# ---- Refusals ----

HARD = td.pack(LENGTHS, 32)
REFUSED: list[tuple[Any, str, dict[str, Any], type[Exception], str]] = [
    ([1], "trl", {}, InvalidTypeError, "plan is a list: give a PackPlan"),
    (HARD, "npz", {}, InvalidInputError, "format is 'npz'; it must be one of 'xtuner-preset', 'trl'"),
    (HARD, "trl", {}, InvalidInputError, "format 'trl' needs samples=: the samples"),
    (HARD, "xtuner-preset", {}, InvalidInputError, "needs paths=: a path for each dataset"),
    (
        HARD,
        "megatron",
        {"samples": SAMPLES},
        InvalidInputError,
        "format 'megatron' takes no samples: leave it out; it is for 'trl', 'nemo-parquet'",
    ),
    (HARD, "xtuner-preset", {"paths": "a"}, InvalidTypeError, "paths is a str: give a list"),
    (HARD, "xtuner-preset", {"paths": [3]}, InvalidTypeError, "paths has an entry that is an int"),
    (
        HARD,
        "xtuner-preset",
        {"paths": ["a", "b"]},
        InvalidInputError,
        "paths has 2 entries, and the plan was made for 1",
    ),
    (
        HARD,
        "xtuner-preset",
        {"paths": ["a"], "pack_order": [0, 99]},
        InvalidInputError,
        "pack_order has 99 at position 1, and the plan has",
    ),
    (HARD, "megatron", {"prefix": "a/b"}, InvalidInputError, "prefix is 'a/b'"),
    (HARD, "megatron", {"prefix": 3}, InvalidTypeError, "prefix is an int"),
    (td.pack(LENGTHS, 48, **WHOLE), "megatron", {}, InvalidInputError, "this plan is of mode 'best_fit'"),
    (
        td.pack(LENGTHS, 32, order=[3, 2, 5, 1]),
        "megatron",
        {"order": [3, 5, 2, 1]},
        PlanMismatchError,
        "order",
    ),
    (
        td.pack_datasets([[4], [4]], 4),
        "xtuner-preset",
        {"paths": ["a", "a"]},
        InvalidInputError,
        "one path twice",
    ),
    (
        td.pack([3], 4, mode="sequential"),
        "trl",
        {"samples": [[1, 2, 2**31]]},
        InvalidInputError,
        "pack 0 holds the id",
    ),
    (
        td.pack([3], 4, mode="sequential"),
        "nemo-parquet",
        {"samples": [{"input_ids": [1, 2, 3], "labels": [-100, 2, 4]}]},
        InvalidInputError,
        "pack 0 has the label 4 at its token 2, which is 3",
    ),
]


@pytest.mark.parametrize(("plan", "target", "given", "error", "message"), REFUSED)
def test_refused(
    plan: Any, target: str, given: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        td.packing.export(plan, tmp_path / "out", target, **given)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_without_lengths_cannot_be_a_preset(tmp_path: Path) -> None:
    HARD.save(tmp_path / "plan")
    plan = td.PackPlan.load(tmp_path / "plan")
    with pytest.raises(InvalidInputError, match=r"attach the lengths with plan\.with_lengths"):
        td.packing.export(plan, tmp_path / "out", "xtuner-preset", paths=["a"])
    assert not (tmp_path / "out").exists()


def test_an_export_that_fails_leaves_nothing(tmp_path: Path) -> None:
    plan = td.pack(np.full(1203, 4), 4, mode="sequential")
    samples = [[7] * 4] * 1202 + [[7] * 3]
    for target in ("trl", "nemo-parquet"):
        with pytest.raises(PlanMismatchError, match="sample 1202 of dataset 0 has 3 tokens"):
            td.packing.export(plan, tmp_path / "out", target, samples=samples)
        assert list(tmp_path.iterdir()) == []


def test_existing_and_missing_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    with pytest.raises(AlreadyExistsError):
        td.packing.export(HARD, tmp_path / "out", "megatron")
    assert (tmp_path / "out" / "mine").read_text() == "kept"
    with pytest.raises(NotFoundError):
        td.packing.export(HARD, tmp_path / "nowhere" / "out", "megatron")
