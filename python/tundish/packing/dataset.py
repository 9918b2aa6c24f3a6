"""`PackedDataset`: the packs of a plan, or of a mix of plans, as training items.

Invariants: an item is built only from samples that agree with the plan, as far as the plan can tell. Each sample is
read once for all packs of a batch.
"""

from __future__ import annotations

import bisect
import itertools
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, IterableDataset

from tundish.errors import (
    InvalidInputError,
    InvalidTypeError,
    NoSuchPackError,
    PlanMismatchError,
    format_count,
    format_integer,
    format_type,
)
from tundish.packing.arguments import as_integer
from tundish.packing.inspection.display import PieceText, print_item
from tundish.packing.item import IGNORED_LABEL, ItemBuilder, Positions
from tundish.packing.mixing import PackMix
from tundish.packing.plan import PackBatch, PackPlan
from tundish.packing.samples import SHAPE_ADVICE, Padding, Sample, SampleReader, name_sample


class SampleSource(Protocol):
    """A map-style dataset, a HF `Dataset`, a list, or the rows of an array."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class PackedDataset(Dataset[dict[str, Any]]):
    """A map-style dataset whose item *i* is pack *i* of `plan`, as a dict.

    | key | type | meaning |
    |---|---|---|
    | `input_ids` | int64, (tokens,) | the pieces' tokens, one after the other |
    | `labels` | int64, (tokens,) | the samples' own `labels`, else `input_ids`; -100 where a mask is 0 |
    | `position_ids` | int64, (tokens,) | from 0 on in each piece, wherever in its sample it begins; or `positions` |
    | `cu_seqlens` | int32, (pieces + 1,) | bounds of the pieces, from 0 to the number of tokens |
    | `max_seqlen` | int | tokens of the longest piece |
    | `dataset_id` | int64, (pieces,) | the number of the dataset that each piece is of, as in `datasets` |
    | each of `columns` | int64, float32 or bool, (tokens,) | the column beside the tokens |
    | `column_padding` | dict | the padding value of each column, if there are columns |
    | each of `sample_columns` | tensor or list | the values of the samples, in the order of the pieces |

    Pieces without tokens (samples of length 0) leave no trace: `cu_seqlens` rises strictly.

    The datasets of a mix are numbered through all its plans. If each plan has one, a dataset has its plan's number.

    Collators of torch and of transformers refuse items, because they would lose the bounds of the pieces: use
    `PackedCollator` or `tundish.loader`.

    If the plan was made with `align`, each piece is padded to a multiple of it, but in datasets of mode "hard". The
    padding is `pad_token_id` in `input_ids`, -100 in `labels`, and the padding value in a column. It counts as part of
    its piece in `position_ids`, `cu_seqlens` and `max_seqlen`. With causal attention no token before it sees it.

    A sample is a mapping with `input_ids` (a row of a HF `Dataset` is one), or a plain one-dimensional array, tensor or
    sequence of integers. A mapping may have `labels`, and the masks `completion_mask`, `assistant_masks` and
    `loss_mask`: a token is learned where all masks are 1. `attention_mask` of ones, `token_type_ids` of zeros,
    `length`, `num_tokens`, `text`, `messages`, `prompt` and `completion` are left out. Any other key is refused unless
    `columns`, `sample_columns` or `drop_columns` names it. The value None counts as no value. Keys are checked at once
    where a dataset tells its columns, of lists by their first sample, and otherwise when a sample is read.

    Samples whose length disagrees with the plan are refused when they are read. If the plan has lengths, each sample is
    compared with its own. Otherwise the offsets, the pack's total and its longest piece are compared.

    Args:
        datasets: The dataset that the plan was made for, or a list or tuple of datasets in the plan's
            order. A list or tuple of samples is taken as one dataset. For a mix, a list with what each of its plans was
            made for, or with the `PackedDataset` of each; or a mapping of the plans' names to these.
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
        drop_columns: Names of keys that are left out, or "unknown" for all that are not known. Labels, masks and keys
            with another meaning cannot be left out. Of a HF `Dataset`, `remove_columns` also saves reading them.
        positions: A function that gives the positions of a piece, for models that do not count tokens. It is called
            with a dict of the piece's `input_ids`, its part of each of `columns`, and its sample's `sample_columns`.
            It returns integers that begin as if the piece stood alone: (tokens,), or (rows, tokens). With rows,
            `position_ids` are (1 + rows, tokens), and their first row counts from 0 in each piece: Qwen2-VL and its
            like take (4, 1, tokens) in this order, and derive the pieces from the first row.

    Attributes:
        plan: As given.
        datasets: The datasets, a tuple.
        columns: The padding value of each column.
        sample_columns: The names of the values that samples have once.

    Raises:
        InvalidTypeError: `datasets` or one of them is no dataset, or an argument is of the wrong type.
        InvalidInputError: A dataset that tells its columns, or the first sample of a list, has a key that is not known
            or lacks one that is named. Or a name in `columns`, `sample_columns` or `drop_columns` has another meaning.
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
        datasets: SampleSource | Sequence[SampleSource] | Mapping[str, Any],
        plan: PackPlan | PackMix,
        *,
        mask_first_token: bool = False,
        pad_token_id: int = 0,
        columns: Mapping[str, Padding] | None = None,
        sample_columns: Sequence[str] | None = None,
        drop_columns: Sequence[str] | Literal["unknown"] | None = None,
        positions: Positions | None = None,
    ) -> None:
        if not isinstance(plan, PackPlan | PackMix):
            raise InvalidTypeError(f"plan is {format_type(plan)}: give a PackPlan, as pack returns it")
        self.plan = plan
        samples = SampleReader(columns, sample_columns, drop_columns)
        builder = ItemBuilder(
            samples.columns,
            samples.sample_columns,
            mask_first_token=mask_first_token,
            positions=positions,
            pad_token_id=pad_token_id,
        )
        if isinstance(plan, PackMix):
            has_options = any(
                (mask_first_token, pad_token_id, columns, sample_columns, drop_columns, positions)
            )
            self._readers = _readers_of_mix(datasets, plan, samples, builder, has_options=has_options)
        else:
            self._readers = [_PackReader(datasets, plan, samples, builder)]
        samples.check_dropped([columns for reader in self._readers for columns in reader.told])
        self.columns = self._readers[0].samples.columns
        self.sample_columns = self._readers[0].samples.sample_columns
        self.datasets = tuple(dataset for reader in self._readers for dataset in reader.datasets)
        # The number of the first dataset of each plan of a mix.
        self._first_datasets = [
            0,
            *itertools.accumulate(len(reader.datasets) for reader in self._readers),
        ]

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
            InvalidInputError: A sample's labels, masks or columns are not as many as its tokens. Or a mask holds
                another number than 0 and 1, a key is unknown or missing, or an id is 2⁶³ or more.

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
        if not isinstance(self.plan, PackMix):
            return self._readers[0].items(packs)
        plans, numbers = (found.tolist() for found in self.plan.lookup(packs))
        items: list[dict[str, Any]] = [{}] * len(packs)
        # Each plan is asked once for all of its packs.
        for plan in sorted(set(plans)):
            places = [place for place, of in enumerate(plans) if of == plan]
            found = self._readers[plan].items([numbers[place] for place in places])
            for place, item in zip(places, found, strict=True):
                # The reader of a given `PackedDataset` numbers the datasets of that one.
                item["dataset_id"] += self._first_datasets[plan]
                items[place] = item
        return items

    def preview(self, n: int = 3, tokenizer: Any = None) -> None:
        """Print the first packs: each piece, and the text of its tokens that are learned and of those that are masked.

        The first token of a piece counts as masked, because `PackedCollator` masks it.

        Args:
            n: Packs to print, at least 1.
            tokenizer: An object whose `decode` makes text of a list of token ids, as tokenizers of transformers do.
                None prints the ids.

        Raises:
            InvalidInputError: `n` is below 1.
            InvalidTypeError: `n` is no integer, or the tokenizer has no `decode`.
            TundishError: A pack cannot be read, as in `__getitem__`.

        Example:
            >>> import tundish as td
            >>> samples = [
            ...     {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]},
            ...     {"input_ids": [4, 5, 6], "loss_mask": [0, 1, 1]},
            ... ]
            >>> td.PackedDataset(samples, td.pack([3, 3], max_length=5)).preview()
            pack 0: 5 tokens in 2 pieces
              piece 0: tokens 0:3 of sample 0, 1 learned
                masked  1 2
                learned 3
              piece 1: tokens 0:2 of sample 1, 1 learned
                masked  4
                learned 5
        """
        count = min(as_integer(n, "n", 1, 2**63 - 1), len(self))
        for number in range(count):
            reader, pack, title = self._readers[0], number, f"pack {number}"
            if isinstance(self.plan, PackMix):
                of, pack = self.plan[number]
                reader = self._readers[of]
                title += f", pack {pack} of {self.plan.names[of]}"
            print_item(title, reader.described(pack), tokenizer)

    def __repr__(self) -> str:
        return f"PackedDataset({format_count(len(self.datasets), 'dataset')}, {self.plan!r})"

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
                    f"pack {format_integer(number)} does not exist: the plan has {format_count(count, 'pack')}"
                )
            numbers.append(number + count if number < 0 else number)
        return numbers


def _readers_of_mix(
    datasets: Any, mix: PackMix, samples: SampleReader, builder: ItemBuilder, *, has_options: bool
) -> list[_PackReader]:
    """The reader of each plan of a mix. `has_options` tells of options, which cannot change a given `PackedDataset`."""
    plans = mix.plans
    if isinstance(datasets, Mapping):
        if datasets.keys() != set(mix.names):
            raise PlanMismatchError(
                f"datasets are named {', '.join(map(repr, datasets))}, and the plans of the mix are "
                f"{', '.join(map(repr, mix.names))}: give what each plan was made for by the plan's name"
            )
        datasets = [datasets[name] for name in mix.names]
    if not isinstance(datasets, list | tuple):
        raise InvalidTypeError(
            f"datasets is {format_type(datasets)}: give a list, for a mix, of what each of its plans was made for, or "
            "a mapping of the plans' names to it"
        )
    if len(datasets) != len(plans):
        raise PlanMismatchError(
            f"the mix has {format_count(len(plans), 'plan')}, and what is given is for {len(datasets)}: give a list of "
            "what each plan was made for, in the order of the mix"
        )
    readers = []
    for number, (given, plan) in enumerate(zip(datasets, plans, strict=True)):
        if not isinstance(given, PackedDataset):
            readers.append(_PackReader(given, plan, samples, builder))
            continue
        if has_options:
            raise InvalidInputError(
                f"datasets[{number}] is a PackedDataset, which has options of its own: give the options where it is "
                "made"
            )
        if getattr(given.plan, "fingerprint", None) != plan.fingerprint:
            raise PlanMismatchError(
                f"datasets[{number}] is of another plan than plan {number} of the mix: give the PackedDatasets in the "
                "order of the mix, or mix their plans"
            )
        readers += given._readers
    first = readers[0].samples
    for number, reader in enumerate(readers):
        if reader.samples.form() != first.form():
            raise InvalidInputError(
                f"datasets[{number}] has other columns or sample_columns than datasets[0]: a batch has packs of both, "
                "so give both the same"
            )
    return readers


class _Pieces(NamedTuple):
    """The pieces of a pack: the sample of each, the first token taken of it, and one past the last."""

    samples: list[Sample]
    starts: list[int]
    stops: list[int]


class _PackReader:
    """Reads the packs of a plan from the datasets that it was made for.

    Args:
        datasets: As in `PackedDataset`, for a plan.
        plan: The plan.
        samples: Reads the rows of the datasets.
        builder: Builds the items.
    """

    def __init__(self, datasets: Any, plan: PackPlan, samples: SampleReader, builder: ItemBuilder) -> None:
        self.datasets = _as_datasets(datasets, plan.num_samples)
        self.samples = samples
        self._plan = plan
        self._builder = builder
        # The columns of each dataset, None where it does not tell them.
        self.told = [
            samples.check_source(dataset, number) if plan.num_samples[number] else None
            for number, dataset in enumerate(self.datasets)
        ]
        self._counts = np.array(plan.num_samples, dtype=np.int64)
        # With global_pack, sample s is sample s - offset of the last dataset whose offset is not above s.
        self._offsets = np.cumsum(self._counts) - self._counts

    def items(self, packs: list[int]) -> list[dict[str, Any]]:
        """The items of packs that exist; `PackedDataset.__getitem__` says what they hold and when they are refused."""
        return [self.item(pieces) for pieces in self.pieces(packs)]

    def item(self, pieces: _Pieces) -> dict[str, Any]:
        """The item of a pack, of which `pieces` are the pieces."""
        return self._builder.build(*pieces, self._plan.align)

    def pieces(self, packs: list[int]) -> list[_Pieces]:
        """The pieces of packs that exist, checked against the plan."""
        found = self._plan.lookup(np.array(packs, dtype=np.int64))
        keys = self._keys(packs, found)
        samples = self._read(packs, found, keys.tolist())
        tokens = np.array([len(sample.tokens) for sample in samples])
        stops = np.where(found.stop < 0, tokens, found.stop)
        self._check_pieces(packs, found, tokens, stops)
        if not self._plan.has_lengths:
            self._check_totals(packs, found, stops - found.start)
        starts, ends = found.start.tolist(), stops.tolist()
        parts = itertools.starmap(slice, itertools.pairwise(found.piece_cu.tolist()))
        return [_Pieces(samples[part], starts[part], ends[part]) for part in parts]

    def described(self, pack: int) -> list[PieceText]:
        """The pieces of a pack with tokens, for a preview."""
        (pieces,) = self.pieces([pack])
        item = self.item(pieces)
        bounds = item["cu_seqlens"].tolist()
        held = [piece for piece in zip(*pieces, strict=True) if piece[1] < piece[2]]
        found = []
        for (sample, start, stop), first, end in zip(held, bounds[:-1], bounds[1:], strict=True):
            own = slice(first, first + stop - start)
            is_learned = item["labels"][own].numpy() != IGNORED_LABEL
            is_learned[0] = False
            several = len(self.datasets) > 1
            name = name_sample(sample.dataset, sample.number) if several else f"sample {sample.number}"
            tokens = item["input_ids"][own].numpy()
            found.append(PieceText(name, start, stop, tokens, is_learned, end - own.stop))
        return found

    def _keys(self, packs: list[int], found: PackBatch) -> NDArray[np.int64]:
        """The number of each piece's sample, counted through all datasets, (pieces,).

        Raises:
            PlanMismatchError: A dataset or sample does not exist; only a damaged plan names one.
        """
        counts, offsets = self._counts, self._offsets
        if self._plan.global_pack or len(counts) == 1:
            # The samples of one stream, whose packs are all of dataset 0.
            keys = found.sample
            is_known = (keys < offsets[-1] + counts[-1]) & (not found.dataset_id.any())
        else:
            dataset = found.dataset_id.repeat(np.diff(found.piece_cu))
            there = np.minimum(dataset, len(counts) - 1)
            keys = offsets[there] + found.sample
            is_known = (dataset == there) & (found.sample < counts[there])
        if not is_known.all():
            piece = int(is_known.argmin())
            row = _row_of(found, piece)
            raise PlanMismatchError(
                f"pack {packs[row]} takes sample {found.sample[piece]} of dataset {found.dataset_id[row]}, and the "
                f"datasets have {list(self._plan.num_samples[:8])} samples: the plan is damaged, make it again"
            )
        return keys

    def _read(self, packs: list[int], found: PackBatch, keys: list[int]) -> list[Sample]:
        """The sample of each piece; each distinct one is read once."""
        distinct = sorted(set(keys))
        samples: dict[int, Sample] = {}
        # The keys of a dataset follow each other.
        bounds = [*(bisect.bisect_left(distinct, offset) for offset in self._offsets.tolist()), len(distinct)]
        for number, (first, last) in enumerate(itertools.pairwise(bounds)):
            if first == last:
                continue
            offset = int(self._offsets[number])
            own = distinct[first:last]
            wanted = [key - offset for key in own]
            read = self._fetch(number, wanted)
            if self._plan.lengths is not None:
                planned = self._plan.lengths[number][wanted].tolist()
                actual = [len(sample.tokens) for sample in read]
                if actual != planned:
                    wrong = next(place for place, length in enumerate(actual) if length != planned[place])
                    pack = packs[_row_of(found, keys.index(own[wrong]))]
                    raise PlanMismatchError(
                        f"sample {wanted[wrong]} of dataset {number} has {format_count(actual[wrong], 'token')}, the "
                        f"plan was made for {planned[wrong]} (pack {pack}): plan the samples as they are now"
                    )
            samples.update(zip(own, read, strict=True))
        return [samples[key] for key in keys]

    def _fetch(self, number: int, wanted: list[int]) -> list[Sample]:
        dataset, read = self.datasets[number], self.samples.read
        fetch_many = getattr(dataset, "__getitems__", None)
        if not fetch_many:
            return [read(dataset[index], number, index) for index in wanted]
        rows = fetch_many(wanted)
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
        listed = list(given)
        if len(listed) != len(wanted):
            raise InvalidTypeError(
                f"__getitems__ of dataset {number} gave {format_count(len(listed), 'sample')} for "
                f"{len(wanted)} indices"
            )
        return [read(row, number, index) for index, row in zip(wanted, listed, strict=True)]

    def _check_pieces(
        self, packs: list[int], found: PackBatch, tokens: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> None:
        """Refuse pieces that do not lie in their samples."""
        # Where every piece is a whole sample, it stops at the sample's end.
        are_whole = self._plan.overlong in ("error", "drop")
        wrong = (stops < found.start) | (stops != tokens if are_whole else stops > tokens)
        if wrong.any():
            piece = int(wrong.argmax())
            row = _row_of(found, piece)
            end = "its end" if found.stop[piece] < 0 else f"{found.stop[piece]}"
            raise PlanMismatchError(
                f"pack {packs[row]} of dataset {found.dataset_id[row]} takes the tokens from {found.start[piece]} to "
                f"{end} of sample {found.sample[piece]}, which has {tokens[piece]}: plan the samples as they are now"
            )

    def _check_totals(self, packs: list[int], found: PackBatch, sizes: NDArray[np.int64]) -> None:
        """Compare the tokens of each pack with what a plan without lengths says about it."""
        cu = found.piece_cu
        align = self._plan.align
        totals = np.add.reduceat(-(-sizes // align) * align, cu[:-1])
        longest = np.maximum.reduceat(sizes, cu[:-1])
        planned = self._plan.longest[packs]
        least, most = self._expected_totals(np.array(packs), found.dataset_id)
        wrong = (totals < least) | (totals > most) | (longest != planned)
        if wrong.any():
            row = int(wrong.argmax())
            expected = f"{most[row]}" if least[row] == most[row] else f"{least[row]} to {most[row]}"
            raise PlanMismatchError(
                f"pack {packs[row]} of dataset {found.dataset_id[row]} holds {totals[row]} tokens, its longest piece "
                f"{longest[row]}; the plan says {expected}, the longest {planned[row]}: one of its samples has another "
                "length than when it was planned. Attach the lengths (plan.with_lengths) to learn which, or plan the "
                "samples as they are now"
            )

    def _expected_totals(
        self, packs: NDArray[np.int64], datasets: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The least and the most tokens that each pack may hold."""
        plan = self._plan
        most = np.full(len(packs), plan.max_length)
        if plan.mode != "hard":
            # The columns do not say how full a pack of whole samples is.
            return np.ones_like(most), most
        if plan.drop_last:
            return most, most
        first = len(plan) - plan.packs_repeated
        # Those behind are the first packs again.
        packs = np.where(packs < first, packs, (packs - first) % first)
        if plan.global_pack or len(plan.num_samples) == 1:
            most = np.minimum(most, plan.num_tokens - packs * plan.max_length)
            return most, most
        # Of several datasets, only the last pack of each may be short, and the plan does not say how short.
        following = np.minimum(packs + 1, first - 1)
        is_last = (packs + 1 == first) | (plan.dataset_id[following] != datasets)
        return np.where(is_last, 1, most), most


def _row_of(found: PackBatch, piece: int) -> int:
    """Which of the packs a piece is in."""
    return int(np.searchsorted(found.piece_cu, piece, side="right")) - 1


# ---- What a dataset may be ----

# Packages whose tables look like datasets: `len` gives the number of rows.
_TABLES = ("pandas", "polars", "pyarrow")


def _as_datasets(datasets: Any, num_samples: tuple[int, ...]) -> tuple[SampleSource, ...]:
    """Tell one dataset from several, and check them against the plan.

    Raises:
        InvalidTypeError: Something is no dataset.
        PlanMismatchError: The number of datasets, or of samples in one, is not the plan's.
    """
    several = isinstance(datasets, list | tuple) and not _holds_samples(datasets, num_samples)
    found: tuple[Any, ...] = tuple(datasets) if several else (datasets,)
    # If there are as many "datasets" as the plan has samples, they may be samples of a wrong type.
    hint = ""
    if several and num_samples == (len(found),):
        hint = (
            f"; or, if these are the samples of one dataset: a sample is a dict or one-dimensional token ids, which "
            f"are integers, and the first is {_described(found[0])}"
        )
    for number, dataset in enumerate(found):
        if isinstance(dataset, torch.Tensor) and dataset.is_nested:
            raise InvalidTypeError(
                f"dataset {number} is a nested tensor, which holds samples of its own: give the list of them, as "
                f"unbind() returns it{hint}"
            )
        if _is_row(dataset):
            raise InvalidTypeError(
                f"dataset {number} is {format_type(dataset)} of one dimension, which is one sample: a dataset of this "
                f"sample alone is a list of it; several datasets are a list of datasets{hint}"
            )
        if isinstance(dataset, str | os.PathLike):
            raise InvalidTypeError(
                f"dataset {number} is {format_type(dataset)}, and no dataset: "
                f"td.packing.open_samples({os.fspath(dataset)!r}) opens files and folders{hint}"
            )
        if _is_stream(dataset):
            raise InvalidTypeError(
                f"dataset {number} is {format_type(dataset)}, which gives samples in an order of its own, and packs "
                "ask for them by number: td.PackedStream packs them as they come. Or give a map-style dataset, as HF's "
                f"load_dataset gives without streaming=True, or a list of the samples{hint}"
            )
        usable = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if not usable or isinstance(dataset, Mapping | bytes):
            raise InvalidTypeError(
                f"dataset {number} is {format_type(dataset)}: a dataset has a length and gives "
                f"samples by their numbers; several datasets are a list{hint}"
            )
        if type(dataset).__module__.partition(".")[0] in _TABLES and hasattr(dataset, "columns"):
            raise InvalidTypeError(
                f"dataset {number} is {format_type(dataset)}, which gives columns by numbers or names, and no "
                "samples: give a datasets.Dataset of it, or a list of its token ids"
            )
        if (form := _table_format(dataset)) is not None:
            raise InvalidTypeError(
                f"dataset {number} is {format_type(dataset)} with the format {form!r}, in which it gives tables "
                "and no rows: pass dataset.with_format(None), or 'numpy' or 'torch'"
            )
    if len(found) != len(num_samples):
        raise PlanMismatchError(
            f"the plan was made for {format_count(len(num_samples), 'dataset')}, and "
            f"{format_count(len(found), 'dataset')} {'was' if len(found) == 1 else 'were'} given: pass those that "
            f"were planned, in their order{hint}"
        )
    for number, (dataset, expected) in enumerate(zip(found, num_samples, strict=True)):
        if len(dataset) != expected:
            raise PlanMismatchError(
                f"dataset {number} has {format_count(len(dataset), 'sample')}, the plan was made for {expected}: "
                "pass the dataset that was planned, or plan this one"
            )
    return found


def _described(sample: Any) -> str:
    """What a sample is that is none."""
    if isinstance(sample, list | tuple) and sample:
        return f"{format_type(sample)} of {type(sample[0]).__name__}"
    if isinstance(sample, torch.Tensor) and sample.is_nested:
        return "a nested tensor"
    if isinstance(sample, np.ndarray | torch.Tensor) and sample.ndim > 1:
        return f"{format_type(sample)} of shape {tuple(sample.shape)}; {SHAPE_ADVICE}"
    return format_type(sample)


def _is_stream(dataset: Any) -> bool:
    """Whether a dataset can only be iterated over."""
    if isinstance(dataset, IterableDataset):
        # Torch gives it a __getitem__, which raises.
        return True
    if isinstance(dataset, Mapping):
        return False
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")


def _table_format(dataset: Any) -> str | None:
    """The format of a HF `Dataset` whose rows are tables, or None for any other dataset."""
    if type(dataset).__module__.partition(".")[0] != "datasets":
        return None
    described = getattr(dataset, "format", None)
    form = described["type"] if isinstance(described, Mapping) else None
    return form if form in ("arrow", "polars") else None


def _holds_samples(items: Sequence[Any], num_samples: tuple[int, ...]) -> bool:
    """Whether a list holds the samples of one dataset rather than datasets."""
    for item in items:
        if isinstance(item, Mapping):
            return True
        if isinstance(item, np.ndarray | torch.Tensor):
            return _is_row(item)
        if not isinstance(item, list | tuple):
            return False
        if item:
            return isinstance(item[0], int | np.integer)
    # Nothing but empty lists: each may be a sample or a dataset without samples.
    return num_samples == (len(items),)


def _is_row(value: Any) -> bool:
    """Whether an array holds the tokens of one sample; one of objects or of rows holds samples."""
    return (
        isinstance(value, np.ndarray | torch.Tensor) and value.ndim == 1 and value.dtype != np.dtype(object)
    )
