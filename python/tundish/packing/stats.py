"""Figures about a plan, read from its columns in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tundish import _native
from tundish.errors import InvalidInputError, PlanMismatchError
from tundish.packing.columns import IntegerArray, as_integer_column
from tundish.packing.order import shuffled_indices

if TYPE_CHECKING:
    from tundish.packing.plan import PackPlan

# Packs looked at together: some megabytes of temporaries.
STEP = 1 << 18


def plan_stats(plan: PackPlan) -> dict[str, int | float]:
    """How much of the samples a plan packs, cuts and leaves out.

    Returns:
        packs, pieces: how many.
        samples: samples that the plan takes tokens of (or that lie in a pack without any).
        samples_cut: samples that are in more than one pack, or lose their end to the dropped tail.
        tokens, tokens_packed, tokens_dropped: of the ordered samples, in tokens.
        fill: tokens_packed over packs times max_length; 1.0 for an empty plan.
        pieces_per_pack: mean; max_pieces_per_pack: largest.
        longest: longest piece, in tokens.
    """
    facts = plan.facts
    continued = 0
    cut = 0
    largest = 0
    longest = 0
    piece_before = 0
    was_inside = False
    for start, stop in _steps(len(plan)):
        cu = plan.indices_cu_len[start:stop].astype(np.int64)
        counts = np.diff(cu, prepend=piece_before)
        continues = plan.start_offset[start:stop] > 0
        # A pack that lies inside one sample passes the same sample on; only its first continuation counts.
        inside = continues & (counts == 1)
        passed_on = np.concatenate(([was_inside], inside[:-1]))
        continued += int(continues.sum())
        cut += int((continues & ~passed_on).sum())
        largest = max(largest, int(counts.max(initial=0)))
        longest = max(longest, int(plan.longest[start:stop].max(initial=0)))
        piece_before = int(cu[-1])
        was_inside = bool(inside[-1])
    dropped = plan.num_tokens - facts["tokens_packed"]
    if dropped:
        cut += _cut_by_tails(plan, facts["tail_start"])
    packs, pieces = len(plan), len(plan.indices)
    return {
        "packs": packs,
        "pieces": pieces,
        "samples": pieces - continued,
        "samples_cut": cut,
        "tokens": plan.num_tokens,
        "tokens_packed": facts["tokens_packed"],
        "tokens_dropped": dropped,
        "fill": facts["tokens_packed"] / (packs * plan.max_length) if packs else 1.0,
        "pieces_per_pack": pieces / packs if packs else 0.0,
        "max_pieces_per_pack": largest,
        "longest": longest,
    }


def _steps(total: int) -> Iterator[tuple[int, int]]:
    for start in range(0, total, STEP):
        yield start, min(start + STEP, total)


def _cut_by_tails(plan: PackPlan, tail_starts: list[int]) -> int:
    """Samples whose end is dropped and that no pack's start has counted as cut."""
    count = 0
    for stream, tail_start in enumerate(tail_starts):
        if tail_start == 0:
            continue
        # The last pack of the stream ends inside the sample; it was counted if that pack began inside it too.
        last = int(np.searchsorted(plan.dataset_id, stream, side="right")) - 1
        before = int(plan.indices_cu_len[last - 1]) if last > 0 else 0
        alone = int(plan.indices_cu_len[last]) - before == 1
        count += not (alone and plan.start_offset[last] > 0)
    return count


def megatron_sample_index(plan: PackPlan, order: Any = None) -> IntegerArray:
    """The plan as Megatron-LM's `sample_index`.

    Row *i* says where token `i * max_length` of the stream is: the position of its sample in the
    order (Megatron's index into `document_index`) and the token's offset in that sample. It equals
    what Megatron-Core's `build_sample_idx` gives for the same order with `seq_length=max_length` and
    one extra token a sequence; there is one row for each such token, so the tail that
    was dropped has a row too.

    Args:
        plan: a plan of one dataset, or with `global_pack`.
        order: the order that was given to `pack`, if one was. Needed only where empty samples lie on pack
            boundaries, which the plan does not hold. One that is given is checked: whole where the lengths are
            attached, else as far as the plan holds it, which is up to the dropped tail.

    Returns:
        shape (rows, 2), int32 where all values fit, else int64.

    Raises:
        InvalidInputError: a plan of several datasets, or an order or lengths that are needed are missing.
        PlanMismatchError: the plan was made with another order, or without one, or the attached lengths are
            not its own.
    """
    facts = plan.facts
    if len(facts["tail_start"]) != 1:
        raise InvalidInputError(
            "sample_index needs a plan of one dataset, or of several with global_pack=True"
        )
    if order is not None:
        order = _checked_order(plan, order)
    packs = len(plan)
    tail = plan.num_tokens - facts["tokens_packed"] > 0
    rows = np.zeros((packs + tail, 2), dtype=np.int64)
    if not len(rows):
        return rows.astype(np.int32)
    rows[:packs, 1] = plan.start_offset
    if tail:
        rows[packs, 1] = facts["tail_start"][0]
    if facts["empty_on_boundary"]:
        rows[:, 0] = _positions_in_order(plan, order, tail)
    else:
        # Every sample up to here is a piece, so positions are pieces less the continuations.
        rows[1:, 0] = plan.indices_cu_len[: len(rows) - 1]
        rows[:, 0] -= np.cumsum(rows[:, 1] > 0)
    return rows.astype(np.int32) if rows.max() <= np.iinfo(np.int32).max else rows


def _checked_order(plan: PackPlan, order: Any) -> IntegerArray:
    """The order as an array, once it is known for the one that the plan was made with."""
    kind = plan.facts["order"]
    if kind != "given":
        made = "in the samples' own order" if kind == "natural" else f"with seed={plan.seed}"
        raise PlanMismatchError(
            f"the plan was made {made}, not with an order that was given: leave order= out"
        )
    given = as_integer_column(order, "order")
    if plan.lengths is not None:
        _check_fingerprint(plan, plan.lengths, given)
    else:
        _check_pieces(plan, given)
    return given


def _check_fingerprint(plan: PackPlan, lengths: list[IntegerArray], order: IntegerArray) -> None:
    found = _native.fingerprint(
        {
            "lengths": lengths,
            "order": order,
            "seed": None,
            "max_length": plan.max_length,
            "drop_last": plan.drop_last,
            "global_pack": plan.global_pack,
            "threads": None,
        }
    )
    if found != plan.fingerprint:
        raise PlanMismatchError(
            f"the plan (fingerprint {plan.fingerprint}) was made with another order, or the attached lengths are not "
            f"those it was made from: together they have the fingerprint {found}. Pass the order that pack was given"
        )


def _check_pieces(plan: PackPlan, order: IntegerArray) -> None:
    """Compare the order with the samples of the packs; without lengths, no empty sample is left out between them."""
    if plan.facts["empty_on_boundary"]:
        # The lengths are needed, which who asks for the positions will say.
        return
    position = 0
    for first, stop in _steps(len(plan)):
        before = int(plan.indices_cu_len[first - 1]) if first else 0
        ends = plan.indices_cu_len[first:stop].astype(np.int64) - before
        starts = np.concatenate(([0], ends[:-1]))
        # A pack that starts inside a sample goes on with the one before it.
        samples = np.delete(
            plan.indices[before : before + int(ends[-1])], starts[plan.start_offset[first:stop] > 0]
        )
        given = order[position : position + len(samples)]
        wrong = np.flatnonzero(given != samples[: len(given)])
        if len(wrong):
            entry = position + int(wrong[0])
            raise PlanMismatchError(
                f"order[{entry}] is {order[entry]}, and the plan takes sample {samples[wrong[0]]} there: "
                "pass the order that pack was given"
            )
        if len(given) < len(samples):
            raise PlanMismatchError(
                f"the order has {len(order)} entries, and the plan takes more samples: "
                "pass the order that pack was given"
            )
        position += len(samples)


def _positions_in_order(plan: PackPlan, order: IntegerArray | None, tail: bool) -> IntegerArray:
    """Positions in the order of each row's sample, by the order itself."""
    if plan.lengths is None:
        raise InvalidInputError(
            "empty samples lie on pack boundaries, so sample_index needs the lengths: load the plan with lengths="
        )
    lengths = np.concatenate(plan.lengths) if len(plan.lengths) > 1 else plan.lengths[0]
    kind = plan.facts["order"]
    if kind == "natural":
        ordered: IntegerArray = np.arange(len(lengths))
    elif kind == "seed":
        ordered = shuffled_indices(len(lengths), int(plan.facts["seed"]))
    elif order is None:
        raise InvalidInputError(
            "empty samples lie on pack boundaries of this plan, so sample_index needs the order: pass order="
        )
    else:
        ordered = order
    ends = np.cumsum(lengths[ordered].astype(np.int64))
    rows = len(plan) + tail
    # The sample of a token is the first whose end lies beyond it.
    return np.searchsorted(ends, np.arange(rows, dtype=np.int64) * plan.max_length, side="right")
