"""Retention, against a second implementation that judges one checkpoint at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tundish.checkpoint.retention import Retention
from tundish.checkpoint.root import Checkpoint
from tundish.errors import InvalidInputError


def checkpoint(step: int, tag: str | None = None) -> Checkpoint:
    return Checkpoint(kind="hf", step=step, path=Path(f"hf-{step}"), tag=tag, size=1, files=1)


counts = st.none() | st.integers(1, 4)
published = st.dictionaries(st.integers(0, 60), st.sampled_from([None, None, "snapshot", "best"])).map(
    lambda steps: [checkpoint(step, tag) for step, tag in sorted(steps.items())]
)


@given(published, counts, counts, st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60)), counts)
def test_surplus_checkpoints_are_those_that_no_rule_keeps(
    there: list[Checkpoint],
    keep_last: int | None,
    keep_every: int | None,
    protected: set[int],
    chosen: set[int],
    snapshots: int | None,
) -> None:
    retention = Retention(
        keep_last=keep_last,
        keep_every=keep_every,
        keep=lambda checkpoint: checkpoint.step in chosen,
        keep_tagged={} if snapshots is None else {"snapshot": snapshots},
    )
    surplus = retention.surplus(there, protected)

    def is_kept(one: Checkpoint) -> bool:
        newer = [other for other in there if other.step > one.step]
        if not newer or one.step in protected:
            return True
        newer_alike = sum(other.tag == one.tag for other in newer)
        if one.tag == "snapshot":
            return snapshots is None or newer_alike < snapshots or one.step in chosen
        if one.tag is not None:
            return True
        every = keep_every is not None and one.step % keep_every == 0
        return keep_last is None or newer_alike < keep_last or every or one.step in chosen

    assert surplus == [one.step for one in there if not is_kept(one)]


def test_a_checkpoint_that_keep_protects_stays_though_it_is_newer() -> None:
    def keep(checkpoint: Checkpoint) -> bool:
        protected.add(checkpoint.step + 1)
        return False

    protected: set[int] = set()
    retention = Retention(keep_last=1, keep=keep)
    assert retention.surplus([checkpoint(step) for step in (1, 3, 4, 6, 9)], protected) == [1, 3, 6]


@pytest.mark.parametrize("argument", ["keep_last", "keep_every"])
@pytest.mark.parametrize("count", [0, -1, 1.5, True, "3"])
def test_counts_that_are_none_are_refused(argument: str, count: object) -> None:
    with pytest.raises(InvalidInputError, match=argument):
        Retention(**{argument: count})  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="best"):
        Retention(keep_tagged={"best": count})  # type: ignore[dict-item]


def test_keep_is_asked_of_tagged_ones_too() -> None:
    there = [checkpoint(step, "best") for step in (1, 2, 3, 4)]
    retention = Retention(keep_last=1, keep_every=2, keep_tagged={"best": 1}, keep=lambda one: one.step == 3)
    assert retention.surplus(there) == [1, 2]
