"""Plans of whole samples: folders, caches, pickles, verification, plots and Megatron's index."""

from __future__ import annotations

import json
import pickle
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import tundish as td
from tundish.errors import InvalidInputError, NotFoundError, PlanFormatError, PlanMismatchError
from tundish.packing.inspection import plan_stats, plot

MODES = ["best_fit", "ordered", "sequential"]
OVERLONG = ["split", "truncate", "drop"]
FIELDS = ("dataset_id", "indices", "indices_cu_len", "start_offset", "end_offset", "longest")
PIECE_FIELDS = (*FIELDS, "piece_start", "piece_stop")
LENGTHS = np.random.default_rng(11).integers(0, 300, 2000)


def fields_of(overlong: str | None) -> tuple[str, ...]:
    return PIECE_FIELDS if overlong in ("split", "truncate") else FIELDS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    td.pack(LENGTHS, 128, mode="best_fit", overlong="split", seed=5, out=tmp_path / "plan")
    return tmp_path / "plan"


@pytest.mark.parametrize(
    ("mode", "overlong"), [("hard", None), *((mode, overlong) for mode in MODES for overlong in OVERLONG)]
)
def test_what_is_saved_is_loaded(mode: str, overlong: str | None, tmp_path: Path) -> None:
    plan = td.pack(LENGTHS, 128, mode=mode, overlong=overlong, seed=5)
    plan.save(tmp_path / "plan")
    plan.save(tmp_path / "plan")
    fields = fields_of(overlong)
    assert sorted(file.name for file in (tmp_path / "plan").iterdir()) == sorted(
        [f"{name}.npy" for name in fields] + ["plan.json"]
    )
    loaded = td.PackPlan.load(tmp_path / "plan", LENGTHS)
    assert loaded.path == tmp_path / "plan"
    written = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert written.pop("checksum") and list(written.pop("checksums")) == sorted(fields)
    assert written == loaded.metadata == plan.metadata
    assert list(loaded.arrays()) == list(fields)
    for name in fields:
        column = np.load(tmp_path / "plan" / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        assert column.dtype == np.int32
        assert np.array_equal(column, getattr(plan, name))
        assert not getattr(loaded, name).flags.writeable
    assert list(loaded) == list(plan)
    assert loaded.stats() == plan.stats()
    assert loaded.nbytes == sum(getattr(plan, name).nbytes for name in fields)
    loaded.verify()
    for sent in (plan, loaded):
        again = pickle.loads(pickle.dumps(sent))
        assert list(again) == list(plan)
        assert again.lookup([0, 1]).start.tolist() == plan.lookup([0, 1]).start.tolist()


def test_a_pickled_plan_whose_folder_was_replaced_is_refused(folder: Path) -> None:
    sent = pickle.dumps(td.PackPlan.load(folder))
    shutil.rmtree(folder)
    td.pack(LENGTHS, 128, mode="sequential", overlong="split", out=folder)
    with pytest.raises(PlanMismatchError, match="holds another plan now"):
        pickle.loads(sent)


@pytest.mark.parametrize(
    ("mode", "overlong"), [("hard", None), *(("ordered", overlong) for overlong in OVERLONG)]
)
def test_without_lengths_the_stops_are_those_that_the_columns_hold(
    mode: str, overlong: str | None, tmp_path: Path
) -> None:
    plan = td.pack(LENGTHS, 128, mode=mode, overlong=overlong, out=tmp_path / "plan")
    loaded = td.PackPlan.load(tmp_path / "plan")
    assert plan.has_lengths and not loaded.has_lengths
    for open_pack, full_pack in zip(loaded, plan, strict=True):
        if fields_of(overlong) == PIECE_FIELDS:
            assert open_pack == full_pack
            continue
        *inner, last = open_pack.pieces
        assert all(piece.stop is None for piece in inner)
        assert last == full_pack.pieces[-1]
        assert [piece[:2] for piece in open_pack.pieces] == [piece[:2] for piece in full_pack.pieces]


@pytest.mark.parametrize("name", ["piece_start", "piece_stop"])
def test_a_damaged_or_missing_column_of_pieces_is_named(folder: Path, name: str) -> None:
    file = folder / f"{name}.npy"
    column = np.load(file)
    for damaged in (column[:-1], column.astype(np.float32), column.astype(np.int16)):
        np.save(file, damaged)
        with pytest.raises(PlanFormatError) as caught:
            td.PackPlan.load(folder)
        assert str(file) in str(caught.value)
    file.unlink()
    with pytest.raises(NotFoundError) as missing:
        td.PackPlan.load(folder)
    assert missing.value.filename == str(file)


def test_there_is_no_sample_index_of_whole_samples() -> None:
    with pytest.raises(InvalidInputError, match=r"mode 'best_fit' .* plan\.lookup, or pack with mode='hard'"):
        td.pack([5, 3], 8, mode="best_fit").sample_index()


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("overlong", OVERLONG)
@pytest.mark.parametrize("slice_packs", [3, 1 << 16])
def test_a_plot_counts_the_pieces(
    overlong: str, attached: bool, slice_packs: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plan_stats, "PACKS_AT_ONCE", slice_packs)
    plan = td.pack(LENGTHS, 128, mode="ordered", overlong=overlong, out=tmp_path / "plan")
    drawn = plan if attached else td.PackPlan.load(tmp_path / "plan")
    counts = plot.count(drawn)
    expected = Counter(len(pack.pieces) for pack in plan)
    assert {number: int(count) for number, count in enumerate(counts.pieces) if count} == expected
    if attached:
        held = {sample for pack in plan for sample, start, _ in pack.pieces if start == 0}
        fitting = [int(LENGTHS[sample]) for sample in held if LENGTHS[sample] <= 128]
        assert (counts.lengths.sum(), counts.tokens.sum()) == (len(fitting), sum(fitting))
        assert (
            counts.longer == len(held) - len(fitting) == (0 if overlong == "drop" else (LENGTHS > 128).sum())
        )
    else:
        assert (counts.lengths.sum(), counts.longer) == (len(plan), 0)
