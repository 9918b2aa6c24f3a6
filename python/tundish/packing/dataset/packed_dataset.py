"""`PackedDataset`: the packs of a plan, or of a mix of plans, as training items."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset

from tundish.errors import (
    InvalidInputError,
    InvalidTypeError,
    NoSuchPackError,
    PlanMismatchError,
    format_count,
    format_integer,
    format_type,
)
from tundish.packing.dataset.custom_positions import Positions
from tundish.packing.dataset.item_builder import ItemBuilder
from tundish.packing.dataset.pack_reader import PackReader
from tundish.packing.dataset.row_reader import RowReader
from tundish.packing.dataset.sample_keys import Padding
from tundish.packing.dataset.samples import SampleSource
from tundish.packing.mixing import PackMix
from tundish.packing.plan import PackPlan

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

    If the plan was made with `align`, each piece is padded to a multiple of it, but in datasets of mode "hard". The
    padding is `pad_token_id` in `input_ids`, -100 in `labels`, and the padding value in a column. It counts as part of
    its piece in `position_ids`, `cu_seqlens` and `max_seqlen`. With causal attention no token before it sees it.

    A sample is a mapping with `input_ids` (a row of a HF `Dataset` is one), or a plain one-dimensional array, tensor or
    sequence of integers. A mapping may have `labels`, and the masks `completion_mask`, `assistant_masks` and
    `loss_mask`: a token is learned where all masks are 1. `attention_mask` of ones, `token_type_ids` of zeros,
    `length`, `num_tokens`, `text`, `messages`, `prompt` and `completion` are left out. Any other key is refused unless
    `columns` or `sample_columns` names it. The value None counts as no value. Samples whose length disagrees with the
    plan are refused when they are read. If the plan has lengths, each sample is compared with its own. Otherwise the
    offsets, the pack's total and its longest piece are compared.

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
        rows = RowReader(columns, sample_columns)
        builder = ItemBuilder(
            rows.columns,
            rows.sample_columns,
            mask_first_token=mask_first_token,
            positions=positions,
            pad_token_id=pad_token_id,
        )
        if isinstance(plan, PackMix):
            has_options = any((mask_first_token, pad_token_id, columns, sample_columns, positions))
            self._readers = _readers_of_mix(datasets, plan, rows, builder, has_options=has_options)
        else:
            self._readers = [PackReader(datasets, plan, rows, builder)]
        self.columns = self._readers[0].rows.columns
        self.sample_columns = self._readers[0].rows.sample_columns
        self.datasets = tuple(dataset for reader in self._readers for dataset in reader.datasets)

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
        if not isinstance(self.plan, PackMix):
            return self._readers[0].items(packs)
        plans, numbers = (found.tolist() for found in self.plan.lookup(packs))
        items: list[dict[str, Any]] = [{}] * len(packs)
        # Each plan is asked once for all of its packs.
        for plan in sorted(set(plans)):
            places = [place for place, of in enumerate(plans) if of == plan]
            found = self._readers[plan].items([numbers[place] for place in places])
            for place, item in zip(places, found, strict=True):
                items[place] = item
        return items

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


def _readers_of_mix(
    datasets: Any, mix: PackMix, rows: RowReader, builder: ItemBuilder, *, has_options: bool
) -> list[PackReader]:
    """The reader of each plan of a mix. `has_options` tells of options, which cannot change a given `PackedDataset`."""
    plans = mix.plans
    if not isinstance(datasets, list | tuple):
        raise InvalidTypeError(
            f"datasets is {format_type(datasets)}: give a list, for a mix, of what each of its plans was made for"
        )
    if len(datasets) != len(plans):
        raise PlanMismatchError(
            f"the mix has {format_count(len(plans), 'plan')}, and {len(datasets)} datasets are given: give a list of "
            "what each plan was made for, in the order of the mix"
        )
    readers = []
    for number, (given, plan) in enumerate(zip(datasets, plans, strict=True)):
        if not isinstance(given, PackedDataset):
            readers.append(PackReader(given, plan, rows, builder))
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
    first = readers[0].rows
    for number, reader in enumerate(readers):
        if (reader.rows.columns, reader.rows.sample_columns) != (first.columns, first.sample_columns):
            raise InvalidInputError(
                f"datasets[{number}] has other columns or sample_columns than datasets[0]: a batch has packs of both, "
                "so give both the same"
            )
    return readers
