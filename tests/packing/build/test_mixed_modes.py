"""A mode for each dataset: the plan is those of the datasets alone, one after the other."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.packing.multiple import select
from support.packing.plans import assert_changed_entries_are_found, assert_written_alike, changed

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError, PlanMismatchError

MODES = ["hard", "best_fit", "ordered", "sequential"]
# Options by the modes that have them.
WHOLE = ("overlong", "max_samples", "align", "max_cost")


class Case(NamedTuple):
    """What is packed, and how it is asked for."""

    lengths: list[list[int]]
    modes: list[str]
    max_length: int
    options: dict[str, Any]
    costs: list[list[int] | None] | None

    def alone(self) -> list[td.PackPlan]:
        """The plan of each dataset."""
        plans = []
        for number, (lengths, mode) in enumerate(zip(self.lengths, self.modes, strict=True)):
            own = {"seed": self.options["seed"]}
            if mode == "hard":
                own["drop_last"] = self.options["drop_last"]
            else:
                own |= {name: self.options[name] for name in WHOLE}
                if self.costs is not None:
                    own["costs"] = self.costs[number]
            if mode == "ordered":
                own["window"] = self.options["window"]
            plans.append(td.pack(lengths, self.max_length, mode=mode, **own))
        return plans

    def pack(self, **more: Any) -> td.PackPlan:
        options = {**self.options, "costs": self.costs, **more}
        if "hard" not in self.modes:
            options["drop_last"] = None
        if "ordered" not in self.modes:
            options["window"] = None
        return td.pack_datasets(self.lengths, self.max_length, mode=self.modes, **options)


@st.composite
def cases(draw: Any) -> Case:
    modes = draw(
        st.lists(st.sampled_from(MODES), min_size=2, max_size=4).filter(lambda modes: len(set(modes)) > 1)
    )
    lengths = [draw(st.lists(st.integers(0, 3) | st.integers(0, 40), max_size=20)) for _ in range(len(modes))]
    costs = None
    overlong = ["truncate", "drop"]
    if draw(st.booleans()):
        costs = [
            None if mode == "hard" else [length % 5 for length in column]
            for mode, column in zip(modes, lengths, strict=True)
        ]
    else:
        overlong.append("split")
    options = {
        "seed": draw(st.none() | st.integers(0, 9)),
        "drop_last": draw(st.booleans()),
        "window": draw(st.none() | st.integers(1, 4)),
        "overlong": draw(st.sampled_from(overlong)),
        "max_samples": draw(st.none() | st.integers(1, 4)),
        "align": draw(st.sampled_from([1, 2])),
        "max_cost": 6 if costs else None,
    }
    return Case(lengths, modes, 2 * draw(st.integers(1, 8)), options, costs)


SUMS = (
    "packs",
    "pieces",
    "samples",
    "samples_cut",
    "samples_empty",
    "samples_overlong",
    "tokens",
    "tokens_packed",
)


def numbered(plans: list[td.PackPlan]) -> list[td.packing.Pack]:
    return [td.packing.Pack(number, pack.pieces) for number, plan in enumerate(plans) for pack in plan]


@settings(max_examples=200, deadline=None)
@given(cases())
def test_is_the_plans_of_the_datasets(case: Case) -> None:
    plans, plan = case.alone(), case.pack()
    assert (plan.mode, plan.modes) == ("mixed", tuple(case.modes))
    assert list(plan) == numbered(plans)
    assert plan.longest.tolist() == [longest for alone in plans for longest in alone.longest.tolist()]
    plan.verify(costs=case.costs)
    stats, alone = plan.stats(), [other.stats() for other in plans]
    for name in (*SUMS, "tokens_dropped", "padding", "padding_align"):
        assert stats[name] == sum(other[name] for other in alone), name
    ledgers = [other.ledger() for other in plans]
    for name, count in plan.ledger().items():
        assert count == sum(ledger[name] for ledger in ledgers), name


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(1, 7), st.sampled_from(["drop", "repeat"]))
def test_packs_are_left_out_of_all_datasets_together(case: Case, of: int, remainder: str) -> None:
    case.options["drop_last"] = remainder == "drop"
    plan, full = case.pack(multiple_of=of, remainder=remainder), case.pack()

    def taken(pack: td.packing.Pack) -> int:
        align = 1 if case.modes[pack.dataset_id] == "hard" else full.align
        return sum(
            -(-(piece.stop - piece.start) // align) * align for piece in pack.pieces if piece.stop is not None
        )

    kept, left_out, repeated = select(list(full), of, remainder, taken)
    assert list(plan) == kept + repeated
    plan.verify(costs=case.costs)
    ledger, stats = plan.ledger(), plan.stats()
    assert ledger["packed"] == stats["tokens_packed"]
    assert (stats["packs_dropped"], stats["packs_repeated"]) == (len(left_out), len(repeated))
    taken = {(pack.dataset_id, piece.sample) for pack in plan for piece in pack.pieces}
    assert stats["samples"] == len(taken)


RANDOM = np.random.default_rng(2)
LENGTHS = [RANDOM.integers(0, 300, 1000), RANDOM.integers(0, 128, 1000), RANDOM.integers(0, 90, 500)]


@pytest.mark.parametrize("overlong", ["split", "drop"])
def test_folders_hold_the_same_plan(overlong: str, tmp_path: Path) -> None:
    modes = ["hard", "best_fit", "ordered"]
    options: dict[str, Any] = {"mode": modes, "overlong": overlong, "seed": 1, "window": 5}
    plan = td.pack_datasets(LENGTHS, 128, **options, threads=1)
    loaded = assert_written_alike(plan, tmp_path, LENGTHS, **options, threads=3)
    assert list(pickle.loads(pickle.dumps(loaded))) == list(plan)
    assert (loaded.overlong, loaded.window, loaded.drop_last) == (overlong, 5, True)
    loaded.plot(tmp_path / "plan.png")


@pytest.mark.parametrize("has_lengths", [True, False])
@pytest.mark.parametrize("overlong", ["split", "drop"])
def test_a_dataset_reads_the_packs(overlong: str, has_lengths: bool) -> None:
    lengths = [[5, 3, 20, 0, 7], [4, 9, 2, 11]]
    plan = td.pack_datasets(lengths, 8, mode=["hard", "best_fit"], overlong=overlong)
    samples = [
        [[10 * number + i for i in range(length)] for number, length in enumerate(column)]
        for column in lengths
    ]
    if not has_lengths:
        plan = changed(plan)
    dataset = td.PackedDataset(samples, plan)
    for number, pack in enumerate(plan.with_lengths(lengths)):
        expected = [
            token
            for piece in pack.pieces
            for token in samples[pack.dataset_id][piece.sample][piece.start : piece.stop]
        ]
        assert dataset[number]["input_ids"].tolist() == expected


def test_equal_modes_are_one_mode() -> None:
    for mode in MODES:
        one = td.pack_datasets([[5, 3], [8]], 8, mode=mode, seed=3)
        assert td.pack_datasets([[5, 3], [8]], 8, mode=[mode, mode], seed=3).fingerprint == one.fingerprint
    fingerprints = {
        td.pack_datasets([[5, 3], [8]], 8, mode=[first, second]).fingerprint
        for first in MODES
        for second in MODES
    }
    assert len(fingerprints) == len(MODES) ** 2
    assert len(td.pack_datasets([], 8, mode=[])) == 0


def test_any_changed_fact_is_found() -> None:
    lengths = [column[:30] // 8 for column in LENGTHS]
    plan = td.pack_datasets(lengths, 16, mode=["hard", "sequential", "best_fit"], overlong="split", align=2)
    assert_changed_entries_are_found(plan, lengths)
    for number, part in enumerate(plan.metadata["parts"]):
        for name, value in part.items():
            if isinstance(value, int):
                parts = [dict(other) for other in plan.metadata["parts"]]
                parts[number][name] = value + 1
                with pytest.raises(PlanMismatchError):
                    changed(plan, parts=parts).verify(lengths)
    for parts in (plan.metadata["parts"][:2], plan.metadata["parts"][::-1]):
        with pytest.raises(PlanMismatchError):
            changed(plan, parts=parts).verify(lengths)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"mode": ["hard"]}, InvalidInputError, "mode has 1 entries for 2 datasets"),
        ({"mode": ["hard", "best"]}, InvalidInputError, r"mode\[1\] is 'best'"),
        ({"mode": ["hard", 1]}, InvalidTypeError, r"mode\[1\] must be one of"),
        ({"mode": ["hard", "best_fit"], "global_pack": True}, InvalidInputError, "global_pack=True makes"),
        ({"mode": ["hard", "best_fit"], "window": 3}, InvalidInputError, "takes no window"),
        ({"mode": ["ordered", "best_fit"], "drop_last": True}, InvalidInputError, "takes no drop_last"),
        ({"mode": ["hard", "hard"], "overlong": "drop"}, InvalidInputError, "takes no overlong"),
        (
            {"mode": ["hard", "best_fit"], "costs": [[1, 1], [1]], "max_cost": 1},
            InvalidInputError,
            r"costs\[0\] is for mode 'hard': give None",
        ),
        (
            {"mode": ["hard", "best_fit"], "costs": [None, None], "max_cost": 1},
            InvalidInputError,
            r"costs\[1\] is for mode 'best_fit'",
        ),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        td.pack_datasets([[5, 3], [8]], 8, **arguments)


def test_overlong_samples_are_refused_where_samples_are_whole() -> None:
    with pytest.raises(InvalidInputError, match="sample 0 of dataset 1"):
        td.pack_datasets([[50], [20]], 8, mode=["hard", "best_fit"])
    assert len(td.pack_datasets([[50], [8]], 8, mode=["hard", "best_fit"])) == 7


def test_pack_takes_one_mode() -> None:
    with pytest.raises(InvalidTypeError, match="mode must be one of"):
        td.pack([5], 8, mode=["hard"])  # type: ignore[arg-type]
