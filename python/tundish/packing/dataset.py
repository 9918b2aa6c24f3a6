"""`PackedDataset`: the packs of a plan as training items.

Owns the way from a plan and the samples it was made for to tensors. What always holds: an item is
built only from samples that agree with the plan, as far as the plan can tell; each sample is read once
for all packs that are asked for together; the tensors of an item own their memory and share none with
each other, with another item or with the samples.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from tundish.errors import InvalidTypeError, NoSuchPackError, PlanMismatchError, shown
from tundish.packing.plan import PackBatch, PackPlan
from tundish.packing.samples import Sample, SampleSource, as_datasets, as_sample

__all__ = ["IGNORED_LABEL", "PackedDataset"]

# What cross-entropy in torch and transformers leaves out by default.
IGNORED_LABEL = -100


class PackedDataset(Dataset[dict[str, Any]]):
    """A map-style dataset whose item *i* is pack *i* of `plan`, as a dict.

    | key | type | meaning |
    |---|---|---|
    | `input_ids` | int64, (tokens,) | the pieces' tokens, one after the other |
    | `labels` | int64, (tokens,) | the samples' own `labels`; `input_ids` for samples that have none |
    | `position_ids` | int64, (tokens,) | counts from 0 in each piece, wherever in its sample it begins |
    | `cu_seqlens` | int32, (pieces + 1,) | bounds of the pieces, from 0 to the number of tokens |
    | `max_seqlen` | int | tokens of the longest piece |

    Pieces without tokens (samples of length 0) leave no trace: `cu_seqlens` rises strictly.

    A sample is a mapping with `input_ids` and, if it has them, `labels` (a row of a HF `Dataset` is one), or
    a plain one-dimensional array, tensor or sequence of integers. Samples whose length disagrees with the
    plan are refused when they are read: with the lengths attached to the plan each sample is compared;
    without them the offsets, the pack's total and its longest piece are.

    Args:
        datasets: the dataset that the plan was made for, or a list or tuple of datasets in the plan's
            order. A list or tuple of samples is taken as one dataset.
        plan: from `tundish.pack`, `tundish.pack_datasets` or `PackPlan.load`. With `global_pack` sample
            indices count through all datasets.
        mask_first_token: set the label of each piece's first token to -100. What predicts that token
            belongs to another piece. (`PackedCollator` does this in any case.)

    Raises:
        InvalidTypeError: `datasets` or one of them is nothing that samples can be drawn from.
        PlanMismatchError: the number of datasets, or of samples in one, is not the plan's.
    """

    def __init__(
        self,
        datasets: SampleSource | Sequence[SampleSource],
        plan: PackPlan,
        *,
        mask_first_token: bool = False,
    ) -> None:
        if not isinstance(plan, PackPlan):
            raise InvalidTypeError(f"plan must be a PackPlan, got {type(plan).__name__}")
        if not isinstance(mask_first_token, bool):
            raise InvalidTypeError(f"mask_first_token must be True or False, got {mask_first_token!r}")
        self.plan = plan
        self.mask_first_token = mask_first_token
        self.datasets = as_datasets(datasets, plan.num_samples)
        # With global_pack, sample s is sample s - offset of the last dataset whose offset is not above s.
        self._offsets = np.cumsum((0, *plan.num_samples[:-1]), dtype=np.int64)
        self._num_samples = np.array(plan.num_samples, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """All packs in turn.

        Python's own way to iterate would take an `IndexError` of a dataset for the end.
        """
        return (self[number] for number in range(len(self)))

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Pack `index`; negative numbers count from the end.

        Raises:
            NoSuchPackError: there is no such pack (an `IndexError`).
            PlanMismatchError: a sample's length disagrees with the plan, or the plan names a sample that does not
                exist.
            InvalidTypeError: a sample holds something else than token ids.
            InvalidInputError: a sample's labels are not as many as its tokens, or one of its ids is 2⁶³ or more.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Several packs at once: what torch's `DataLoader` calls with the indices of a batch.

        Raises:
            As `__getitem__`.
        """
        packs = self._pack_numbers(indices)
        if not len(packs):
            return []
        pieces = self.plan.lookup(packs)
        samples, of_piece = self._read(packs, pieces)
        tokens = np.array([len(sample.tokens) for sample in samples], dtype=np.int64)[of_piece]
        stops = np.where(pieces.stop < 0, tokens, pieces.stop)
        self._check(packs, pieces, tokens, stops)
        spans = list(zip(of_piece.tolist(), pieces.start.tolist(), stops.tolist(), strict=True))
        bounds = pieces.piece_cu.tolist()
        return [
            self._item(
                [(samples[sample], start, stop) for sample, start, stop in spans[first:last] if stop > start]
            )
            for first, last in itertools.pairwise(bounds)
        ]

    def _pack_numbers(self, indices: Sequence[int]) -> NDArray[np.int64]:
        count = len(self.plan)
        numbers = []
        for index in indices:
            try:
                number = operator.index(index)
            except TypeError:
                # What comes of `DataLoader(…, sampler=PackedBatchSampler(…))`.
                hint = (
                    "; a PackedBatchSampler is the DataLoader's batch_sampler="
                    if hasattr(index, "__len__")
                    else ""
                )
                raise InvalidTypeError(f"a pack is asked for by its number, got {index!r}{hint}") from None
            if not -count <= number < count:
                raise NoSuchPackError(f"pack {shown(number)} does not exist: the plan has {count} packs")
            numbers.append(number + count if number < 0 else number)
        return np.array(numbers, dtype=np.int64)

    def _read(self, packs: NDArray[np.int64], pieces: PackBatch) -> tuple[list[Sample], NDArray[np.int64]]:
        """Each distinct sample of the pieces once, and for every piece which of them it is cut from."""
        dataset = np.repeat(pieces.dataset_id, np.diff(pieces.piece_cu))
        if self.plan.global_pack:
            dataset = np.searchsorted(self._offsets, pieces.sample, side="right") - 1
            local = pieces.sample - self._offsets[dataset]
        else:
            local = pieces.sample
        self._check_samples(packs, pieces, dataset, local)
        samples: list[Sample] = []
        of_piece = np.empty(len(local), dtype=np.int64)
        for number in np.unique(dataset).tolist():
            chosen = np.flatnonzero(dataset == number)
            wanted, which = np.unique(local[chosen], return_inverse=True)
            of_piece[chosen] = which + len(samples)
            found = list(self._fetch(number, wanted.tolist()))
            self._check_lengths(
                number, wanted, found, packs, pieces, chosen[np.unique(which, return_index=True)[1]]
            )
            samples += found
        return samples, of_piece

    def _check_samples(
        self,
        packs: NDArray[np.int64],
        pieces: PackBatch,
        dataset: NDArray[np.int64],
        local: NDArray[np.int64],
    ) -> None:
        """Refuse datasets and samples that do not exist, which only a damaged plan asks for."""
        known = dataset < len(self._num_samples)
        known[known] = local[known] < self._num_samples[dataset[known]]
        unknown = np.flatnonzero(~known)
        if len(unknown):
            piece = unknown[0]
            raise PlanMismatchError(
                f"pack {_pack_of(piece, packs, pieces)} takes sample {local[piece]} of dataset {dataset[piece]}, "
                f"and the datasets have {list(self.plan.num_samples[:8])} samples: the plan is damaged, make it again"
            )

    def _fetch(self, number: int, wanted: list[int]) -> Iterator[Sample]:
        dataset = self.datasets[number]
        fetch_many = getattr(dataset, "__getitems__", None)
        if fetch_many:
            rows = fetch_many(wanted)
            if len(rows) != len(wanted):
                raise InvalidTypeError(
                    f"__getitems__ of dataset {number} gave {len(rows)} samples for {len(wanted)} indices"
                )
        else:
            rows = (dataset[index] for index in wanted)
        for index, row in zip(wanted, rows, strict=True):
            yield as_sample(row, f"sample {index} of dataset {number}")

    def _check_lengths(
        self,
        number: int,
        wanted: NDArray[np.int64],
        found: list[Sample],
        packs: NDArray[np.int64],
        pieces: PackBatch,
        some_piece: NDArray[np.int64],
    ) -> None:
        """Compare samples with the attached lengths; `some_piece` holds a piece of each sample."""
        if self.plan.lengths is None:
            return
        actual = np.array([len(sample.tokens) for sample in found], dtype=np.int64)
        planned = self.plan.lengths[number][wanted]
        wrong = np.flatnonzero(actual != planned)
        if len(wrong):
            first = wrong[0]
            pack = _pack_of(some_piece[first], packs, pieces)
            raise PlanMismatchError(
                f"sample {wanted[first]} of dataset {number} has {actual[first]} tokens, the plan was made "
                f"for {planned[first]} (pack {pack}): plan the samples as they are now"
            )

    def _check(
        self,
        packs: NDArray[np.int64],
        pieces: PackBatch,
        tokens: NDArray[np.int64],
        stops: NDArray[np.int64],
    ) -> None:
        """Compare what the packs hold with all that a plan without lengths tells of it."""
        outside = np.flatnonzero((stops > tokens) | (pieces.start > stops))
        if len(outside):
            piece = outside[0]
            row = np.searchsorted(pieces.piece_cu, piece, side="right") - 1
            end = "its end" if pieces.stop[piece] < 0 else f"{pieces.stop[piece]}"
            raise PlanMismatchError(
                f"pack {packs[row]} of dataset {pieces.dataset_id[row]} takes the tokens from "
                f"{pieces.start[piece]} to {end} of sample {pieces.sample[piece]}, which has "
                f"{tokens[piece]}: plan the samples as they are now"
            )
        sizes = stops - pieces.start
        totals = np.add.reduceat(sizes, pieces.piece_cu[:-1])
        longest = np.maximum.reduceat(sizes, pieces.piece_cu[:-1])
        least, most = self._expected_totals(packs, pieces)
        wrong = np.flatnonzero((totals < least) | (totals > most) | (longest != self.plan.longest[packs]))
        if len(wrong):
            row = wrong[0]
            expected = f"{most[row]}" if least[row] == most[row] else f"{least[row]} to {most[row]}"
            raise PlanMismatchError(
                f"pack {packs[row]} of dataset {pieces.dataset_id[row]} holds {totals[row]} tokens, its "
                f"longest piece {longest[row]}; the plan says {expected}, the longest "
                f"{self.plan.longest[packs[row]]}: one of its samples has another length than when it was "
                "planned. Attach the lengths (plan.with_lengths) to learn which, or plan the samples as they "
                "are now"
            )

    def _expected_totals(
        self, packs: NDArray[np.int64], pieces: PackBatch
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Say how many tokens each pack may hold, at least and at most."""
        plan = self.plan
        most = np.full(len(packs), plan.max_length, dtype=np.int64)
        if plan.drop_last:
            return most, most
        if plan.global_pack or len(plan.num_samples) == 1:
            most = np.minimum(most, plan.num_tokens - packs * plan.max_length)
            return most, most
        # Of several datasets, only the last pack of each may be short, and the plan does not say how short.
        following = np.minimum(packs + 1, len(plan) - 1)
        is_last = (packs + 1 == len(plan)) | (plan.dataset_id[following] != pieces.dataset_id)
        return np.where(is_last, 1, most), most

    def _item(self, spans: list[tuple[Sample, int, int]]) -> dict[str, Any]:
        bounds = np.zeros(len(spans) + 1, dtype=np.int64)
        sizes = [stop - start for _, start, stop in spans]
        np.cumsum(sizes, out=bounds[1:])
        pieces = [sample.piece(start, stop) for sample, start, stop in spans]
        # Kinds and values were checked; "unsafe" lets unsigned 64-bit ids through.
        tokens = np.concatenate([tokens for tokens, _ in pieces], dtype=np.int64, casting="unsafe")
        labels = np.concatenate([labels for _, labels in pieces], dtype=np.int64, casting="unsafe")
        if self.mask_first_token:
            labels[bounds[:-1]] = IGNORED_LABEL
        positions = np.arange(len(tokens), dtype=np.int64)
        positions -= np.repeat(bounds[:-1], sizes)
        return {
            "input_ids": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "position_ids": torch.from_numpy(positions),
            "cu_seqlens": torch.from_numpy(bounds.astype(np.int32)),
            "max_seqlen": max(sizes),
        }


def _pack_of(piece: np.int64, packs: NDArray[np.int64], pieces: PackBatch) -> np.int64:
    """The number of the pack that a piece is in."""
    number: np.int64 = packs[np.searchsorted(pieces.piece_cu, piece, side="right") - 1]
    return number
