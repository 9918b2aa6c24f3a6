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
from tundish.packing.inspection import plan_stats, plot

PNG = b"\x89PNG\r\n\x1a\n"


def plan_of(lengths: np.ndarray, max_length: int, **options: object) -> td.PackPlan:
    return td.pack(lengths, max_length, **options)  # type: ignore[arg-type]


def counted_by_hand(plan: td.PackPlan, lengths: np.ndarray) -> dict[str, object]:
    samples = {piece.sample for pack in plan for piece in pack.pieces}
    held = [int(lengths[sample]) for sample in samples if lengths[sample]]
    return {
        "pieces": Counter(len(pack.pieces) for pack in plan),
        "fitting": sum(length <= plan.max_length for length in held),
        "longer": sum(length > plan.max_length for length in held),
        "longest": max(held),
        "tokens": sum(length for length in held if length <= plan.max_length),
        "cut_off": sum(max(0, length - plan.max_length) for length in held),
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
    found = {"fitting": counts.lengths.sum(), "tokens": counts.tokens.sum()} | {
        name: getattr(counts, name) for name in ("longer", "longest", "cut_off")
    }
    assert found | {"pieces": as_counter(counts.pieces)} == by_hand


def test_lengths_fall_into_their_bins() -> None:
    lengths = np.array([1, 1, 2, 3, 4, 1023, 1024, 1025, 0, 5000])
    counts = plot.count(plan_of(lengths, 1025))
    bins = np.flatnonzero(counts.lengths).tolist()
    starts = [round(counts.edges[place], 3) for place in bins]
    assert starts[:4] == [1.0, 2.0, 2.954, 4.0]
    # The pack length is in the last bin, and nothing is beyond it.
    assert counts.edges[-1] == 1025 and bins[-1] == len(counts.lengths) - 1
    assert counts.lengths[bins[-1]] == 2 and counts.longer == 1


@pytest.mark.parametrize("max_length", [1, 2, 3, 4096, 5000])
def test_no_bar_is_beyond_the_pack_length(max_length: int) -> None:
    """Pieces of exactly a pack would fall into a bin that begins there."""
    plan = td.pack([max_length] * 40 + [1], max_length, mode="best_fit")
    counts = plot.count(plan)
    assert counts.edges[-1] == max_length and counts.lengths.sum() == 41 and counts.longer == 0
    assert counts.lengths[-1] >= 40


def bars_of(plan: td.PackPlan) -> tuple[list[float], str]:
    """Where the bars of the lengths end, and what the axis says."""
    from matplotlib.figure import Figure
    from matplotlib.patches import StepPatch

    figure = Figure()
    plot._draw(figure, plan, plot.count(plan))
    axes = figure.axes[0]
    ends = [float(patch.get_data().edges[-1]) for patch in axes.patches if isinstance(patch, StepPatch)]
    return ends, axes.get_xlabel()


def test_the_axis_says_what_it_leaves_out() -> None:
    ends, said = bars_of(td.pack([100] * 30 + [700, 5000], 512))
    assert ends == [512.0, 512.0]
    assert said == "tokens, cut at the pack length: 2 are longer, up to 5,000"
    assert bars_of(td.pack([100] * 30, 512)) == ([512.0], "tokens")
    # All of them are longer.
    assert bars_of(td.pack([700, 5000], 512))[0] == [512.0, 512.0]


def test_an_axis_that_ends_before_the_fullest_pack_says_so() -> None:
    from matplotlib.figure import Figure

    lengths = np.concatenate([np.full(5000, 500), np.full(500, 1)])
    plan = td.pack(lengths, 500, mode="sequential")
    figure = Figure()
    plot._draw(figure, plan, plot.count(plan))
    assert figure.axes[1].get_xlabel() == "pieces, cut at 2: 1 pack has more, up to 500"


@pytest.mark.parametrize("longest", [16, 100, 2000])
@pytest.mark.parametrize("samples", [1, 5, 4000])
def test_padding_is_that_of_random_batches_of_eight(longest: int, samples: int) -> None:
    random = np.random.default_rng(1)
    lengths = random.integers(1, longest + 1, samples)
    plan = td.pack(lengths, 512, mode="best_fit", overlong="truncate")
    counts = plot.count(plan)
    cut = np.minimum(lengths, 512)
    batches = np.array([random.choice(cut, min(8, samples)) for _ in range(20_000)])
    expected = (batches.max(1).mean() - cut.mean()) * samples
    assert counts.padding() == pytest.approx(expected, rel=0.05, abs=0.05 * samples)


def test_the_colors_have_a_legend_and_the_shares_enough_digits(tmp_path: Path) -> None:
    lengths = [10_000] * 9 + [9_999]
    plan = td.pack(lengths, 10_000, mode="best_fit")
    plan.plot(tmp_path / "plan.svg")
    drawn = (tmp_path / "plan.svg").read_text()
    for said in ("<!-- tokens -->", "<!-- padding -->", "<!-- samples -->", "padded: random batches of 8"):
        assert said in drawn, said
    plan.save(tmp_path / "plan")
    td.PackPlan.load(tmp_path / "plan").plot(tmp_path / "bare.svg")
    bare = (tmp_path / "bare.svg").read_text()
    assert "Longest piece of each pack" in bare and "padded: " not in bare and "Length of samples" not in bare
    # With lengths, the same folder has those of the samples.
    td.PackPlan.load(tmp_path / "plan", lengths).plot(tmp_path / "full.svg")
    assert "Length of samples" in (tmp_path / "full.svg").read_text()


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
    assert (counts.lengths.sum(), counts.longer, counts.tokens.sum(), counts.longest) == (2, 2, 6 + 4, 12)
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
