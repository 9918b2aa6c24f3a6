"""`multiple_of`: against the plan without it, of which packs are left out or repeated."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.packing.multiple import select
from support.packing.plans import assert_written_alike, changed

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError

MODES = ["hard", "best_fit", "ordered", "sequential"]


class Case(NamedTuple):
    """The plan without `multiple_of`, and with it."""

    streams: list[list[int]]
    full: td.PackPlan
    plan: td.PackPlan
    order: list[int] | None


@st.composite
def cases(draw: Any) -> Case:
    mode = draw(st.sampled_from(MODES))
    max_length = 2 * draw(st.integers(1, 8))
    arguments: dict[str, Any] = {"mode": mode, "threads": draw(st.sampled_from([1, 2]))}
    if mode == "hard":
        arguments["drop_last"] = draw(st.booleans())
    else:
        arguments["overlong"] = draw(st.sampled_from(["split", "truncate", "drop"]))
        arguments["max_samples"] = draw(st.none() | st.integers(1, 4))
        arguments["align"] = draw(st.sampled_from([1, 2]))
    keeps = arguments.get("drop_last") is False
    more = {
        "multiple_of": draw(st.integers(1, 9)),
        "remainder": "repeat" if keeps else draw(st.sampled_from([None, "drop", "repeat"])),
    }
    datasets = draw(
        st.lists(st.lists(st.integers(0, 3) | st.integers(0, 40), max_size=20), min_size=1, max_size=3)
    )
    if len(datasets) == 1 and draw(st.booleans()):
        order = draw(st.permutations(range(len(datasets[0]))))[: draw(st.integers(0, 20))]
        arguments["order"] = order
        full = td.pack(datasets[0], max_length, **arguments)
        assume(more["remainder"] == "repeat" or may_drop([len(full)], more["multiple_of"]))
        return Case(datasets, full, td.pack(datasets[0], max_length, **arguments, **more), order)
    arguments["seed"] = draw(st.none() | st.integers(0, 9))
    arguments["global_pack"] = draw(st.booleans())
    streams = [list(chain.from_iterable(datasets))] if arguments["global_pack"] else datasets
    full = td.pack_datasets(datasets, max_length, **arguments)
    packs = np.bincount(full.dataset_id, minlength=1).tolist()
    assume(more["remainder"] == "repeat" or may_drop(packs, more["multiple_of"]))
    return Case(streams, full, td.pack_datasets(datasets, max_length, **arguments, **more), None)


def may_drop(packs: list[int], multiple_of: int) -> bool:
    """Whether every dataset that has packs keeps one."""
    return sum(packs) % multiple_of <= sum(max(0, count - 1) for count in packs)


def tokens_of(pack: td.packing.Pack, align: int = 1) -> int:
    sizes = [piece.stop - piece.start for piece in pack.pieces if piece.stop is not None]
    assert len(sizes) == len(pack.pieces)
    return sum(-(-size // align) * align for size in sizes)


@given(cases())
def test_packs_are_left_out_or_repeated(case: Case) -> None:
    _, full, plan, order = case
    assert plan.multiple_of and len(plan) % plan.multiple_of == 0
    kept, left_out, repeated = select(list(full), plan.multiple_of, plan.remainder)
    assert list(plan) == kept + repeated
    plan.verify(order=order)
    stats, before, ledger = plan.stats(), full.stats(), plan.ledger()
    assert (stats["packs_dropped"], stats["packs_repeated"]) == (len(left_out), len(repeated))
    assert stats["tokens"] == before["tokens"]
    assert stats["tokens_packed"] == sum(map(tokens_of, kept)) == ledger["packed"]
    assert stats["tokens_repeated"] == sum(map(tokens_of, repeated)) == ledger["repeated"]
    assert stats["tokens_dropped"] == before["tokens_dropped"] + sum(map(tokens_of, left_out))
    assert stats["tokens_dropped"] == ledger["dropped"] + ledger["truncated"]
    assert stats["padding"] == len(plan) * plan.max_length - sum(map(tokens_of, kept + repeated))
    assert ledger["capacity"] == ledger["packed"] + ledger["repeated"] + ledger["padding"]
    aligned = sum(tokens_of(pack, plan.align) - tokens_of(pack) for pack in plan)
    assert stats["padding_align"] == aligned
    check_samples(case, kept, stats)


def check_samples(case: Case, kept: list[td.packing.Pack], stats: dict[str, int | float]) -> None:
    taken: dict[tuple[int, int], list[int]] = {}
    for pack in kept:
        for sample, start, stop in pack.pieces:
            assert stop is not None
            taken.setdefault((pack.dataset_id, sample), []).append(stop - start)
    assert stats["samples"] == len(taken)
    cut = sum(
        len(sizes) > 1 or sum(sizes) < case.streams[dataset][sample]
        for (dataset, sample), sizes in taken.items()
    )
    assert stats["samples_cut"] == cut


LENGTHS = np.random.default_rng(4).integers(0, 300, 3000)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("remainder", ["drop", "repeat"])
def test_folders_hold_the_same_plan(mode: str, remainder: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"mode": mode, "multiple_of": 64, "remainder": remainder, "seed": 1}
    if mode != "hard":
        options["overlong"] = "split"
    loaded = assert_written_alike(td.pack(LENGTHS, 128, **options), tmp_path, LENGTHS, **options)
    assert (loaded.multiple_of, loaded.remainder) == (64, remainder)
    loaded.plot(tmp_path / "plan.svg")
    assert "repeated" in (tmp_path / "plan.svg").read_text() or remainder == "drop"


def test_fingerprints_tell_multiples_apart() -> None:
    options: list[dict[str, Any]] = [
        {},
        {"multiple_of": 2},
        {"multiple_of": 3},
        {"multiple_of": 3, "remainder": "repeat"},
    ]
    assert len({td.pack([5] * 9, 8, **choice).fingerprint for choice in options}) == 4
    same = td.pack([5] * 9, 8, multiple_of=3, remainder="drop")
    assert same.fingerprint == td.pack([5] * 9, 8, multiple_of=3).fingerprint


@pytest.mark.parametrize("remainder", ["drop", "repeat"])
@pytest.mark.parametrize("mode", MODES)
def test_a_dataset_reads_the_packs_without_lengths(mode: str, remainder: str) -> None:
    lengths = [5, 3, 7, 2, 6, 1, 7]
    samples = [[number] * length for number, length in enumerate(lengths)]
    # Repeated packs are the first ones twice, the short last one among them.
    own: dict[str, Any] = {"drop_last": False} if mode == "hard" and remainder == "repeat" else {}
    plan = td.pack(
        lengths, 8, mode=mode, multiple_of=2 if remainder == "drop" else 9, remainder=remainder, **own
    )
    dataset = td.PackedDataset(samples, changed(plan))
    assert len(dataset) == len(plan) > 0
    for number, pack in enumerate(plan):
        expected = [piece.sample for piece in pack.pieces for _ in range(piece.start, piece.stop or 0)]
        assert dataset[number]["input_ids"].tolist() == expected


def test_packs_of_the_largest_dataset_are_left_out_and_never_all_of_one() -> None:
    plan = td.pack_datasets([[8] * 5, [8] * 100], 8, multiple_of=16)
    assert np.bincount(plan.dataset_id).tolist() == [5, 91]
    assert plan.indices[5:].tolist() == list(range(91))
    plan = td.pack_datasets([[8] * 3, [8] * 4], 8, multiple_of=6)
    assert np.bincount(plan.dataset_id).tolist() == [3, 3]
    for lengths in ([[8], [8, 8]], [[8, 8]]):
        with pytest.raises(InvalidInputError, match=r"all packs of a dataset.*remainder='repeat'"):
            td.pack_datasets(lengths, 8, multiple_of=5)
    assert len(td.pack([], 8, multiple_of=5)) == 0


def test_sample_index_takes_the_packs_that_are_left_out_as_the_tail() -> None:
    plan = td.pack([5, 3, 9, 7], 8, multiple_of=2)
    assert plan.sample_index().tolist() == [[0, 0], [2, 0], [2, 8]]


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"multiple_of": 0}, InvalidInputError, "multiple_of is 0"),
        ({"multiple_of": 2**20 + 1}, InvalidInputError, "multiple_of is 1048577"),
        ({"multiple_of": 2.0}, InvalidTypeError, "multiple_of must be an integer"),
        ({"remainder": "drop"}, InvalidInputError, "there is no multiple_of"),
        ({"multiple_of": 2, "remainder": "pad"}, InvalidInputError, "remainder is 'pad'; .*'repeat'"),
        ({"multiple_of": 2, "remainder": 1}, InvalidTypeError, "remainder must be one of"),
        ({"multiple_of": 2, "drop_last": False}, InvalidInputError, "remainder='repeat', or leave drop_last"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        td.pack([5, 3, 8], 8, **arguments)
    with pytest.raises(error, match=says):
        td.pack_datasets([[5, 3], [8]], 8, **arguments)
