"""`PackedDataset`: the packs of a plan as training items.

Invariants: an item is built only from samples that agree with the plan, as far as the plan can tell. Each sample is
read once for all packs of a batch.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from tundish.errors import InvalidTypeError, NoSuchPackError, PlanMismatchError, format_integer, format_type
from tundish.packing.dataset.custom_positions import Positions
from tundish.packing.dataset.item_builder import ItemBuilder
from tundish.packing.dataset.mixed_parts import items_of_mix, parts_of_mix
from tundish.packing.dataset.piece_layout import aligned_sizes
from tundish.packing.dataset.row_reader import RowReader
from tundish.packing.dataset.sample_keys import Padding
from tundish.packing.dataset.samples import Sample, SampleSource, as_datasets
from tundish.packing.mixing.pack_mix import PackMix
from tundish.packing.plan.pack_plan import PackPlan

__all__ = ["PackedDataset"]


class PackedDataset(Dataset[dict[str, Any]]):
    """A map-style dataset whose item *i* is pack *i* of `plan`, as a dict.

    | key | type | meaning |
    |---|---|---|
    | `input_ids` | int64, (tokens,) | the pieces' tokens, one after the other |
    | `labels` | int64, (tokens,) | the samples' own `labels`, else `input_ids`; -100 where a mask is 0 |
    | `position_ids` | int64, (tokens,) | from 0 on in each piece, wherever in its sample it begins; or `positions` |
    | `cu_seqlens` | int32, (pieces + 1,) | bounds of the pieces, from 0 to the number of tokens |
    | `max_seqlen` | int | tokens of the longest piece |
    | each of `columns` | int64, float32 or bool, (tokens,) | the column beside the tokens |
    | `column_padding` | dict | the padding value of each column, if there are columns |
    | each of `sample_columns` | tensor or list | the values of the samples, in the order of the pieces |

    Pieces without tokens (samples of length 0) leave no trace: `cu_seqlens` rises strictly.

    If the plan was made with `align`, each piece is padded to a multiple of it, but in datasets of mode "hard":
    `input_ids` with `pad_token_id`, `labels` with -100, columns with their padding values. The padding counts as part
    of its piece in `position_ids`, `cu_seqlens` and `max_seqlen`. With causal attention no token before it sees it.

    A sample is a mapping with `input_ids` (a row of a HF `Dataset` is one), or a plain one-dimensional array, tensor or
    sequence of integers. A mapping may have `labels`, and the masks `completion_mask`, `assistant_masks` and
    `loss_mask`: a token is learned where all masks are 1. `attention_mask` of ones, `token_type_ids` of zeros,
    `length`, `num_tokens`, `text`, `messages`, `prompt` and `completion` are left out. Any other key is refused unless
    `columns` or `sample_columns` names it. The value None counts as no value. Samples whose length disagrees with the
    plan are refused when they are read: with the lengths attached to the plan each sample is compared;
    without them the offsets, the pack's total and its longest piece are.

    Args:
        datasets: The dataset that the plan was made for, or a list or tuple of datasets in the plan's
            order. A list or tuple of samples is taken as one dataset. For a mix, a list with what each of its plans was
            made for, or with the `PackedDataset` of each.
        plan: The result of `tundish.pack`, `tundish.pack_datasets` or `PackPlan.load`. With `global_pack` sample
            indices count through all datasets. Or a mix of plans (`tundish.mix`), whose packs are then the items.
        mask_first_token: Set the label of each piece's first token to -100, because the token that predicts it belongs
            to another piece. `PackedCollator` does this in any case.
        pad_token_id: The token that pads the pieces of a plan made with `align`.
        columns: Further columns with one number a token, by name, each with the value that pads it. A float makes
            the column float32, an integer int64, False bool. Every sample must have them.
        sample_columns: Names of values that a sample has once, for example an image. Tensors (or arrays) of one dtype,
            and of one shape but for the first dimension, are concatenated; anything else is a list. Every sample must
            have the key. A sample without a value has None; if no sample of a pack has one, the item lacks the key. A
            sample that is cut gives its value to each of its pieces.
        positions: A function that gives the positions of a piece, for models that do not count tokens. It is called
            with a dict of the piece's `input_ids`, its part of each of `columns`, and its sample's `sample_columns`.
            It returns integers that begin as if the piece stood alone: (tokens,), or (rows, tokens). With rows,
            `position_ids` are (1 + rows, tokens), and their first row counts from 0 in each piece: Qwen2-VL and its
            like take (4, 1, tokens) in this order, and derive the pieces from the first row.

    Raises:
        InvalidTypeError: `datasets` or one of them is no dataset, or an argument is of the wrong type.
        InvalidInputError: A HF `Dataset` has a column that is not known or lacks one that is named, or a name in
            `columns` or `sample_columns` has another meaning.
        PlanMismatchError: The number of datasets, or of samples in one, is not the plan's.

    Example:
        >>> import tundish as td
        >>> samples = [[1, 2, 3], [4, 5, 6, 7, 8]]
        >>> dataset = td.PackedDataset(samples, td.pack([3, 5], max_length=4))
        >>> dataset[0]["input_ids"].tolist(), dataset[0]["position_ids"].tolist(), dataset[0]["cu_seqlens"].tolist()
        ([1, 2, 3, 4], [0, 1, 2, 0], [0, 3, 4])
    """

    def __init__(
        self,
        datasets: SampleSource | Sequence[SampleSource],
        plan: PackPlan | PackMix,
        *,
        mask_first_token: bool = False,
        pad_token_id: int = 0,
        columns: Mapping[str, Padding] | None = None,
        sample_columns: Sequence[str] | None = None,
        positions: Positions | None = None,
    ) -> None:
        if not isinstance(plan, PackPlan | PackMix):
            raise InvalidTypeError(f"plan is {format_type(plan)}: give a PackPlan, as pack returns it")
        self.plan = plan
        self._parts: list[PackedDataset] = []
        if isinstance(plan, PackMix):
            self._read_parts(
                datasets,
                plan,
                mask_first_token=mask_first_token,
                pad_token_id=pad_token_id,
                columns=columns,
                sample_columns=sample_columns,
                positions=positions,
            )
            return
        self._plan = plan
        self._reader = RowReader(columns, sample_columns)
        self.columns = self._reader.columns
        self.sample_columns = self._reader.sample_columns
        self._builder = ItemBuilder(
            self.columns,
            self.sample_columns,
            mask_first_token=mask_first_token,
            positions=positions,
            pad_token_id=pad_token_id,
        )
        # Pieces that were cut where a pack was full have no room for padding.
        self._aligns = [1 if mode == "hard" else plan.align for mode in plan.modes]
        self.datasets = as_datasets(datasets, plan.num_samples)
        for number, dataset in enumerate(self.datasets):
            if plan.num_samples[number]:
                self._reader.check_dataset(dataset, number)
        # With global_pack, sample s is sample s - offset of the last dataset whose offset is not above s.
        self._offsets = [0, *itertools.accumulate(plan.num_samples[:-1])]

    def _read_parts(self, datasets: Any, mix: PackMix, **options: Any) -> None:
        """Read the packs of a mix, each through the dataset of its plan."""
        self._parts = parts_of_mix(
            datasets,
            mix,
            PackedDataset,
            lambda given, plan: PackedDataset(given, plan, **options),
            has_options=any(options.values()),
        )
        self.columns, self.sample_columns = self._parts[0].columns, self._parts[0].sample_columns
        self.datasets = tuple(dataset for part in self._parts for dataset in part.datasets)

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over all packs.

        Python's default iteration would take an `IndexError` of a dataset for the end.
        """
        return (self[number] for number in range(len(self)))

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return pack `index`; negative numbers count from the end.

        Args:
            index: The number of the pack.

        Returns:
            The item, a dict with the keys of the table above.

        Raises:
            NoSuchPackError: There is no such pack (an `IndexError`).
            PlanMismatchError: A sample's length disagrees with the plan, or the plan names a sample that does not
                exist.
            InvalidTypeError: A sample holds something else than token ids, or a mask or column is of a wrong dtype.
            InvalidInputError: A sample's labels, masks or columns are not as many as its tokens, a mask holds another
                number than 0 and 1, a key is unknown or missing, or an id is 2⁶³ or more.

        Example:
            >>> import tundish as td
            >>> dataset = td.PackedDataset([[1, 2, 3], [4, 5, 6, 7, 8]], td.pack([3, 5], max_length=4))
            >>> dataset[-1]["input_ids"].tolist()
            [5, 6, 7, 8]
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return several packs at once; torch's `DataLoader` calls it with the indices of a batch.

        Args:
            indices: Numbers of packs.

        Returns:
            The items, in the order of `indices`.

        Raises:
            NoSuchPackError, PlanMismatchError, InvalidTypeError, InvalidInputError: As `__getitem__`.

        Example:
            >>> import tundish as td
            >>> dataset = td.PackedDataset([[1, 2, 3], [4, 5, 6, 7, 8]], td.pack([3, 5], max_length=4))
            >>> [item["max_seqlen"] for item in dataset.__getitems__([0, 1])]
            [3, 4]
        """
        packs = self._pack_numbers(indices)
        if not packs:
            return []
        if isinstance(self.plan, PackMix):
            return items_of_mix(self._parts, self.plan, packs)
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

    def _pack_numbers(self, indices: Sequence[int]) -> list[int]:
        count = len(self.plan)
        numbers = []
        for index in indices:
            try:
                number = operator.index(index)
            except TypeError:
                # `DataLoader(…, sampler=PackedBatchSampler(…))` asks for lists.
                hint = (
                    "; a PackedBatchSampler is the DataLoader's batch_sampler="
                    if hasattr(index, "__len__")
                    else ""
                )
                raise InvalidTypeError(f"a pack is asked for by its number, got {index!r}{hint}") from None
            if not -count <= number < count:
                raise NoSuchPackError(
                    f"pack {format_integer(number)} does not exist: the plan has {count} packs"
                )
            numbers.append(number + count if number < 0 else number)
        return numbers

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
        dataset, read = self.datasets[number], self._reader.read
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
                f"__getitems__ of dataset {number} gave something of type {type(rows).__name__}: it is to give a list "
                "of the samples asked for, in their order"
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
