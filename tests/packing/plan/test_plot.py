"""`plan.plot`: what it counts, against a count by hand, and how it writes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import tundish as td
from tundish.errors import InvalidInputError, MissingExtraError, NotFoundError, StorageError
from tundish.packing import plan_stats, plot

PNG = b"\x89PNG\r\n\x1a\n"


def plan_of(lengths: np.ndarray, max_length: int, **options: object) -> td.PackPlan:
    return td.pack(lengths, max_length, **options)  # type: ignore[arg-type]


def counted_by_hand(plan: td.PackPlan, lengths: np.ndarray) -> dict[str, object]:
    packs_of_sample: Counter[int] = Counter()
    for pack in plan:
        packs_of_sample.update(piece.sample for piece in pack.pieces)
    return {
        "pieces": Counter(len(pack.pieces) for pack in plan),
        "samples": len(packs_of_sample),
        "tokens": sum(int(lengths[sample]) for sample in packs_of_sample),
        "padded": sum(-(-int(lengths[sample]) // plan.max_length) for sample in packs_of_sample)
        * plan.max_length,
        "empty": sum(int(lengths[sample]) == 0 for sample in packs_of_sample),
    }


def as_counter(histogram: np.ndarray) -> Counter[int]:
    return Counter({value: int(count) for value, count in enumerate(histogram) if count})


@pytest.mark.parametrize("max_length", [1, 7, 64, 1000])
@pytest.mark.parametrize("slice_packs", [1, 3, 1 << 16])
def test_counts_are_those_of_a_count_by_hand(
    max_length: int, slice_packs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_stats, "PACKS_AT_ONCE", slice_packs)
    monkeypatch.setattr(plan_stats, "PIECES_AT_ONCE", 5)
    generator = np.random.default_rng(3)
    lengths = generator.integers(0, 150, 120)
    lengths[::7] = 0
    # No tokens are left over, so that every sample is whole in the plan.
    lengths[-1] += -lengths.sum() % max_length
    plan = plan_of(lengths, max_length, seed=5)
    by_hand = counted_by_hand(plan, lengths)
    counts = plot.count(plan)
    assert as_counter(counts.pieces) == by_hand["pieces"]
    assert counts.lengths.sum() == by_hand["samples"]
    assert counts.lengths[0] == by_hand["empty"]
    assert counts.tokens == by_hand["tokens"]
    assert counts.padded == by_hand["padded"]


def test_lengths_fall_into_their_bins() -> None:
    lengths = np.array([1, 1, 2, 3, 4, 1023, 1024, 1025, 0])
    counts = plot.count(plan_of(lengths, int(lengths.sum())))
    bins = np.flatnonzero(counts.lengths).tolist()
    edges = [0.0 if b == 0 else 2.0 ** ((b - 1) / plot.BINS_A_DOUBLING) for b in bins]
    # 0 after the last token belongs to no pack; 1024 and 1025 share a bin, 1023 does not.
    assert sum(counts.lengths) == 8
    assert 1.0 in edges
    assert 2.0 in edges
    assert 4.0 in edges
    assert 1024.0 in edges
    assert counts.lengths[bins[edges.index(1024.0)]] == 2
    assert counts.lengths[bins[edges.index(1.0)]] == 2


@pytest.mark.parametrize(
    "lengths",
    [[5, 3, 9, 2], [1], [0, 0, 0], [], [10**6], [3] * 5000],
    ids=["few", "no pack", "all empty", "no samples", "one long", "many short"],
)
@pytest.mark.parametrize("max_length", [4, 4096])
def test_every_plan_has_a_picture(lengths: list[int], max_length: int, tmp_path: Path) -> None:
    plan = plan_of(np.array(lengths, dtype=np.int64), max_length, drop_last=max_length == 4)
    plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(PNG)
    assert os.listdir(tmp_path) == ["plan.png"]


def test_a_plan_without_lengths_has_a_picture(tmp_path: Path) -> None:
    td.pack(np.full(50, 30), 64, out=tmp_path / "plan")
    plan = td.PackPlan.load(tmp_path / "plan")
    assert not plan.has_lengths
    plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(PNG)


def test_several_datasets_are_counted_apart(tmp_path: Path) -> None:
    # The first dataset's tail is dropped in the middle of a sample, which the second one does not go on with.
    plan = td.pack_datasets([np.array([6, 12]), np.array([12, 4])], 8)
    counts = plot.count(plan)
    assert (counts.lengths.sum(), counts.tokens) == (4, 6 + 10 + 12 + 4)
    plan.plot(tmp_path / "plan.svg")
    assert "50.0 % of the samples are cut" in (tmp_path / "plan.svg").read_text()


@pytest.mark.parametrize("overlong", ["error", "split", "truncate", "drop"])
@pytest.mark.parametrize("lengths", [[5, 3, 9, 2, 0], []], ids=["few", "none"])
def test_every_plan_of_whole_samples_has_a_picture(overlong: str, lengths: list[int], tmp_path: Path) -> None:
    plan = td.pack(lengths, 16 if overlong == "error" else 8, mode="best_fit", overlong=overlong)
    plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(("suffix", "start"), [(".png", PNG), (".pdf", b"%PDF"), (".svg", b"<?xml")])
def test_the_name_says_the_kind_of_picture(suffix: str, start: bytes, tmp_path: Path) -> None:
    target = tmp_path / f"plan{suffix}"
    plan_of(np.arange(100), 64).plot(target)
    assert target.read_bytes().startswith(start)


def test_a_picture_is_replaced_and_keeps_to_the_umask(tmp_path: Path) -> None:
    target = tmp_path / "plan.png"
    target.write_bytes(b"old")
    before = os.umask(0o027)
    try:
        plan_of(np.arange(100), 64).plot(target)
    finally:
        os.umask(before)
    assert target.read_bytes().startswith(PNG)
    assert target.stat().st_mode & 0o777 == 0o640


def test_what_a_killed_writer_left_goes_with_the_next_picture(tmp_path: Path) -> None:
    leftover = tmp_path / ".plan.png.00000000000000aa.incomplete"
    leftover.mkdir()
    leftover.chmod(0o1700)  # as writers mark it
    (leftover / "file").write_bytes(PNG)
    (tmp_path / ".mine.png.incomplete").write_bytes(b"keep")
    plan_of(np.arange(100), 64).plot(tmp_path / "plan.png")
    assert sorted(os.listdir(tmp_path)) == [".mine.png.incomplete", "plan.png"]


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    plan = plan_of(np.arange(100), 64)
    with pytest.raises(InvalidInputError, match=r"plan\.jpeg.*\.png"):
        plan.plot(tmp_path / "plan.jpeg")
    with pytest.raises(NotFoundError, match="nowhere"):
        plan.plot(tmp_path / "nowhere" / "plan.png")
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(StorageError, match=r"taken\.png"):
        plan.plot(tmp_path / "taken.png")
    assert os.listdir(tmp_path) == ["taken.png"]


def test_the_users_own_figures_and_settings_stay_as_they_are(tmp_path: Path) -> None:
    import matplotlib as mpl

    settings = dict(mpl.rcParams)
    plan_of(np.arange(100), 64).plot(tmp_path / "plan.png")
    assert dict(mpl.rcParams) == settings
    # pyplot would choose a backend, and with it maybe open a display.
    code = (
        "import sys, numpy, tundish; tundish.pack(numpy.arange(100), 64).plot(sys.argv[1]);"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "other.png")], check=True)


def test_without_matplotlib_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'tundish\[plot\]'"):
        plan_of(np.arange(100), 64).plot(tmp_path / "plan.png")
    assert not list(tmp_path.iterdir())
