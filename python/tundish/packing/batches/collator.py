"""`PackedCollator`: items of a `PackedDataset` as the keyword arguments of a transformers model.

Invariants: without padding, columns and `use_cache`, a batch equals that of transformers' `DataCollatorWithFlattening`,
which gets each piece as a feature of its own. Padding is one more piece, the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from tundish.errors import InvalidInputError, InvalidTypeError, format_count, format_type
from tundish.packing.arguments import as_integer, as_optional_integer, check_choice, check_flag
from tundish.packing.batches.loss_weights import token_weights
from tundish.packing.item import IGNORED_LABEL, collected
from tundish.packing.mixing import PackMix
from tundish.packing.plan import PackPlan
from tundish.packing.samples import COLUMN_PADDING, MADE_KEYS

Attention = Literal["none", "mask", "flex"]
LossWeights = Literal["tokens", "samples"]

_TENSOR_KEYS = ("input_ids", "labels", "position_ids", "cu_seqlens")
_ITEM_KEYS = (*_TENSOR_KEYS, "max_seqlen")
_DATASET_ID = "dataset_id"
# Beside them, rows of `tundish.hf.pack_dataset` have the tokens of each piece, for TRL.
_SEQ_LENGTHS = "seq_lengths"
# The largest bound that int32 holds.
_MOST_TOKENS = 2**31 - 1
_INTEGERS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))


class PackedCollator:
    """The `collate_fn` that lays the packs of a batch end to end in one row.

    | key | type | when |
    |---|---|---|
    | `input_ids`, `labels` | int64, (1, tokens) | always |
    | `use_cache` | False | unless `use_cache=None` |
    | `position_ids` | int64, (1, tokens), or (rows, 1, tokens) with the dataset's `positions` | always |
    | `seq_idx` | int32, (1, tokens): number of the piece in the batch | `return_seq_idx=True` |
    | `dataset_id` | int64, (pieces,): number of the dataset of each piece | `return_dataset_id=True` |
    | `cu_seq_lens_q`, `cu_seq_lens_k` | int32, (pieces + 1,) | `return_flash_attn_kwargs=True` |
    | `max_length_q`, `max_length_k` | int | `return_flash_attn_kwargs=True` |
    | `attention_mask` | float32, (1, 1, tokens, tokens): 0, or the least float32 | `attention="mask"` |
    | `attention_mask` | `BlockMask` of torch's FlexAttention, (1, 1, tokens, tokens) | `attention="flex"` |
    | `document_ids` | int32, (1, tokens): number of the piece in the batch | `attention="flex"` |
    | `loss_weights` | float32, (1, tokens): weight of each label | `loss_weights` is given |
    | `num_unlearned_pieces` | int: pieces without a token to learn from | `loss_weights` is given |
    | each of the dataset's `columns` | as in the items, (1, tokens) | the dataset has columns |
    | each of its `sample_columns` | tensor or list | an item has it |

    Values of `sample_columns` are in the order of the items: tensors of one dtype, and of one shape but for the first
    dimension, are concatenated. Otherwise the batch has one list, in which an item's list counts entry by entry, and an
    item's tensor as one.

    The label of each piece's first token is -100, whatever the dataset's `mask_first_token` is. The model shifts labels
    by one over the whole row, and would otherwise learn to predict it from another piece.

    The row has no padding unless `pad_to` or `pad_to_multiple_of` asks for it. The padding is one more piece after the
    last, so that no piece sees it. Its `input_ids` are `pad_token_id`, its `labels` -100, its `dataset_id` is -1, and
    columns have their padding values. Its `position_ids` count from 0, or from where those of the pieces begin.

    Args:
        return_flash_attn_kwargs: Give the bounds to flash attention, so that it does not compute them from
            `position_ids` in each layer.
        return_seq_idx: Give the number of the piece that each token is in, which Mamba-like layers take.
        return_dataset_id: Give the number of the dataset that each piece is of, as `PackedDataset` numbers them, to
            report the loss of each. Take it out of the batch before the model gets it.
        use_cache: False is put into the batch, because transformers' models turn a cache on, and take the row for one
            long sequence then. None leaves it out, for models whose `forward` has no such argument.
        attention: "none" leaves it to the model to derive the pieces from positions or bounds. "mask" gives a causal
            mask in which pieces do not see each other, for models that ignore positions; it is added to the scores. A
            function that takes booleans gets `batch["attention_mask"] == 0`.
            "flex" gives it as a `BlockMask` for FlexAttention, which `to` moves to a device with its document ids.
        loss_weights: "tokens" gives every learned token the weight 1. "samples" gives the learned tokens of a piece
            weights that sum to 1, so that every sample counts alike whatever its length. A sample that is cut counts
            once for each of its pieces. None gives no weights. See `td.packing.weighted_loss`.
        pad_to: Tokens of every row, so that compiled models and CUDA graphs see one shape: packs of a batch ×
            `max_length` of the plan, which `for_plan` computes. A batch with more tokens is refused.
        pad_to_multiple_of: Pad each row to the next multiple of so many tokens; not with `pad_to`.
        pad_pieces_to: Pieces that `cu_seq_lens_q`, `cu_seq_lens_k` and `dataset_id` have room for, the padding among
            them, so that their shapes are fixed, too. The bounds are (pad_pieces_to + 1,), and end with repetitions of
            the last one, which are pieces without tokens; `max_length_q` and `max_length_k` are `pad_to`. It needs
            `pad_to`, and `return_flash_attn_kwargs` or `return_dataset_id`.
        pad_token_id: The token of the padding.

    Raises:
        InvalidTypeError: An option is of a wrong type.
        InvalidInputError: An option is below 1, `pad_token_id` below 0, `attention` or `loss_weights` is another word,
            `use_cache` is True, or options exclude or need each other.

    Example:
        >>> import tundish as td
        >>> dataset = td.PackedDataset([[1, 2, 3], [4, 5, 6, 7, 8]], td.pack([3, 5], max_length=4))
        >>> batch = td.PackedCollator()(dataset.__getitems__([0, 1]))
        >>> batch["input_ids"].tolist(), batch["position_ids"].tolist()
        ([[1, 2, 3, 4, 5, 6, 7, 8]], [[0, 1, 2, 0, 0, 1, 2, 3]])
    """

    def __init__(
        self,
        *,
        return_flash_attn_kwargs: bool = False,
        return_seq_idx: bool = False,
        return_dataset_id: bool = False,
        use_cache: Literal[False] | None = False,
        attention: Attention = "none",
        loss_weights: LossWeights | None = None,
        pad_to: int | None = None,
        pad_to_multiple_of: int | None = None,
        pad_pieces_to: int | None = None,
        pad_token_id: int = 0,
    ) -> None:
        check_flag(return_flash_attn_kwargs, "return_flash_attn_kwargs")
        check_flag(return_seq_idx, "return_seq_idx")
        check_flag(return_dataset_id, "return_dataset_id")
        if use_cache is not None and use_cache is not False:
            raise InvalidInputError(
                f"use_cache is {use_cache!r:.100}: with a cache the model would take the pieces of a row for one "
                "sequence; give False, or None to leave it out of the batch"
            )
        check_choice(attention, "attention", get_args(Attention))
        if loss_weights is not None:
            check_choice(loss_weights, "loss_weights", get_args(LossWeights))
        self.return_flash_attn_kwargs = return_flash_attn_kwargs
        self.return_seq_idx = return_seq_idx
        self.return_dataset_id = return_dataset_id
        self.use_cache = use_cache
        self.attention = attention
        self.loss_weights = loss_weights
        self.pad_to = as_optional_integer(pad_to, "pad_to", 1, _MOST_TOKENS)
        self.pad_to_multiple_of = as_optional_integer(
            pad_to_multiple_of, "pad_to_multiple_of", 1, _MOST_TOKENS
        )
        self.pad_pieces_to = as_optional_integer(pad_pieces_to, "pad_pieces_to", 1, _MOST_TOKENS)
        self.pad_token_id = as_integer(pad_token_id, "pad_token_id", 0, 2**63 - 1)
        if self.pad_to and self.pad_to_multiple_of:
            raise InvalidInputError("pad_to and pad_to_multiple_of exclude each other: give one of them")
        if self.pad_pieces_to and not (self.pad_to and (return_flash_attn_kwargs or return_dataset_id)):
            raise InvalidInputError(
                "pad_pieces_to pads the bounds of flash attention and dataset_id in rows of one length: give pad_to, "
                "and return_flash_attn_kwargs=True or return_dataset_id=True, too"
            )

    @classmethod
    def for_plan(cls, plan: PackPlan | PackMix, batch_size: int, **options: Any) -> Self:
        """Return a collator whose batches of a plan or mix all have one shape.

        It sets `pad_to` to `batch_size` times the plan's `max_length`. With `return_flash_attn_kwargs=True` or
        `return_dataset_id=True` it also sets `pad_pieces_to` to the most pieces that `batch_size` packs have, and one
        for the padding. Values of `sample_columns` keep their shapes.

        Args:
            plan: The plan, or the mix.
            batch_size: Packs of a batch at most, at least 1: those of one rank.
            **options: The other options of `PackedCollator`.

        Returns:
            The collator.

        Raises:
            InvalidTypeError: `plan` is no plan, or an option is of a wrong type.
            InvalidInputError: `batch_size` is below 1, the row would have 2³¹ tokens or more, an option is one of the
                three that pad, or is refused by `PackedCollator`.

        Example:
            >>> import tundish as td
            >>> samples = [[1, 2, 3], [4, 5], [6, 7, 8]]
            >>> plan = td.pack([3, 2, 3], max_length=5, mode="sequential")
            >>> collator = td.PackedCollator.for_plan(plan, batch_size=1, return_flash_attn_kwargs=True)
            >>> collator
            PackedCollator(return_flash_attn_kwargs=True, pad_to=5, pad_pieces_to=3)
            >>> dataset = td.PackedDataset(samples, plan)
            >>> [collator([item])["cu_seq_lens_q"].tolist() for item in dataset]
            [[0, 3, 5, 5], [0, 3, 5, 5]]
        """
        if not isinstance(plan, PackPlan | PackMix):
            raise InvalidTypeError(
                f"plan is {format_type(plan)}: give a PackPlan, as pack returns it, or a PackMix"
            )
        if made := sorted(options.keys() & {"pad_to", "pad_to_multiple_of", "pad_pieces_to"}):
            raise InvalidInputError(f"for_plan computes what {' and '.join(made)} would say: leave it out")
        packs = as_integer(batch_size, "batch_size", 1, _MOST_TOKENS)
        tokens = packs * plan.max_length
        if tokens > _MOST_TOKENS:
            raise InvalidInputError(
                f"batch_size {packs} x max_length {plan.max_length} = {tokens} tokens a row; there may be "
                f"{_MOST_TOKENS}: choose a smaller batch_size"
            )
        pieces = None
        if options.get("return_flash_attn_kwargs") or options.get("return_dataset_id"):
            plans = plan.plans if isinstance(plan, PackMix) else (plan,)
            pieces = packs * max(int(own.stats()["max_pieces_per_pack"]) for own in plans) + 1
        return cls(pad_to=tokens, pad_pieces_to=pieces, **options)

    def __repr__(self) -> str:
        given = [
            f"{name}={value!r}" for name, value in vars(self).items() if value not in (None, False, 0, "none")
        ]
        if self.use_cache is None:
            given.append("use_cache=None")
        return f"PackedCollator({', '.join(given)})"

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the model's arguments for a batch of items.

        Args:
            items: Items of a `PackedDataset`, or rows of `tundish.hf.pack_dataset`.

        Returns:
            The arguments by name, as in the table above.

        Raises:
            InvalidInputError: There are no items; an item's labels, positions, bounds or columns do not fit its
                tokens; items have different columns; or they have more tokens than `pad_to` or pieces than
                `pad_pieces_to`.
            InvalidTypeError: An item does not come from a `PackedDataset`, or holds something else than
                one-dimensional integers on the CPU.

        Example:
            >>> import tundish as td
            >>> dataset = td.PackedDataset([[1, 2, 3], [4, 5, 6, 7, 8]], td.pack([3, 5], max_length=4))
            >>> td.PackedCollator(return_seq_idx=True)([dataset[0]])["seq_idx"].tolist()
            [[0, 0, 0, 1]]
        """
        items = _with_tensors(items)
        _check_items(items)
        # Small work runs in numpy: an operation of torch takes several times as long to start.
        sizes = np.concatenate([np.diff(item["cu_seqlens"].numpy()) for item in items], dtype=np.int64)
        joined = np.append(0, sizes.cumsum())
        before = int(joined[-1])
        padding = self._padding(before, items)
        pieces = joined
        if padding:
            joined = np.append(joined, before + padding)
            sizes = np.append(sizes, padding)
        if joined[-1] > _MOST_TOKENS:
            raise InvalidInputError(
                f"the batch has {joined[-1]} tokens, and the int32 bounds of its pieces end at {_MOST_TOKENS}"
            )
        cu_seqlens = bounds = joined.astype(np.int32)
        if self.pad_pieces_to:
            bounds = _padded_bounds(cu_seqlens, self.pad_pieces_to, padding)
        labels = _row(items, "labels", padding, IGNORED_LABEL)
        labels.numpy()[0, cu_seqlens[:-1]] = IGNORED_LABEL
        batch: dict[str, Any] = {
            "input_ids": _row(items, "input_ids", padding, self.pad_token_id),
            "labels": labels,
            "position_ids": _row(items, "position_ids", padding, 0),
        }
        if padding:
            # The padding begins where pieces begin: a model tells pieces by their least position.
            positions = batch["position_ids"]
            first = positions[..., pieces[:-1]].amin(-1, keepdim=True) if before else 0
            positions[..., before:] = first + torch.arange(padding, device="cpu")
        if self.use_cache is not None:
            batch["use_cache"] = self.use_cache
        if self.return_seq_idx:
            batch["seq_idx"] = _piece_numbers(sizes)
        if self.return_dataset_id:
            batch[_DATASET_ID] = _dataset_ids(items, len(bounds) - 1)
        if self.loss_weights:
            learned = labels.numpy()[0] != IGNORED_LABEL
            weights, unlearned = token_weights(learned, pieces, self.loss_weights)
            batch["loss_weights"] = torch.from_numpy(weights)[None]
            batch["num_unlearned_pieces"] = unlearned
        if self.attention != "none":
            # It takes a second to import FlexAttention.
            from tundish.packing.batches.attention import PackedBlockMask, causal_mask

            document_ids = _piece_numbers(sizes)
            if self.attention == "mask":
                batch["attention_mask"] = causal_mask(document_ids)
            else:
                batch["document_ids"] = document_ids
                batch["attention_mask"] = PackedBlockMask.of(document_ids)
        if self.return_flash_attn_kwargs:
            longest = max(padding, *(item["max_seqlen"] for item in items))
            if self.pad_pieces_to:
                longest = int(bounds[-1])
            batch |= {
                "cu_seq_lens_q": torch.from_numpy(bounds),
                "cu_seq_lens_k": torch.from_numpy(bounds.copy()),
                "max_length_q": longest,
                "max_length_k": longest,
            }
        if any(len(item) > len(_ITEM_KEYS) + (_DATASET_ID in item) for item in items):
            _carry(batch, items, padding)
        return batch

    def _padding(self, tokens: int, items: Sequence[Mapping[str, Any]]) -> int:
        """Tokens of padding that a row of so many tokens gets."""
        if self.pad_to_multiple_of:
            return -tokens % self.pad_to_multiple_of
        if not self.pad_to:
            return 0
        if tokens > self.pad_to:
            sizes = [len(item["input_ids"]) for item in items]
            longest = max(sizes)
            raise InvalidInputError(
                f"the batch has {tokens} tokens, and pad_to is {self.pad_to}; its longest pack, item "
                f"{sizes.index(longest)}, has {longest}: pad_to is the number of packs in a batch times the plan's "
                "max_length"
            )
        return self.pad_to - tokens


def _padded_bounds(bounds: NDArray[np.int32], pieces: int, padding: int) -> NDArray[np.int32]:
    """The bounds of so many pieces, the last ones without tokens."""
    missing = pieces + 1 - len(bounds)
    if missing < 0:
        own = " with its padding" if padding else ""
        raise InvalidInputError(
            f"the batch has {format_count(len(bounds) - 1, 'piece')}{own}, and pad_pieces_to is {pieces}: limit the "
            "pieces of a pack with td.pack(..., max_samples=...), and add 1 for the padding"
        )
    return np.pad(bounds, (0, missing), mode="edge")


def _piece_numbers(sizes: NDArray[np.int64]) -> torch.Tensor:
    """The number of the piece of each token, int32, (1, tokens)."""
    return torch.from_numpy(np.arange(len(sizes), dtype=np.int32).repeat(sizes))[None]


def _dataset_ids(items: Sequence[Mapping[str, Any]], pieces: int) -> torch.Tensor:
    """The number of the dataset of each piece, int64, (pieces,); -1 for padding."""
    for number, item in enumerate(items):
        found = item.get(_DATASET_ID)
        count = len(item["cu_seqlens"]) - 1
        if not isinstance(found, torch.Tensor) or found.shape != (count,):
            raise InvalidInputError(
                f"item {number} of the batch has no dataset_id for each of its {count} pieces: give whole items of a "
                "PackedDataset, or leave out return_dataset_id"
            )
    own = torch.cat([item[_DATASET_ID] for item in items])
    return functional.pad(own, (0, pieces - len(own)), value=-1)


def _row(items: Sequence[Mapping[str, Any]], key: str, padding: int, value: int) -> torch.Tensor:
    """The items' tensors end to end, int64, (…, 1, tokens), with so many times the value after them."""
    # Items may hold integers of any width; `long` does not copy int64.
    joined = torch.cat([item[key] for item in items], -1).long().unsqueeze(-2)
    return functional.pad(joined, (0, padding), value=value) if padding else joined


def _with_tensors(items: Any) -> Any:
    """The items with tensors in the place of numpy arrays, which rows of `tundish.hf.pack_dataset` hold."""
    is_row = isinstance(items, list) and items and isinstance(items[0], Mapping)
    if not is_row or not isinstance(items[0].get("input_ids"), np.ndarray):
        return items
    return [
        {
            key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for key, value in item.items()
        }
        for item in items
    ]


def _carry(batch: dict[str, Any], items: Sequence[Mapping[str, Any]], padding: int) -> None:
    """Add the columns and the sample columns of the items to their batch."""
    columns = items[0].get(COLUMN_PADDING, {})
    known = {*_ITEM_KEYS, _DATASET_ID, _SEQ_LENGTHS, COLUMN_PADDING, *columns}
    values: dict[str, list[Any]] = {}
    for number, item in enumerate(items):
        own = item.get(COLUMN_PADDING, {})
        if own.keys() != columns.keys():
            raise InvalidInputError(
                f"item {number} of the batch has the columns {list(own)}, and item 0 has {list(columns)}: batches are "
                "made of items with the same columns"
            )
        for key in columns:
            _check_column(key, item, items[0], number)
        for key, value in item.items():
            if key in known:
                continue
            if key in MADE_KEYS or not isinstance(value, torch.Tensor | list):
                raise InvalidInputError(
                    f"item {number} of the batch has {key!r}, which no PackedDataset gives: remove it, or let "
                    "PackedDataset carry it by columns or sample_columns"
                )
            values.setdefault(key, []).append(value)
    for key, value in columns.items():
        column = torch.cat([item[key] for item in items])
        if padding:
            column = torch.cat([column, column.new_full((padding,), value)])
        batch[key] = column[None]
    for key, parts in values.items():
        batch[key] = _joined_values(parts)


def _check_column(key: str, item: Mapping[str, Any], first: Mapping[str, Any], number: int) -> None:
    """Refuse a column that was changed after the `PackedDataset`."""
    column, tokens = item.get(key), tuple(item["input_ids"].shape)
    if not isinstance(column, torch.Tensor) or column.layout is not torch.strided or not column.is_cpu:
        wrong = "is no dense tensor on the CPU"
    elif tuple(column.shape) != tokens:
        wrong = f"has the shape {tuple(column.shape)}, and its input_ids {tokens}"
    elif column.dtype != first[key].dtype:
        names = [str(tensor.dtype).removeprefix("torch.") for tensor in (column, first[key])]
        wrong = f"has the dtype {names[0]}, and that of item 0 {names[1]}"
    else:
        return
    raise InvalidInputError(f"{key} of item {number} of the batch {wrong}: a column has one number a token")


def _joined_values(values: list[Any]) -> Any:
    """One tensor, or one list of all entries."""
    joined = collected(values)
    if isinstance(joined, torch.Tensor):
        return joined
    return [entry for value in joined for entry in (value if isinstance(value, list) else [value])]


def _check_items(items: Any) -> None:
    if not isinstance(items, Sequence) or isinstance(items, str | bytes):
        raise InvalidTypeError(
            f"the batch is {format_type(items)}: give a list of items of a PackedDataset. PackedCollator is a "
            "collate_fn, which the DataLoader calls with such a list"
        )
    if not items:
        raise InvalidInputError("a batch needs at least one item")
    for number, item in enumerate(items):
        if not isinstance(item, Mapping):
            wrong = f"is {format_type(item)}"
        elif missing := [key for key in _ITEM_KEYS if key not in item]:
            wrong = f"lacks {', '.join(missing)}"
        elif others := [key for key in _TENSOR_KEYS if not isinstance(item[key], torch.Tensor)]:
            wrong = f"has no tensor as its {', '.join(others)}"
        else:
            _check_tensors(item, f"item {number} of the batch has")
            longest = item["max_seqlen"]
            if not hasattr(longest, "__index__"):
                raise InvalidTypeError(
                    f"item {number} of the batch has the max_seqlen {longest!r:.100}, which is {format_type(longest)}: "
                    "it is an integer"
                )
            rows, expected = (tuple(one["position_ids"].shape[:-1]) for one in (item, items[0]))
            if rows != expected:
                raise InvalidInputError(
                    f"item {number} of the batch has position_ids of shape {tuple(item['position_ids'].shape)}, and "
                    f"those of item 0 begin with {expected}: a batch has items whose positions have as many rows"
                )
            continue
        raise InvalidTypeError(
            f"item {number} of the batch {wrong}: PackedCollator takes whole items of a PackedDataset. (The Trainer of "
            "transformers takes out what the model's forward does not name: give it remove_unused_columns=False)"
        )


def _check_tensors(item: Mapping[str, Any], found: str) -> None:
    """Refuse tensors that do not fit together, because they were changed after the `PackedDataset`."""
    for key in _TENSOR_KEYS:
        tensor = item[key]
        if tensor.is_nested:
            wrong = "nested: items are collated one by one, and have one dimension"
        elif tensor.dtype not in _INTEGERS:
            wrong = f"of dtype {str(tensor.dtype).removeprefix('torch.')}: they are integers"
        elif tensor.ndim not in ((1, 2) if key == "position_ids" else (1,)):
            wrong = f"of shape {tuple(tensor.shape)}: items are collated one by one, and have one dimension"
        elif tensor.layout is not torch.strided or not tensor.is_cpu:
            where = (
                tensor.device if tensor.layout is torch.strided else str(tensor.layout).removeprefix("torch.")
            )
            wrong = (
                f"on {where}: batches are made of dense tensors on the CPU, and sent to a device afterwards"
            )
        else:
            continue
        raise InvalidTypeError(f"{found} {key} {wrong}")
    tokens = len(item["input_ids"])
    for key in ("labels", "position_ids"):
        count = item[key].shape[-1]
        if count != tokens:
            raise InvalidInputError(f"{found} {tokens} input_ids but {count} {key}: they must be as many")
    bounds = item["cu_seqlens"].numpy()
    if not len(bounds) or bounds[0] or bounds[-1] != tokens or (bounds[1:] <= bounds[:-1]).any():
        few = bounds.tolist() if len(bounds) <= 8 else [*bounds[:4].tolist(), "…", int(bounds[-1])]
        raise InvalidInputError(
            f"{found} the cu_seqlens [{', '.join(map(str, few))}], which are no bounds of pieces of {tokens} tokens: "
            f"those rise from 0 to {tokens}"
        )
