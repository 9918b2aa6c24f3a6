"""Counts what a plan packs, cuts and leaves out, in bounded memory.

Invariants: the ledger counts tokens piece by piece. Sums that disagree with `plan.json` are an error, never a result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tundish.errors import InvalidInputError, PlanMismatchError
from tundish.packing.arguments import IntegerArray


class PlanReader(Protocol):
    """What statistics, plots and exports read of a `PackPlan`, which documents it."""

    dataset_id: IntegerArray
    indices: IntegerArray
    indices_cu_len: IntegerArray
    start_offset: IntegerArray
    longest: IntegerArray
    piece_stop: IntegerArray | None
    max_length: int
    mode: str
    modes: tuple[str, ...]
    seed: int | None
    overlong: str | None
    packs_repeated: int
    global_pack: bool
    num_samples: tuple[int, ...]
    num_tokens: int
    fingerprint: str

    @property
    def has_lengths(self) -> bool: ...
    @property
    def lengths(self) -> list[IntegerArray] | None: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...
    def __len__(self) -> int: ...
    def lookup(self, pack_ids: Any) -> Any: ...


# What `plan.json` counts of packs that are left out or repeated.
_MULTIPLE = ("packs", "tokens", "padding_align", "samples", "samples_overlong")


def plan_stats(plan: PlanReader) -> dict[str, int | float]:
    """Compute the statistics that `PackPlan.stats` documents."""
    metadata = plan.metadata
    packs, pieces, packed = len(plan), len(plan.indices), metadata["tokens_packed"]
    room = packs * plan.max_length
    multiple = metadata.get("multiple") or dict.fromkeys(_MULTIPLE, 0)
    repeats = plan.packs_repeated > 0
    repeated = multiple["tokens"] if repeats else 0
    counted = _count_samples(plan, metadata, multiple)
    padding_align = sum(part["whole"]["padding_align"] for part in plan_parts(metadata) if part.get("whole"))
    padding_align += multiple["padding_align"] if repeats else -multiple["padding_align"]
    return {
        "packs": packs,
        "pieces": pieces,
        **counted,
        "tokens": plan.num_tokens,
        "tokens_packed": packed,
        "tokens_dropped": plan.num_tokens - packed,
        "packs_dropped": 0 if repeats else multiple["packs"],
        "packs_repeated": plan.packs_repeated,
        "tokens_repeated": repeated,
        "padding": room - packed - repeated,
        "padding_align": padding_align,
        "fill": (packed + repeated) / room if packs else 1.0,
        "pieces_per_pack": pieces / packs if packs else 0.0,
        **_largest(plan),
    }


def _largest(plan: PlanReader) -> dict[str, int]:
    most = 0
    longest = 0
    before = 0
    for start, stop in pack_slices(plan, 0, len(plan)):
        cu = plan.indices_cu_len[start:stop].astype(np.int64)
        most = max(most, int(np.diff(cu, prepend=before).max(initial=0)))
        longest = max(longest, int(plan.longest[start:stop].max(initial=0)))
        before = int(cu[-1])
    return {"max_pieces_per_pack": most, "longest": longest}


def _count_samples(
    plan: PlanReader, metadata: Mapping[str, Any], multiple: Mapping[str, Any]
) -> dict[str, int]:
    """Count the samples of all modes."""
    # Packs that come again hold no more samples.
    packs = len(plan) - plan.packs_repeated
    parts = plan_parts(metadata)
    bounds = [0, packs]
    if len(parts) > 1:
        # In the column's own dtype: numpy would convert the whole column for any other.
        numbers = np.arange(len(parts) + 1).astype(plan.dataset_id.dtype)
        bounds = np.searchsorted(plan.dataset_id[:packs], numbers).tolist()
    is_cut = plan.overlong in ("split", "truncate")
    found = {
        "samples": -multiple["samples"],
        "samples_cut": -multiple["samples_overlong"] if is_cut else 0,
        "samples_empty": 0,
        "samples_overlong": 0,
    }
    for part, (first, stop) in zip(parts, pairwise(bounds), strict=True):
        if part.get("hard"):
            counted = _count_hard(plan, first, stop, part)
        else:
            whole = part["whole"]
            counted = {
                "samples": whole["samples_packed"],
                "samples_cut": whole["samples_overlong"] if is_cut else 0,
                "samples_empty": whole["samples_empty"],
                "samples_overlong": whole["samples_overlong"],
            }
        for name, count in counted.items():
            found[name] += count
    return found


def _count_hard(plan: PlanReader, first: int, end: int, part: Mapping[str, Any]) -> dict[str, int]:
    """Count the samples of packs `first` … `end` - 1, which hard packing made."""
    continued = 0
    cut = 0
    piece_first = piece_before = int(plan.indices_cu_len[first - 1]) if first else 0
    was_inside = False
    for start, stop in pack_slices(plan, first, end):
        cu = plan.indices_cu_len[start:stop].astype(np.int64)
        counts = np.diff(cu, prepend=piece_before)
        continues = plan.start_offset[start:stop] > 0
        # A pack that lies inside one sample passes the same sample on; only its first continuation counts.
        inside = continues & (counts == 1)
        passed_on = np.concatenate(([was_inside], inside[:-1]))
        continued += int(continues.sum())
        cut += int((continues & ~passed_on).sum())
        piece_before = int(cu[-1])
        was_inside = bool(inside[-1])
    hard = part["hard"]
    if hard["drop_last"]:
        cut += _cut_by_tails(plan, first, end, hard["tail_start"])
    return {
        "samples": piece_before - piece_first - continued,
        "samples_cut": cut,
        "samples_empty": hard["empty_on_boundary"],
        "samples_overlong": 0,
    }


def _cut_by_tails(plan: PlanReader, first: int, end: int, tail_starts: list[int]) -> int:
    """Count the samples whose end is dropped, except those already counted as cut."""
    dataset_id = plan.dataset_id[first:end]
    # The column's own dtype: numpy would convert the whole column for any other.
    streams = np.flatnonzero(tail_starts).astype(dataset_id.dtype)
    if first < end:
        # Of a mixed plan, there is one stream.
        streams += dataset_id[0] if len(tail_starts) == 1 else 0
    # The last pack of each stream ends inside the sample; it was counted if that pack began inside it too.
    last = first + np.searchsorted(dataset_id, streams, side="right") - 1
    before = np.where(last > 0, plan.indices_cu_len[last - 1], 0)
    alone = plan.indices_cu_len[last] - before == 1
    return int((~(alone & (plan.start_offset[last] > 0))).sum())


def plan_ledger(plan: PlanReader) -> dict[str, int]:
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


def _check(plan: PlanReader, lengths: Sequence[NDArray[Any]], ledger: dict[str, int]) -> None:
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


def _count_pieces(plan: PlanReader, lengths: Sequence[NDArray[Any]], first: int, end: int) -> tuple[int, int]:
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
    for begin, end in pairwise(bounds):
        chosen = order[begin:end]
        found[chosen] = lengths[dataset[chosen[0]]][sample[chosen]]
    return found


# Packs and pieces of a slice: some tens of megabytes of temporaries.
PACKS_AT_ONCE = 1 << 18
PIECES_AT_ONCE = 1 << 20


class PieceSlice(NamedTuple):
    """The pieces with tokens of consecutive packs, int64 arrays.

    Attributes:
        counts: Pieces of each pack, (packs,).
        dataset: Dataset of each piece, (pieces,).
        sample: Sample of each piece, counted within its dataset, (pieces,).
        start: First token taken of each piece's sample, (pieces,).
        stop: One past the last token taken, (pieces,).
    """

    counts: NDArray[np.int64]
    dataset: NDArray[np.int64]
    sample: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]


def pack_slices(plan: PlanReader, first: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut the packs `first` … `end` - 1 into ranges, each with the number of its first pack and one past the last."""
    cu = plan.indices_cu_len
    # In the column's own dtype: numpy would convert the whole column for any other.
    most = np.iinfo(cu.dtype).max
    while first < end:
        before = int(cu[first - 1]) if first else 0
        last = int(np.searchsorted(cu, cu.dtype.type(min(before + PIECES_AT_ONCE, most)), side="right"))
        stop = min(first + PACKS_AT_ONCE, max(last, first + 1), end)
        yield first, stop
        first = stop


def piece_slices(plan: PlanReader, first: int, end: int) -> Iterator[PieceSlice]:
    """Iterate over the pieces of packs `first` … `end` - 1. Pieces without tokens are left out.

    Raises:
        InvalidInputError: The plan does not say where pieces end, because it has no lengths.
    """
    if not plan.has_lengths and plan.piece_stop is None:
        raise InvalidInputError(
            "the plan does not say where its pieces end: attach the lengths with plan.with_lengths(…), or load it "
            "with PackPlan.load(path, lengths=…)"
        )
    offsets = np.cumsum([0, *plan.num_samples[:-1]])
    for begin, stop in pack_slices(plan, first, end):
        batch = plan.lookup(np.arange(begin, stop, dtype=np.int64))
        numbers = np.repeat(np.arange(len(batch)), np.diff(batch.piece_cu))
        has_tokens = batch.stop != batch.start
        numbers, sample = numbers[has_tokens], batch.sample[has_tokens]
        dataset = batch.dataset_id[numbers]
        if plan.global_pack:
            dataset = np.searchsorted(offsets, sample, side="right") - 1
            sample = sample - offsets[dataset]
        counts = np.bincount(numbers, minlength=len(batch))
        yield PieceSlice(counts, dataset, sample, batch.start[has_tokens], batch.stop[has_tokens])


def plan_parts(metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What `plan.json` says of the packs of each mode: tokens and counts before packs are left out or repeated.

    A mixed plan has a part for each dataset, and any other plan one for all.
    """
    if metadata.get("parts"):
        return [dict(part) for part in metadata["parts"]]
    part = {name: metadata.get(name) for name in ("mode", "tokens", "tokens_packed", "hard", "whole")}
    multiple = metadata.get("multiple")
    if multiple and multiple["remainder"] == "drop":
        part["tokens_packed"] = metadata["tokens_packed"] + multiple["tokens"]
    return [part]
