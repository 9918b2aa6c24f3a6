"""`pack_dataset`: the packs of a dataset as a Hugging Face `Dataset`, and of a stream as an `IterableDataset`.

The `Dataset` holds the numbers of the packs, and a transform that reads packs when their rows are asked for. Nothing is
copied, mapped or cached.

Invariants: every column holds the same numbers, so that columns are removed and selected as those of any `Dataset`.
Unless it is asked otherwise, the label of each piece's first token is -100, so that rows are right under any collator
that keeps the bounds of pieces.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from tundish.errors import InvalidInputError, InvalidTypeError, format_type, missing_extra
from tundish.packing import PackedDataset, PackedStream, PackPlan, lengths, open_samples, pack

if TYPE_CHECKING:
    import datasets

__all__ = ["pack_dataset"]

# TRL's packing strategies, as arguments of `pack`.
_STRATEGIES: dict[str, dict[str, Any]] = {
    "bfd": {"mode": "best_fit", "overlong": "truncate"},
    "bfd_split": {"mode": "best_fit", "overlong": "split"},
    "wrapped": {"mode": "hard", "drop_last": False},
}

# The same of a stream, whose lengths are not known beforehand.
_STREAM_STRATEGIES: dict[str, dict[str, Any]] = {
    "bfd": {"mode": "ordered", "overlong": "truncate"},
    "bfd_split": {"mode": "ordered", "overlong": "split"},
    "wrapped": {"mode": "hard", "drop_last": False},
}

# TRL's padding-free collator reads the lengths of the pieces under this name.
_SEQ_LENGTHS = "seq_lengths"
_IGNORED_LABEL = -100
# The options of `PackedDataset`.
_ITEM_OPTIONS = ("mask_first_token", "pad_token_id", "columns", "sample_columns", "drop_columns", "positions")
_COLUMNS = (
    "input_ids",
    "labels",
    "position_ids",
    "cu_seqlens",
    "max_seqlen",
    "dataset_id",
    _SEQ_LENGTHS,
)


def pack_dataset(
    dataset: Any,
    max_length: int | None = None,
    strategy: str | None = None,
    map_kwargs: Mapping[str, Any] | None = None,
    *,
    mode: str | None = None,
    seq_length: int | None = None,
    **options: Any,
) -> Any:
    """Return packs as a Hugging Face `Dataset`, which reads a pack when its row is asked for.

    Nothing is copied, mapped or cached, so the first row comes as soon as the samples are counted. The arguments up to
    `map_kwargs`, and `seq_length`, are those of TRL's function of this name.

    | column | row | read by |
    |---|---|---|
    | `input_ids`, `labels` | int64, (tokens,) | every collator |
    | `seq_lengths` | list: tokens of each piece | the padding-free collator of TRL |
    | `position_ids`, `cu_seqlens`, `max_seqlen`, `dataset_id` | as in `td.PackedDataset` | `td.PackedCollator` |
    | each of `columns` and `sample_columns` | as in `td.PackedDataset` | `td.PackedCollator` |

    Labels are -100 where a mask of the sample (`completion_mask`, `assistant_masks`, `loss_mask`) is 0, and at the
    first token of each piece. Arrays are numpy arrays.

    `DataCollatorWithFlattening` takes each row for one sequence, so that pieces would see each other. Use
    `td.PackedCollator`, which makes the batch that it makes of the pieces.

    Args:
        dataset: A `datasets.Dataset` with `input_ids` (`td.hf.tokenize` makes them), in the order of its `select` and
            `shuffle`; another source that `td.packing.lengths` reads; or a `td.PackedDataset`, whose packs are taken as
            they are. A `DatasetDict` gives a `DatasetDict`. A `datasets.IterableDataset` gives another one, packed by
            `td.PackedStream`.
        max_length: Tokens a pack, at least 1.
        strategy: A packing strategy of TRL in the place of `mode`. "bfd" is "best_fit" with `overlong="truncate"`,
            "bfd_split" the same with `overlong="split"`, and "wrapped" is "hard" with `drop_last=False`. Of a stream,
            the first two are "ordered".
        map_kwargs: Has no effect, because nothing is mapped.
        mode: As in `td.pack`, but by default "best_fit", and "ordered" of a stream: samples stay whole, as TRL packs.
        seq_length: TRL's name of `max_length`.
        **options: `pad_token_id`, `columns`, `sample_columns`, `drop_columns` and `positions` of `td.PackedDataset`;
            its `mask_first_token`, which is True here by default; and further arguments of `td.pack`, for example
            `seed`, `overlong` or `cache_dir`; of a stream, those of `td.PackedStream`.

    Returns:
        A `datasets.Dataset` with one row a pack. `select`, `shuffle`, `train_test_split`, `shard`, and removing and
        selecting columns work as usual. Columns cannot be renamed. `save_to_disk` raises. `sort`, `unique`,
        `to_parquet` and others see the numbers of the packs, not the packs: save the plan instead. A stream gives a
        `datasets.IterableDataset`, which one process reads.

    Raises:
        InvalidInputError: `max_length` is missing, `mode` and `strategy` are both given, or an argument is out of
            range. Or a sample is longer than a pack, or the dataset has a column that is not known.
        InvalidTypeError: An argument, or what the dataset holds, is of a wrong type.
        MissingExtraError: datasets is not installed.
        TundishError: As `td.pack`, `td.PackedDataset` and `td.PackedStream`.

    Example:
        >>> import datasets, tundish as td
        >>> samples = datasets.Dataset.from_dict({"input_ids": [[5, 2, 8], [7], [1, 4]]})
        >>> packs = td.hf.pack_dataset(samples, 4, mode="sequential")
        >>> packs["input_ids"][0].tolist(), packs["seq_lengths"][0]
        ([5, 2, 8, 7], [3, 1])
    """
    del map_kwargs
    try:
        import datasets
    except ImportError:
        missing_extra("hf", "datasets", "pack_dataset")
    found = {name: options.pop(name, None) for name in _ITEM_OPTIONS}
    named = {name: value for name, value in found.items() if value is not None}
    if isinstance(dataset, PackedDataset):
        given = {"max_length": max_length, "strategy": strategy, "mode": mode, "seq_length": seq_length}
        _refuse_given({**given, **named, **options})
        return _as_rows(dataset, mask_first_token=True)
    named.setdefault("mask_first_token", True)
    is_stream = isinstance(dataset, datasets.IterableDataset | datasets.IterableDatasetDict)
    strategies = _STREAM_STRATEGIES if is_stream else _STRATEGIES
    options |= _mode_options(mode, strategy, strategies, options)
    options["max_length"] = _one_max_length(max_length, seq_length)
    if isinstance(dataset, datasets.DatasetDict):
        return datasets.DatasetDict({name: _pack(split, named, options) for name, split in dataset.items()})
    if isinstance(dataset, datasets.IterableDatasetDict):
        return datasets.IterableDatasetDict(
            {name: _as_stream(split, named, options) for name, split in dataset.items()}
        )
    if is_stream:
        return _as_stream(dataset, named, options)
    return _pack(dataset, named, options)


def _refuse_given(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments beside a `PackedDataset`, which has its packs already."""
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise InvalidInputError(
            f"dataset is a PackedDataset, which has its packs already: leave out {', '.join(given)}, or give them to "
            "td.pack and to the PackedDataset"
        )


def _mode_options(
    mode: str | None,
    strategy: str | None,
    strategies: Mapping[str, dict[str, Any]],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """The arguments of `pack` that `mode` or `strategy` stands for."""
    if strategy is None:
        return {"mode": strategies["bfd"]["mode"] if mode is None else mode}
    if not isinstance(strategy, str) or strategy not in strategies:
        raise InvalidInputError(
            f"strategy is {strategy!r}; it must be one of {', '.join(map(repr, strategies))}, or use mode="
        )
    meant = strategies[strategy]
    if mode is not None:
        raise InvalidInputError(
            f"strategy={strategy!r} is TRL's name of mode={meant['mode']!r}, and mode={mode!r} is given too: leave one "
            "out"
        )
    for name in meant.keys() & options.keys():
        raise InvalidInputError(
            f"strategy={strategy!r} stands for {name}={meant[name]!r}, and {name}={options[name]!r} is given too: use "
            f"mode={meant['mode']!r} with {name}={options[name]!r}"
        )
    return meant


def _one_max_length(max_length: int | None, seq_length: int | None) -> int:
    if (max_length is None) == (seq_length is None):
        given = "is missing" if max_length is None else f"and seq_length={seq_length!r} are both given"
        raise InvalidInputError(
            f"max_length {given}: give the tokens of a pack once, for example max_length=4096"
        )
    return seq_length if max_length is None else max_length  # type: ignore[return-value]  # one is not None


def _pack(source: Any, named: Mapping[str, Any], options: Mapping[str, Any]) -> datasets.Dataset:
    """Return the packs of one dataset: `options` are those of `pack`, and `named` of `PackedDataset`."""
    # The labels of the items are masked already, if they shall be.
    return _as_rows(_packed_items(source, named, options), mask_first_token=False)


def _packed_items(source: Any, named: Mapping[str, Any], options: Mapping[str, Any]) -> PackedDataset:
    import datasets

    if not isinstance(source, datasets.Dataset):
        return PackedDataset(open_samples(source), pack(lengths(source), **options), **named)
    # A column `length` may be out of date, and counting lists in Arrow memory reads no token.
    plan: PackPlan = pack(lengths(source, "input_ids"), **options)
    shown = source.format
    if not shown["output_all_columns"] and shown["columns"] != source.column_names:
        source = source.select_columns(shown["columns"])
    if named.get("sample_columns"):
        return PackedDataset(source, plan, **named)
    # Refuses columns that are not known: `open_samples` would leave out those that are no lists of numbers.
    PackedDataset(source.with_format(None), plan, **named)
    # Refuses columns that are named and hold no numbers, which it would leave out, too.
    open_samples(source, columns=list(named.get("columns", ())))
    return PackedDataset(open_samples(source), plan, **named)


def _as_rows(packs: PackedDataset, *, mask_first_token: bool) -> datasets.Dataset:
    """Make the `Dataset` of the numbers of `packs`; `mask_first_token` masks labels that are not masked yet."""
    import datasets
    import pyarrow

    count = len(packs)
    # Reading a pack finds faults of the data now, and tells what the items hold.
    held = packs[0] if count else {}
    names = dict.fromkeys([*_COLUMNS, *held, *packs.sample_columns])
    rows = _PackRows(list(names), mask_first_token)
    table = pyarrow.table(dict.fromkeys(names, pyarrow.array(np.arange(count))))
    # No two datasets of packs have one fingerprint: none reads what another left in the cache of datasets.
    made = datasets.Dataset(table, fingerprint=uuid.uuid4().hex)
    made.set_transform(rows)
    # Afterwards, because `set_transform` pickles its argument to hash it, with all samples that are in memory.
    rows.packs = packs
    return made


def _as_stream(source: Any, named: Mapping[str, Any], options: Mapping[str, Any]) -> datasets.IterableDataset:
    """Make the `IterableDataset` of the packs of a stream."""
    import datasets

    # Refuses bad arguments now: the generator runs when the first row is asked for.
    PackedStream(source, **named, **options)
    return datasets.IterableDataset.from_generator(
        _stream_rows, gen_kwargs={"source": source, "named": dict(named), "options": dict(options)}
    )


def _stream_rows(source: Any, named: dict[str, Any], options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a stream's packs."""
    worker = get_worker_info()
    if worker is not None and worker.num_workers > 1:
        # The source would split itself over workers of which all but one are stopped.
        raise InvalidInputError(
            f"packs of a stream are read in {worker.num_workers} workers: set dataloader_num_workers to 0 or 1, or "
            "use td.PackedStream, which packs in each worker"
        )
    columns = named.get("columns", {})
    for item in PackedStream(source, **named, **options):
        yield {name: _row_value(item, name, columns) for name in dict.fromkeys([*_COLUMNS, *item])}


class _PackRows:
    """The transform of a `Dataset` of packs: turns their numbers into their rows."""

    packs: PackedDataset

    def __init__(self, names: Sequence[str], mask_first_token: bool) -> None:
        self._names = names
        self._mask_first_token = mask_first_token

    def __deepcopy__(self, memo: Any) -> _PackRows:
        # Methods of `Dataset` copy it with its transform, which never changes.
        return self

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Return the columns that the `Dataset` still has, for the packs whose numbers they hold."""
        if unknown := [name for name in batch if name not in self._names]:
            raise InvalidInputError(
                f"the packs have no column {unknown[0]!r}: their columns are {', '.join(self._names)}, which can be "
                "removed but not renamed, and none can be added. Rows that map wrote are read with with_format(None)"
            )
        numbers = next(iter(batch.values()), [])
        if numbers and not isinstance(numbers[0], int):
            raise InvalidTypeError(
                f"the rows of this Dataset hold {format_type(numbers[0])} and no numbers of packs, because map wrote "
                "them: read them with with_format(None)"
            )
        items = self.packs.__getitems__(numbers)
        if self._mask_first_token:
            for item in items:
                item["labels"][item["cu_seqlens"][:-1].long()] = _IGNORED_LABEL
        columns = self.packs.columns
        return {name: [_row_value(item, name, columns) for item in items] for name in batch}


def _row_value(item: Mapping[str, Any], name: str, columns: Mapping[str, Any]) -> Any:
    if name == _SEQ_LENGTHS:
        return item["cu_seqlens"].diff().tolist()
    value = item.get(name)
    # Collators copy tensors with a warning, and arrays without one.
    is_token_column = name in _COLUMNS or name in columns
    return value.numpy() if is_token_column and isinstance(value, torch.Tensor) else value
