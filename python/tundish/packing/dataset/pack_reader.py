"""`PackReader`: the packs of one plan as training items.

Invariants: an item is built only from samples that agree with the plan, as far as the plan can tell. Each sample is
read once for all packs of a batch.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tundish.errors import InvalidTypeError, PlanMismatchError, format_type
from tundish.packing.dataset.item_builder import ItemBuilder
from tundish.packing.dataset.piece_layout import aligned_sizes
from tundish.packing.dataset.row_reader import RowReader
from tundish.packing.dataset.samples import Sample, as_datasets
from tundish.packing.plan import PackPlan

__all__ = ["PackReader"]


class PackReader:
    """Reads the packs of a plan from the datasets that it was made for.

    Args:
        datasets: As in `PackedDataset`, for a plan.
        plan: The plan.
        rows: Reads the rows of the datasets.
        builder: Builds the items.
    """

    def __init__(self, datasets: Any, plan: PackPlan, rows: RowReader, builder: ItemBuilder) -> None:
        self.datasets = as_datasets(datasets, plan.num_samples)
        self.rows = rows
        self._plan = plan
        self._builder = builder
        # Pieces that were cut where a pack was full have no room for padding.
        self._aligns = [1 if mode == "hard" else plan.align for mode in plan.modes]
        for number, dataset in enumerate(self.datasets):
            if plan.num_samples[number]:
                rows.check_dataset(dataset, number)
        # With global_pack, sample s is sample s - offset of the last dataset whose offset is not above s.
        self._offsets = [0, *itertools.accumulate(plan.num_samples[:-1])]

    def items(self, packs: list[int]) -> list[dict[str, Any]]:
        """The items of packs that exist; `PackedDataset.__getitem__` says what they hold and when they are refused."""
        pieces = self._pieces(packs)
        samples = self._read(pieces)
        stops, sizes = self._spans(pieces, samples)
        self._check_totals(pieces, sizes)
        parts = itertools.starmap(slice, pieces.bounds())
        build = self._builder.build
        return [
            build(samples[part], pieces.starts[part], stops[part], sizes[part], self._aligns[dataset])
            for part, dataset in zip(parts, pieces.datasets, strict=True)
        ]

    def _pieces(self, packs: list[int]) -> _Pieces:
        found = self._plan.lookup(np.array(packs, dtype=np.int64))
        samples = found.sample.tolist()
        pieces = _Pieces(
            packs=packs,
            datasets=found.dataset_id.tolist(),
            cu=found.piece_cu.tolist(),
            samples=samples,
            starts=found.start.tolist(),
            stops=found.stop.tolist(),
            keys=samples,
        )
        self._check_samples(pieces)
        if len(self.datasets) > 1 and not self._plan.global_pack:
            pieces.keys = [
                self._offsets[dataset] + sample
                for dataset, (first, last) in zip(pieces.datasets, pieces.bounds(), strict=True)
                for sample in samples[first:last]
            ]
        return pieces

    def _check_samples(self, pieces: _Pieces) -> None:
        """Refuse datasets and samples that do not exist; only a damaged plan names them."""
        counts = self._plan.num_samples
        for pack, dataset, (first, last) in zip(pieces.packs, pieces.datasets, pieces.bounds(), strict=True):
            if self._plan.global_pack:
                offset, dataset = self._offsets[-1], len(counts) - 1
            else:
                offset = 0
            known = offset + counts[dataset] if dataset < len(counts) else 0
            samples = pieces.samples[first:last]
            if max(samples) >= known:
                sample = next(sample for sample in samples if sample >= known) - offset
                raise PlanMismatchError(
                    f"pack {pack} takes sample {sample} of dataset {dataset}, "
                    f"and the datasets have {list(counts[:8])} samples: the plan is damaged, make it again"
                )

    def _read(self, pieces: _Pieces) -> list[Sample]:
        """The sample of each piece; each distinct one is read once."""
        keys = sorted(set(pieces.keys))
        samples: dict[int, Sample] = {}
        first = 0
        while first < len(keys):
            number = bisect.bisect_right(self._offsets, keys[first]) - 1
            offset = self._offsets[number]
            last = bisect.bisect_left(keys, offset + self._plan.num_samples[number], first)
            chosen = keys[first:last]
            wanted = [key - offset for key in chosen] if offset else chosen
            found = self._fetch(number, wanted)
            self._check_lengths(number, wanted, found, pieces)
            samples.update(zip(chosen, found, strict=True))
            first = last
        return [samples[key] for key in pieces.keys]

    def _fetch(self, number: int, wanted: list[int]) -> list[Sample]:
        dataset, read = self.datasets[number], self.rows.read
        fetch_many = getattr(dataset, "__getitems__", None)
        if not fetch_many:
            return [read(dataset[index], number, index) for index in wanted]
        rows = self._rows(number, fetch_many(wanted))
        if len(rows) != len(wanted):
            raise InvalidTypeError(
                f"__getitems__ of dataset {number} gave {len(rows)} samples for {len(wanted)} indices"
            )
        return [read(row, number, index) for index, row in zip(wanted, rows, strict=True)]

    @staticmethod
    def _rows(number: int, rows: Any) -> list[Any]:
        """The result of a dataset's `__getitems__` as a list; it may be a generator."""
        if isinstance(rows, list):
            return rows
        try:
            # Exceptions of a generator are raised below, unchanged.
            given = None if isinstance(rows, Mapping | str | bytes) else iter(rows)
        except TypeError:
            given = None
        if given is None:
            raise InvalidTypeError(
                f"__getitems__ of dataset {number} gave {format_type(rows)}: it must give a list of the samples that "
                "are asked for, in their order"
            )
        return list(given)

    def _check_lengths(self, number: int, wanted: list[int], found: list[Sample], pieces: _Pieces) -> None:
        """Compare samples with the attached lengths."""
        if self._plan.lengths is None:
            return
        planned = self._plan.lengths[number][wanted].tolist()
        actual = [len(sample.tokens) for sample in found]
        if actual == planned:
            return
        wrong = next(position for position, length in enumerate(actual) if length != planned[position])
        piece = pieces.keys.index(self._offsets[number] + wanted[wrong])
        raise PlanMismatchError(
            f"sample {wanted[wrong]} of dataset {number} has {actual[wrong]} tokens, the plan was made "
            f"for {planned[wrong]} (pack {pieces.packs[pieces.row_of(piece)]}): plan the samples as they are now"
        )

    def _spans(self, pieces: _Pieces, samples: list[Sample]) -> tuple[list[int], list[int]]:
        """The end of each piece in its sample, and its number of tokens; refuses samples that are too short."""
        tokens = [len(sample.tokens) for sample in samples]
        stops = [length if stop < 0 else stop for length, stop in zip(tokens, pieces.stops, strict=True)]
        sizes = [stop - start for start, stop in zip(pieces.starts, stops, strict=True)]
        # Where every piece is a whole sample, it stops at the sample's end.
        are_whole = self._plan.overlong in ("error", "drop") and self._plan.mode != "mixed"
        misfit = operator.ne if are_whole else operator.gt
        if min(sizes) < 0 or any(map(misfit, stops, tokens)):
            piece = next(
                piece for piece, size in enumerate(sizes) if size < 0 or misfit(stops[piece], tokens[piece])
            )
            row = pieces.row_of(piece)
            end = "its end" if pieces.stops[piece] < 0 else f"{pieces.stops[piece]}"
            raise PlanMismatchError(
                f"pack {pieces.packs[row]} of dataset {pieces.datasets[row]} takes the tokens from "
                f"{pieces.starts[piece]} to {end} of sample {pieces.samples[piece]}, which has "
                f"{tokens[piece]}: plan the samples as they are now"
            )
        return stops, sizes

    def _check_totals(self, pieces: _Pieces, sizes: list[int]) -> None:
        """Compare the tokens of each pack with what a plan without lengths says about it."""
        planned = self._plan.longest[pieces.packs].tolist()
        for row, (first, last) in enumerate(pieces.bounds()):
            pack, dataset = pieces.packs[row], pieces.datasets[row]
            total = sum(aligned_sizes(sizes[first:last], self._aligns[dataset]))
            longest = max(sizes[first:last])
            least, most = self._expected_total(pack, dataset)
            if not least <= total <= most or longest != planned[row]:
                expected = f"{most}" if least == most else f"{least} to {most}"
                raise PlanMismatchError(
                    f"pack {pack} of dataset {dataset} holds {total} tokens, its "
                    f"longest piece {longest}; the plan says {expected}, the longest "
                    f"{planned[row]}: one of its samples has another length than when it was "
                    "planned. Attach the lengths (plan.with_lengths) to learn which, or plan the samples as they "
                    "are now"
                )

    def _expected_total(self, pack: int, dataset: int) -> tuple[int, int]:
        """The least and the most tokens that a pack may hold."""
        plan = self._plan
        most = plan.max_length
        if plan.mode != "hard":
            # The columns do not say how full a pack of whole samples is.
            return 1, most
        if plan.drop_last:
            return most, most
        first = len(plan) - plan.packs_repeated
        if pack >= first:
            # One of the first packs again.
            pack = (pack - first) % first
        if plan.global_pack or len(plan.num_samples) == 1:
            most = min(most, plan.num_tokens - pack * most)
            return most, most
        # Of several datasets, only the last pack of each may be short, and the plan does not say how short.
        is_last = pack + 1 == first or plan.dataset_id[pack + 1] != dataset
        return (1 if is_last else most), most


@dataclass(slots=True)
class _Pieces:
    """The pieces of several packs, as Python integers, which are faster than numpy for the few of a batch.

    Attributes:
        packs: Number of each pack.
        datasets: Dataset of each pack.
        cu: Bounds of the packs' pieces, from 0 on.
        samples: Sample of each piece.
        starts: First token taken of each piece's sample.
        stops: One past the last token taken, -1 for the sample's end.
        keys: The samples' numbers, counted through all datasets.
    """

    packs: list[int]
    datasets: list[int]
    cu: list[int]
    samples: list[int]
    starts: list[int]
    stops: list[int]
    keys: list[int]

    def bounds(self) -> Iterator[tuple[int, int]]:
        """The first piece of each pack, and the one after its last."""
        return itertools.pairwise(self.cu)

    def row_of(self, piece: int) -> int:
        """Which of the packs a piece is in."""
        return bisect.bisect_right(self.cu, piece) - 1
