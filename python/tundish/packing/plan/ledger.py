"""Accounts for every token of a plan, in bounded memory.

Invariants: tokens are counted piece by piece. Sums that do not agree with `plan.json` are an error, never a result.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tundish.errors import InvalidInputError, PlanMismatchError
from tundish.packing.plan.fields import plan_parts
from tundish.packing.plan.plan_columns import PlanColumns
from tundish.packing.plan.slices import piece_slices
from tundish.packing.plan.stats import plan_stats

__all__ = ["plan_ledger"]


def plan_ledger(plan: PlanColumns) -> dict[str, int]:
    """Account for the tokens as `PackPlan.ledger` documents.

    Raises:
        InvalidInputError: The plan has no lengths.
        PlanMismatchError: The sums do not agree.
    """
    if plan.lengths is None:
        raise InvalidInputError(
            "ledger needs the lengths: load the plan with lengths=, or use plan.with_lengths(…).ledger()"
        )
    first = len(plan) - plan.packs_repeated
    packed, cut = _count_pieces(plan, plan.lengths, 0, first)
    repeated, _ = _count_pieces(plan, plan.lengths, first, len(plan))
    metadata = plan.metadata
    truncated = _overlong_cut(metadata) if plan.overlong == "truncate" else 0
    capacity = len(plan) * plan.max_length
    ledger = {
        "tokens": plan.num_tokens,
        "packed": packed,
        "cut": cut,
        "truncated": truncated,
        "dropped": plan.num_tokens - packed - truncated,
        "repeated": repeated,
        "capacity": capacity,
        "padding": capacity - packed - repeated,
        "padding_align": int(plan_stats(plan)["padding_align"]),
    }
    _check(plan, plan.lengths, ledger)
    return ledger


def _check(plan: PlanColumns, lengths: Sequence[NDArray[Any]], ledger: dict[str, int]) -> None:
    metadata = plan.metadata
    sums = [("tokens_packed", ledger["packed"], metadata["tokens_packed"])]
    multiple = metadata.get("multiple") or {"tokens": 0}
    repeated = multiple["tokens"] if plan.packs_repeated else 0
    left_out = multiple["tokens"] - repeated
    sums.append(("tokens_repeated", ledger["repeated"], repeated))
    if metadata["order"] != "given":
        sums.append(("tokens", sum(int(column.sum(dtype=np.int64)) for column in lengths), plan.num_tokens))
    # Tails of mode "hard", and overlong samples.
    tails = sum(part["tokens"] - part["tokens_packed"] for part in plan_parts(metadata) if part.get("hard"))
    overlong = _overlong_cut(metadata) if plan.overlong == "drop" else 0
    sums.append(("tokens_dropped", ledger["dropped"], tails + overlong + left_out))
    for name, found, said in sums:
        if found != said:
            raise PlanMismatchError(
                f"the pieces and the attached lengths give {found} for {name}, and the plan says {said}: these are not "
                "the lengths that it was made from, or it is damaged. plan.verify() says where"
            )
    if min(ledger.values()) < 0 or ledger["padding_align"] > ledger["padding"]:
        raise PlanMismatchError(f"the plan is damaged: its tokens are {ledger}. plan.verify() says where")


def _overlong_cut(metadata: Mapping[str, Any]) -> int:
    """Tokens of overlong samples that were left out."""
    return sum(part["whole"]["tokens_overlong_cut"] for part in plan_parts(metadata) if part.get("whole"))


def _count_pieces(
    plan: PlanColumns, lengths: Sequence[NDArray[Any]], first: int, end: int
) -> tuple[int, int]:
    """The tokens of all pieces of the packs `first` … `end` - 1, and those of them in parts of samples."""
    packed = cut = 0
    for pieces in piece_slices(plan, first, end):
        sizes = pieces.stop - pieces.start
        packed += int(sizes.sum())
        cut += int(sizes[sizes != _lengths_of(lengths, pieces.dataset, pieces.sample)].sum())
    return packed, cut


def _lengths_of(
    lengths: Sequence[NDArray[Any]], dataset: NDArray[np.int64], sample: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The length of each of `sample`, which are of `dataset`."""
    found = np.empty(len(sample), np.int64)
    order = np.argsort(dataset, kind="stable")
    bounds = np.flatnonzero(np.diff(dataset[order], prepend=-1, append=-1))
    for begin, end in itertools.pairwise(bounds):
        chosen = order[begin:end]
        found[chosen] = lengths[dataset[chosen[0]]][sample[chosen]]
    return found
