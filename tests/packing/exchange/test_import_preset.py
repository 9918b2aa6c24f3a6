"""Presets of XTuner, as other tools write them, become plans."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError, NotFoundError, PlanFormatError

LENGTHS = {"a.jsonl": [5, 9, 2], "b.jsonl": [7]}
DATASETS = [
    [list(range(10 * sample, 10 * sample + length)) for sample, length in enumerate(lengths, first)]
    for first, lengths in ((0, LENGTHS["a.jsonl"]), (5, LENGTHS["b.jsonl"]))
]
# Parts, a sample twice, pieces of two datasets, and a pack of one piece.
PACKS = [
    [("b.jsonl", 0, 2, 7), ("a.jsonl", 1, 0, 4)],
    [("a.jsonl", 2, 0, 2)],
    [("a.jsonl", 2, 0, 2), ("a.jsonl", 1, 3, 9)],
]


def write(folder: Path, packs: list[list[tuple[str, int, int, int]]], paths: list[str] | None = None) -> Path:
    """A preset, by its documented layout."""
    paths = ["b.jsonl", "a.jsonl"] if paths is None else paths
    folder.mkdir()
    rows = [
        (paths.index(path), sample, -1, -1, start, stop)
        for pack in packs
        for path, sample, start, stop in pack
    ]
    np.save(folder / "boundaries.npy", np.cumsum([0, *map(len, packs)]))
    np.save(folder / "samples.npy", np.array(rows, dtype=np.int64).reshape(-1, 6))
    (folder / "paths.json").write_text(json.dumps(paths))
    return folder


def tokens_of(pack: list[tuple[str, int, int, int]]) -> list[int]:
    return [
        token
        for path, sample, start, stop in pack
        for token in DATASETS[list(LENGTHS).index(path)][sample][start:stop]
    ]


def test_packs_are_those_of_the_preset(tmp_path: Path) -> None:
    plan = td.packing.import_preset(write(tmp_path / "preset", PACKS), LENGTHS)
    assert (plan.mode, plan.max_length, plan.global_pack, plan.num_samples) == ("preset", 9, True, (1, 3))
    for given in (plan, pickle.loads(pickle.dumps(plan)), plan.with_lengths([[7], [5, 9, 2]])):
        # In the order of paths.json.
        items = td.PackedDataset([DATASETS[1], DATASETS[0]], given)
        assert [item["input_ids"].tolist() for item in items] == list(map(tokens_of, PACKS))
        assert [item["max_seqlen"] for item in items] == [5, 2, 6]
    assert [len(batch) for batch in td.PackedBatchSampler(plan, 2, rank=0, world_size=1)] == [2, 2]
    stats, ledger = plan.stats(), plan.ledger()
    assert (stats["packs"], stats["pieces"], stats["samples"], stats["samples_cut"]) == (3, 5, 3, 2)
    assert (ledger["packed"], ledger["cut"], ledger["padding"]) == (19, 15, 8)
    plan.plot(tmp_path / "plan.svg")


def test_packs_in_the_order_of_the_sampler(tmp_path: Path) -> None:
    folder = write(tmp_path / "preset", PACKS)
    order = [2, 0, 2]
    np.save(folder / "order.npy", order)
    for given in (order, folder / "order.npy"):
        plan = td.packing.import_preset(folder, LENGTHS, 12, pack_order=given)
        items = td.PackedDataset([DATASETS[1], DATASETS[0]], plan)
        assert plan.max_length == 12
        assert [item["input_ids"].tolist() for item in items] == [tokens_of(PACKS[pack]) for pack in order]


@pytest.mark.parametrize("global_pack", [False, True])
@pytest.mark.parametrize("options", [{"mode": "hard", "seed": 2}, {"mode": "best_fit", "overlong": "split"}])
def test_an_export_is_imported_again(options: dict[str, Any], global_pack: bool, tmp_path: Path) -> None:
    draws = np.random.default_rng(1)
    lengths = [draws.integers(0, 50, 90), draws.integers(0, 20, 70)]
    samples = [[draws.integers(0, 1000, length) for length in column] for column in lengths]
    plan = td.pack_datasets(lengths, 32, global_pack=global_pack, **options)
    td.packing.export(plan, tmp_path / "preset", "xtuner-preset", paths=["a", "b"])
    again = td.packing.import_preset(tmp_path / "preset", {"b": lengths[1], "a": lengths[0]}, 32)
    for item, other in zip(td.PackedDataset(samples, plan), td.PackedDataset(samples, again), strict=True):
        assert item["input_ids"].equal(other["input_ids"]) and item["cu_seqlens"].equal(other["cu_seqlens"])
    td.packing.export(again, tmp_path / "again", "xtuner-preset", paths=["a", "b"])
    for name in ("boundaries.npy", "samples.npy", "paths.json", "order.npy"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "preset" / name).read_bytes()


def test_an_imported_plan_is_neither_saved_nor_verified(tmp_path: Path) -> None:
    plan = td.packing.import_preset(write(tmp_path / "preset", PACKS), LENGTHS)
    with pytest.raises(InvalidInputError, match="keep the folder that it was imported from"):
        plan.save(tmp_path / "plan")
    with pytest.raises(InvalidInputError, match="no mode to compute its packs again"):
        plan.verify()
    assert not (tmp_path / "plan").exists()


def test_a_preset_without_packs(tmp_path: Path) -> None:
    plan = td.packing.import_preset(write(tmp_path / "preset", []), LENGTHS)
    assert len(plan) == 0 and plan.stats()["fill"] == 1.0


def spoil_rows(column: int, value: int) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        rows = np.load(folder / "samples.npy")
        rows[3, column] = value
        np.save(folder / "samples.npy", rows)

    return spoil


def save(name: str, value: Any) -> Callable[[Path], None]:
    return lambda folder: np.save(folder / name, value)


DAMAGED: list[tuple[Callable[[Path], Any], type[Exception], str]] = [
    (lambda folder: (folder / "paths.json").unlink(), NotFoundError, "paths.json: is missing"),
    (lambda folder: (folder / "paths.json").write_text("{"), PlanFormatError, "paths.json: is no JSON"),
    (
        lambda folder: (folder / "paths.json").write_text("[1]"),
        PlanFormatError,
        "paths.json: is no list of paths",
    ),
    (lambda folder: (folder / "samples.npy").unlink(), NotFoundError, "samples.npy: is missing"),
    (lambda folder: (folder / "samples.npy").write_bytes(b"x"), PlanFormatError, "samples.npy: is damaged"),
    (
        save("samples.npy", np.zeros((5, 4), int)),
        PlanFormatError,
        "samples.npy: has 4 columns, and a preset has 6",
    ),
    (save("samples.npy", np.zeros((5, 6))), PlanFormatError, "samples.npy: holds float64 of shape (5, 6)"),
    (
        save("boundaries.npy", np.array([0, 2, 3, 4])),
        PlanFormatError,
        "boundaries.npy: does not go from 0 to 5",
    ),
    (save("boundaries.npy", np.array([0, 2, 2, 5])), PlanFormatError, "boundaries.npy: pack 1 has no pieces"),
    (spoil_rows(0, 2), InvalidInputError, "row 3 is of dataset 2, and paths.json has 2"),
    (spoil_rows(1, 3), InvalidInputError, "row 3 is of sample 3 of 'a.jsonl', which has 3"),
    (spoil_rows(1, -1), InvalidInputError, "row 3 is of sample -1"),
    (spoil_rows(2, 0), InvalidInputError, "row 3 is of characters 0 to -1: XTuner cuts such long texts"),
    (
        spoil_rows(4, 2),
        InvalidInputError,
        "row 3 takes the tokens 2 to 2 of sample 2 of 'a.jsonl', which has 2",
    ),
    (
        spoil_rows(5, 3),
        InvalidInputError,
        "row 3 takes the tokens 0 to 3 of sample 2 of 'a.jsonl', which has 2",
    ),
]


@pytest.mark.parametrize(("spoil", "error", "message"), DAMAGED)
def test_a_damaged_preset_is_refused(
    spoil: Callable[[Path], Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "preset", PACKS)
    spoil(folder)
    with pytest.raises(error, match=re.escape(message)):
        td.packing.import_preset(folder, LENGTHS)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"lengths": {"a.jsonl": [5, 9, 2]}}, InvalidInputError, "lengths has none for 'b.jsonl'"),
        ({"lengths": [[7]]}, InvalidInputError, "lengths has 1 entries, and the preset is of 2 datasets"),
        ({"lengths": 3}, InvalidTypeError, "lengths is an int"),
        ({"max_length": 8}, InvalidInputError, "pack 0 holds 9 tokens, more than max_length=8"),
        (
            {"pack_order": [0, 3]},
            InvalidInputError,
            "pack_order has 3 at position 1, and the preset has 3 packs",
        ),
        ({"pack_order": "nowhere.npy"}, NotFoundError, "nowhere.npy: is missing"),
    ],
)
def test_arguments_are_checked(
    given: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "preset", PACKS)
    with pytest.raises(error, match=re.escape(message)):
        td.packing.import_preset(folder, **{"lengths": LENGTHS, **given})
