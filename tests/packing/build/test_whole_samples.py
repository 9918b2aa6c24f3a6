"""Packing of whole samples against its definition, one sample after the other."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.packing.plans import columns_of
from support.packing.whole_plan import (
    Options,
    Part,
    best_fit_packs,
    expected_columns,
    packed_in_order,
    parts_of,
)

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError

MODES = ["best_fit", "ordered", "sequential"]
OVERLONG = ["error", "split", "truncate", "drop"]


class Case(NamedTuple):
    """What is packed: the lengths and the order of each stream, and how it is asked for."""

    streams: list[list[int]]
    orders: list[list[int]]
    options: Options
    plan: td.PackPlan


@st.composite
def cases(draw: Any) -> Case:
    mode = draw(st.sampled_from(MODES))
    align = draw(st.sampled_from([1, 1, 2, 3, 8]))
    max_length = align * draw(st.integers(1, 20))
    options = Options(
        max_length,
        overlong=draw(st.sampled_from(OVERLONG)),
        window=draw(st.none() | st.integers(1, 5)) if mode == "ordered" else None,
        max_samples=draw(st.none() | st.integers(1, 4)),
        align=align,
    )
    longest = max_length if options.overlong == "error" else 3 * max_length + 2
    length = st.integers(0, min(4, longest)) | st.integers(0, longest)
    datasets = draw(st.lists(st.lists(length, max_size=30), min_size=1, max_size=3))
    seed = draw(st.none() | st.integers(0, 2**32 - 1))
    arguments = {
        "mode": mode,
        "overlong": options.overlong,
        "window": options.window,
        "max_samples": options.max_samples,
        "align": align,
        "threads": draw(st.sampled_from([1, 3])),
    }
    if len(datasets) == 1 and draw(st.booleans()):
        order = draw(st.permutations(range(len(datasets[0]))))
        order = order[: draw(st.integers(0, len(order)))]
        return Case(datasets, [order], options, td.pack(datasets[0], max_length, order=order, **arguments))
    global_pack = draw(st.booleans())
    streams = [list(chain.from_iterable(datasets))] if global_pack else datasets
    orders = [np.arange(len(stream)) for stream in streams]
    if seed is not None:
        random = np.random.RandomState(seed)
        for order in orders:
            random.shuffle(order)
    plan = td.pack_datasets(datasets, max_length, seed=seed, global_pack=global_pack, **arguments)
    return Case(streams, [order.tolist() for order in orders], options, plan)


def packs_of(plan: td.PackPlan, streams: int) -> list[list[list[Part]]]:
    """The packs of each stream, as the plan's look-ups give them."""
    found: list[list[list[Part]]] = [[] for _ in range(streams)]
    for pack in plan:
        found[pack.dataset_id].append([Part(*piece) for piece in pack.pieces])
    return found


@given(cases())
def test_agrees_with_the_definition(case: Case) -> None:
    streams, orders, options, plan = case
    expected = [parts_of(lengths, order, options) for lengths, order in zip(streams, orders, strict=True)]
    found = packs_of(plan, len(streams))
    for parts, packs in zip(expected, found, strict=True):
        assert sorted(chain.from_iterable(packs)) == sorted(parts)
        assert all(sum(map(options.taken, pack)) <= options.max_length for pack in packs)
        assert all(1 <= len(pack) <= options.most for pack in packs)
    assert columns_of(plan) == expected_columns(found, options.overlong in ("split", "truncate"))
    if plan.mode != "best_fit":
        window = 1 if plan.mode == "sequential" else options.window or 64
        assert found == [packed_in_order(parts, options, window) for parts in expected]
    else:
        assert len(plan) == sum(best_fit_packs(parts, options) for parts in expected)
    plan.verify(order=orders[0] if plan.metadata["order"] == "given" else None)
    check_stats(case, list(chain.from_iterable(expected)))


def check_stats(case: Case, parts: list[Part]) -> None:
    streams, orders, options, plan = case
    lengths = [stream[sample] for stream, order in zip(streams, orders, strict=True) for sample in order]
    packed = sum(part.tokens for part in parts)
    overlong = sum(length > options.max_length for length in lengths)
    empty = lengths.count(0)
    stats = plan.stats()
    assert (stats["packs"], stats["pieces"]) == (len(plan), len(parts))
    assert stats["samples"] == len(lengths) - empty - (overlong if options.overlong == "drop" else 0)
    assert stats["samples_cut"] == (overlong if options.overlong in ("split", "truncate") else 0)
    assert (stats["samples_empty"], stats["samples_overlong"]) == (empty, overlong)
    assert (stats["tokens"], stats["tokens_packed"]) == (sum(lengths), packed)
    assert stats["tokens_dropped"] == sum(lengths) - packed
    assert stats["padding"] == len(plan) * options.max_length - packed
    assert stats["padding_align"] == sum(map(options.taken, parts)) - packed
    assert stats["fill"] == (packed / (len(plan) * options.max_length) if len(plan) else 1.0)
    assert stats["longest"] == max((part.tokens for part in parts), default=0)
    assert stats["max_pieces_per_pack"] == max((len(pack.pieces) for pack in plan), default=0)


@pytest.mark.parametrize("mode", MODES)
def test_the_attributes_say_how_it_was_packed(mode: str) -> None:
    plan = td.pack([5, 3, 20], 8, mode=mode, overlong="truncate", max_samples=3, align=4)
    windows = {"best_fit": None, "ordered": 64, "sequential": None}
    assert (plan.mode, plan.window, plan.overlong) == (mode, windows[mode], "truncate")
    assert (plan.max_samples, plan.align, plan.drop_last) == (3, 4, None)
    assert plan.piece_start is not None and plan.piece_stop is not None
    hard = td.pack([5, 3, 20], 8)
    assert (hard.overlong, hard.window, hard.max_samples, hard.align, hard.drop_last) == (
        None,
        None,
        None,
        1,
        True,
    )
    assert hard.piece_start is None and "whole" not in hard.metadata
    assert f"packs of up to 8 tokens, {len(plan.indices)} pieces, mode='{mode}'" in repr(plan)


LENGTHS = np.random.default_rng(5).lognormal(5, 1, 20_000).astype(np.int32) + 1


def test_ordered_moves_no_sample_further_than_the_window() -> None:
    plan = td.pack(LENGTHS, 4096, mode="ordered", window=8, overlong="split")
    cu = np.concatenate([[0], plan.indices_cu_len])
    pack_of_piece = np.repeat(np.arange(len(plan)), np.diff(cu))
    last = np.full(len(LENGTHS), -1)
    np.maximum.at(last, plan.indices, pack_of_piece)
    # A sample that lies behind one of an earlier pack was placed while that pack was open.
    assert (np.maximum.accumulate(last) - last < 8).all()
    assert plan.stats()["fill"] > td.pack(LENGTHS, 4096, mode="sequential", overlong="split").stats()["fill"]


def contents(plan: td.PackPlan) -> Counter[tuple[int, ...]]:
    """The tokens of the pieces of each pack, in no order."""
    return Counter(
        tuple(sorted(piece.stop - piece.start for piece in pack.pieces if piece.stop is not None))
        for pack in plan
    )


def test_a_seed_changes_which_samples_come_together_and_nothing_else() -> None:
    plans = [
        td.pack(LENGTHS[:2000], 1024, mode="best_fit", overlong="split", seed=seed) for seed in (None, 0, 7)
    ]
    assert contents(plans[0]) == contents(plans[1]) == contents(plans[2])
    orders = {tuple(plan.indices.tolist()) for plan in plans}
    assert len(orders) == 3
    again = td.pack(LENGTHS[:2000], 1024, mode="best_fit", overlong="split", seed=7, threads=1)
    assert columns_of(again) == columns_of(plans[2])


def test_best_fit_takes_samples_of_one_length_in_the_order() -> None:
    pairs = [[0, 1], [2, 3], [4, 5], [6, 7]]
    plan = td.pack([4] * 8, 8, mode="best_fit")
    assert sorted([piece.sample for piece in pack.pieces] for pack in plan) == pairs
    backwards = td.pack([4] * 8, 8, mode="best_fit", order=range(7, -1, -1))
    assert sorted([piece.sample for piece in pack.pieces][::-1] for pack in backwards) == pairs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("overlong", ["split", "drop"])
def test_any_dtype_and_any_number_of_threads_give_the_same_files(
    mode: str, overlong: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"mode": mode, "overlong": overlong, "seed": 1, "align": 4}
    td.pack(LENGTHS, 2048, threads=1, **options).save(tmp_path / "saved")
    for number, lengths in enumerate((LENGTHS.astype(np.int64), LENGTHS.astype(np.uint16), LENGTHS.tolist())):
        td.pack(lengths, 2048, threads=1 + number, out=tmp_path / f"{number}", **options)
        names = sorted(file.name for file in (tmp_path / "saved").iterdir())
        assert len(names) == (9 if overlong == "split" else 7)
        for name in names:
            written = (tmp_path / f"{number}" / name).read_bytes()
            assert written == (tmp_path / "saved" / name).read_bytes(), (number, name)


def test_fingerprints_tell_options_apart() -> None:
    different: list[dict[str, Any]] = [
        *({"mode": mode} for mode in ("hard", *MODES)),
        {"mode": "ordered", "window": 63},
        {"mode": "best_fit", "seed": 0},
        {"mode": "best_fit", "overlong": "drop"},
        {"mode": "best_fit", "overlong": "split"},
        {"mode": "best_fit", "overlong": "truncate"},
        {"mode": "best_fit", "align": 2},
        {"mode": "best_fit", "max_samples": 2},
    ]
    plans = [td.pack([5, 3, 8, 2], 8, **options) for options in different]
    assert len({plan.fingerprint for plan in plans}) == len(plans)
    # A default that is written out changes nothing.
    same = td.pack([5, 3, 8, 2], 8, mode="ordered", window=64, overlong="error", max_samples=None, align=1)
    assert same.fingerprint == plans[2].fingerprint


@pytest.mark.parametrize("mode", MODES)
def test_overlong_samples_are_refused_with_what_to_do(mode: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError) as caught:
        td.pack_datasets([[5, 9], [3, 20, 4]], 8, mode=mode, out=tmp_path / "plan")
    text = str(caught.value)
    for said in ("2 samples", "max_length", "sample 1 of dataset 1", "20", "split", "truncate", "drop"):
        assert said in text, text
    assert list(tmp_path.iterdir()) == []
    # Samples that the order leaves out are not packed, however long.
    assert len(td.pack([5, 9], 8, mode=mode, order=[0])) == 1


@pytest.mark.parametrize("lengths", [[], [0, 0], [20]])
@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_pack_is_the_empty_plan(mode: str, lengths: list[int], tmp_path: Path) -> None:
    plan = td.pack(lengths, 8, mode=mode, overlong="drop", out=tmp_path / "plan")
    assert (len(plan), list(plan), plan.stats()["fill"]) == (0, [], 1.0)
    plan.verify()


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"overlong": "split"}, InvalidInputError, "'hard' takes no overlong: .* mode='best_fit'"),
        ({"overlong": "error"}, InvalidInputError, "'hard' takes no overlong"),
        ({"max_samples": 2}, InvalidInputError, "'hard' takes no max_samples"),
        ({"align": 2}, InvalidInputError, "'hard' takes no align"),
        ({"window": 2}, InvalidInputError, "'hard' takes no window: .* mode='ordered'"),
        ({"mode": "best_fit", "window": 64}, InvalidInputError, "'best_fit' takes no window"),
        ({"mode": "sequential", "window": 1}, InvalidInputError, "'sequential' takes no window"),
        ({"mode": "best_fit", "drop_last": True}, InvalidInputError, "'best_fit' takes no drop_last"),
        ({"mode": "ordered", "drop_last": False}, InvalidInputError, "'ordered' takes no drop_last"),
        ({"mode": "ordered", "drop_last": 0}, InvalidTypeError, "drop_last must be True or False, not 0"),
        ({"mode": "ordered", "window": 0}, InvalidInputError, "window is 0; it must be in 1 … 65536"),
        ({"mode": "ordered", "window": 2**16 + 1}, InvalidInputError, "window is 65537"),
        ({"mode": "ordered", "window": 2.0}, InvalidTypeError, "window must be an integer"),
        ({"mode": "ordered", "window": True}, InvalidTypeError, "window must be an integer"),
        ({"mode": "best_fit", "overlong": "cut"}, InvalidInputError, "overlong is 'cut'; .* 'truncate'"),
        ({"mode": "best_fit", "overlong": True}, InvalidTypeError, "overlong must be one of .*, not True"),
        ({"mode": "best_fit", "max_samples": 0}, InvalidInputError, "max_samples is 0"),
        ({"mode": "best_fit", "max_samples": "2"}, InvalidTypeError, "max_samples"),
        ({"mode": "best_fit", "align": 0}, InvalidInputError, "align is 0"),
        ({"mode": "best_fit", "align": None}, InvalidTypeError, "align"),
        ({"mode": "best_fit", "align": 3}, InvalidInputError, "no multiple of align=3: choose 6 or 9"),
        ({"mode": "best_fit", "align": 16}, InvalidInputError, "no multiple of align=16: choose 16, or"),
        (
            {"mode": "best_fit", "max_length": 2**28 + 1},
            InvalidInputError,
            r"max_length is 268435457; in mode 'best_fit' it must be in 1 … 268435456 .* or mode='hard'",
        ),
        (
            {"mode": "ordered", "max_length": 2**26, "window": 33},
            InvalidInputError,
            r"window is 33 and max_length is 67108864; .* below 2\^31 .* take a smaller window",
        ),
        ({"mode": "best-fit"}, InvalidInputError, "mode is 'best-fit'; it must be one of 'hard', 'best_fit'"),
        ({"mode": "best_fit", "order": [0, 0]}, InvalidInputError, r"order\[1\] names sample 0 again"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        td.pack([5, 3, 8], **{"max_length": 8, **arguments})
    if "order" not in arguments:
        with pytest.raises(error, match=says):
            td.pack_datasets([[5, 3], [8]], **{"max_length": 8, **arguments})
