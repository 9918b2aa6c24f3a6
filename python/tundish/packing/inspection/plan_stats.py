"""Counts what a plan packs, cuts and leaves out, and what a mix takes of its plans, in bounded memory.

Invariants: the ledger counts tokens piece by piece. Sums that disagree with `plan.json` are an error, never a result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tundish.errors import InvalidInputError, PlanMismatchError
from tundish.packing.arguments import IntegerArray


class PlanReader(Protocol):
    """What statistics, plots and exports read of a `PackPlan`, which documents it."""

    indices: IntegerArray
    indices_cu_len: IntegerArray
    start_offset: IntegerArray
    longest: IntegerArray
    piece_stop: IntegerArray | None
    max_length: int
    mode: str
    seed: int | None
    overlong: str | None
    packs_repeated: int
    global_pack: bool
    num_samples: tuple[int, ...]
    num_tokens: int
    fingerprint: str
    path: Path | None

    @property
    def has_lengths(self) -> bool: ...
    @property
    def lengths(self) -> list[IntegerArray] | None: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...
    def __len__(self) -> int: ...
    def lookup(self, pack_ids: Any) -> Any: ...


class MixReader(Protocol):
    """What statistics and tables read of a `PackMix`, which documents it."""

    weights: list[float]
    since: int

    @property
    def plans(self) -> Sequence[PlanReader]: ...
    @property
    def names(self) -> Sequence[str]: ...
    def __len__(self) -> int: ...
    def lookup(self, places: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...


def plan_stats(metadata: Mapping[str, Any]) -> dict[str, int | float]:
    """The statistics that `PackPlan.stats` documents, of the content of `plan.json`."""
    counts = metadata["counts"]
    packs, room = counts["packs"], counts["packs"] * metadata["max_length"]
    held = counts["tokens_packed"] + counts["tokens_repeated"]
    names = (
        "packs",
        "pieces",
        "samples",
        "samples_cut",
        "samples_empty",
        "samples_overlong",
        "tokens",
        "tokens_packed",
    )
    return {
        **{name: counts[name] for name in names},
        "tokens_dropped": counts["tokens"] - counts["tokens_packed"],
        **{name: counts[name] for name in ("packs_dropped", "packs_repeated", "tokens_repeated")},
        "padding": room - held,
        "padding_align": counts["padding_align"],
        "fill": held / room if packs else 1.0,
        "pieces_per_pack": counts["pieces"] / packs if packs else 0.0,
        **{name: counts[name] for name in ("max_pieces_per_pack", "longest")},
    }


def mix_shares(weights: Sequence[float]) -> list[float]:
    """The share of the packs that each weight asks for."""
    # The sum of large weights may be beyond every float.
    shares = np.array(weights) / max(weights)
    found: list[float] = (shares / shares.sum()).tolist()
    return found


def mix_stats(mix: MixReader) -> dict[str, Any]:
    """The statistics that `PackMix.stats` documents."""
    taken = np.zeros(len(mix.plans), dtype=np.int64)
    since = np.zeros_like(taken)
    for first, end, counts in ((0, mix.since, taken), (mix.since, len(mix), since)):
        for start in range(first, end, PACKS_AT_ONCE):
            places = np.arange(start, min(start + PACKS_AT_ONCE, end), dtype=np.int64)
            counts += np.bincount(mix.lookup(places)[0], minlength=len(counts))
    taken += since
    of_plans = [plan_stats(plan.metadata) for plan in mix.plans]
    packs = [max(len(plan), 1) for plan in mix.plans]
    held = [int(stats["tokens_packed"] + stats["tokens_repeated"]) for stats in of_plans]
    return {
        "packs": len(mix),
        "names": list(mix.names),
        "since": mix.since,
        "asked": mix_shares(mix.weights),
        "given": (since / max(len(mix) - mix.since, 1)).tolist(),
        "taken": taken.tolist(),
        "tokens": [
            count * tokens // own for count, tokens, own in zip(taken.tolist(), held, packs, strict=True)
        ],
        "epochs": [count / own for count, own in zip(taken.tolist(), packs, strict=True)],
    }


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
    counts = plan.metadata["counts"]
    capacity = len(plan) * plan.max_length
    ledger = {
        "tokens": plan.num_tokens,
        "packed": packed,
        "cut": cut,
        "truncated": counts["tokens_truncated"],
        "dropped": plan.num_tokens - packed - counts["tokens_truncated"],
        "repeated": repeated,
        "capacity": capacity,
        "padding": capacity - packed - repeated,
        "padding_align": counts["padding_align"],
    }
    sums = [
        ("tokens_packed", packed, counts["tokens_packed"]),
        ("tokens_repeated", repeated, counts["tokens_repeated"]),
    ]
    if plan.metadata["order"] != "given":
        total = sum(int(column.sum(dtype=np.int64)) for column in plan.lengths)
        sums.append(("tokens", total, plan.num_tokens))
    for name, found, said in sums:
        if found != said:
            raise PlanMismatchError(
                f"the pieces and the attached lengths give {found} for {name}, and the plan says {said}: these are not "
                "the lengths that it was made from, or it is damaged. plan.verify() says where"
            )
    if min(ledger.values()) < 0 or ledger["padding_align"] > ledger["padding"]:
        raise PlanMismatchError(f"the plan is damaged: its tokens are {ledger}. plan.verify() says where")
    return ledger


def _count_pieces(plan: PlanReader, lengths: Sequence[NDArray[Any]], first: int, end: int) -> tuple[int, int]:
    """The tokens of all pieces of the packs `first` … `end` - 1, and those of them in parts of samples."""
    packed = cut = 0
    for pieces in piece_slices(plan, first, end):
        sizes = pieces.stop - pieces.start
        packed += int(sizes.sum())
        cut += int(sizes[sizes != lengths_of(lengths, pieces.dataset, pieces.sample)].sum())
    return packed, cut


def lengths_of(
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
