"""Pieces of samples become a training item: tokens, labels, positions, bounds and columns.

Invariants: the tensors of an item own their memory and share none with others; only a list of `sample_columns` holds
the samples' own objects.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Callable, KeysView, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data._utils.collate import default_collate_fn_map

from tundish.errors import InvalidInputError, InvalidTypeError, format_type
from tundish.packing.arguments import as_integer, check_flag
from tundish.packing.samples import (
    COLUMN_PADDING,
    CONSTANT_KEYS,
    Extras,
    Padding,
    Sample,
    dtype_of,
    name_sample,
)

# Cross-entropy in torch and transformers ignores this label by default.
IGNORED_LABEL = -100

_INT64_ADVICE = "tensors of ids are int64, so they must be below 2**63"
_FLOAT32_ADVICE = "the column is float32, whose largest value is 3.4e38; scale the column"
_MASK_ADVICE = "a mask holds 0 and 1; carry weights with columns={'loss_weight': 0.0}"
_CONSTANT_ADVICE = {
    "attention_mask": "packs hold no padding; tokenize without padding, or take padded tokens out, and plan again",
    "token_type_ids": "it is left out only where it is 0; carry it with columns={'token_type_ids': 0}",
}

Positions = Callable[[dict[str, Any]], Any]
D = TypeVar("D", bound=np.generic)

# Modules of transformers that collate rows or take keys out of them.
_COLLATORS = frozenset(
    {
        "transformers.data.data_collator",
        "transformers.tokenization_utils_base",
        "transformers.trainer_utils",
    }
)


class PackedItem(dict[str, Any]):
    """An item of a `PackedDataset` or of a `PackedStream`: a dict that collators of whole samples refuse.

    Those of torch and transformers would leave out the bounds of the pieces, which would then see each other, and learn
    each other's first tokens. Torch's finds the type in its table. Those of transformers ask for keys, which no other
    module is refused; `dict(item)` is a plain dict.
    """

    def __contains__(self, key: object) -> bool:
        _refuse_collator(sys._getframe(1))
        return super().__contains__(key)

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        _refuse_collator(sys._getframe(1))
        return super().keys()


def _refuse_collator(caller: FrameType) -> None:
    if caller.f_globals.get("__name__") in _COLLATORS:
        raise InvalidTypeError(
            "a collator of transformers got an item of a PackedDataset or PackedStream, and would lose the bounds of "
            "its pieces: give the Trainer data_collator=td.PackedCollator(), and its arguments "
            "remove_unused_columns=False"
        )


def _refuse_default_collation(_batch: Any, *, collate_fn_map: Any = None) -> NoReturn:  # noqa: ARG001 (torch's form)
    raise InvalidTypeError(
        "torch's default collation got items of a PackedDataset or PackedStream, and would lose the bounds of their "
        "pieces: give the DataLoader collate_fn=td.PackedCollator(), or iterate over td.loader(...)"
    )


default_collate_fn_map[PackedItem] = _refuse_default_collation


class ItemBuilder:
    """Builds items, whose keys the table of `PackedDataset` lists.

    Args:
        columns: The columns, checked, with their padding values.
        sample_columns: The names of the values that samples have once, checked.
        mask_first_token: As in `PackedDataset`.
        positions: As in `PackedDataset`.
        pad_token_id: As in `PackedDataset`.

    Raises:
        InvalidTypeError: An argument is of the wrong type.
        InvalidInputError: `pad_token_id` is out of range.
    """

    def __init__(
        self,
        columns: Mapping[str, Padding],
        sample_columns: Sequence[str],
        *,
        mask_first_token: Any,
        positions: Any,
        pad_token_id: Any,
    ) -> None:
        check_flag(mask_first_token, "mask_first_token")
        if positions is not None and not callable(positions):
            raise InvalidTypeError(
                f"positions is {format_type(positions)}: give a function of a piece, or None"
            )
        self._mask_first_token: bool = mask_first_token
        self._positions: Positions | None = positions
        self._pad_token_id = as_integer(pad_token_id, "pad_token_id", 0, 2**63 - 1)
        self._columns = columns
        self._sample_columns = sample_columns

    def build(
        self, samples: Sequence[Sample], starts: Sequence[int], stops: Sequence[int], align: int
    ) -> PackedItem:
        """The item of pieces, each of which is the tokens `starts` … `stops` - 1 of its sample.

        Each piece is padded to a multiple of `align` tokens.

        Raises:
            InvalidInputError: A mask, a constant, an id or a position is refused.
            InvalidTypeError: Positions are of a wrong type.
            Errors of `positions`.
        """
        if any(map(operator.eq, starts, stops)):
            # A piece without tokens is no sequence.
            held = list(map(operator.ne, starts, stops))
            samples = list(itertools.compress(samples, held))
            starts = list(itertools.compress(starts, held))
            stops = list(itertools.compress(stops, held))
        layout = _Layout(list(map(operator.sub, stops, starts)), align)
        # All samples at once: there may be many in an item.
        all_tokens, all_labels, _, _, all_extras = zip(*samples, strict=True)
        tokens = _joined("input_ids", all_tokens, samples, starts, stops)
        if all(map(operator.is_, all_labels, all_tokens)):
            labels = tokens.copy()
        else:
            labels = _joined("labels", all_labels, samples, starts, stops)
        columns: dict[str, NDArray[Any]] = {}
        if any(all_extras):
            _apply_masks(labels, samples, starts, stops)
            columns = self._joined_columns(samples, starts, stops)
        if self._mask_first_token:
            labels[layout.tokens[:-1]] = IGNORED_LABEL
        positions = layout.positions()
        if self._positions is not None:
            positions = self._custom_positions(self._positions, tokens, columns, samples, layout)
        item = PackedItem(
            input_ids=torch.from_numpy(layout.padded(tokens, self._pad_token_id)),
            labels=torch.from_numpy(layout.padded(labels, IGNORED_LABEL)),
            position_ids=torch.from_numpy(positions),
            cu_seqlens=torch.from_numpy(layout.bounds.astype(np.int32)),
            max_seqlen=max(layout.sizes),
            dataset_id=torch.from_numpy(np.array([sample.dataset for sample in samples], dtype=np.int64)),
        )
        for key, column in columns.items():
            item[key] = torch.from_numpy(layout.padded(column, self._columns[key]))
        if columns:
            item[COLUMN_PADDING] = dict(self._columns)
        for key in self._sample_columns:
            given = [extra.values[key] for extra in all_extras]
            values = [value for value in given if value is not None]
            if values:
                item[key] = collected(values)
        return item

    def detached(self, sample: Sample, start: int, stop: int) -> Sample:
        """The tokens `start` … `stop` - 1 of a sample in memory of their own, in the form that items have.

        Returns:
            A sample of these tokens alone: `tokens` and `labels` int64, the columns in their dtypes. Masks are in the
            labels; constants were checked.

        Raises:
            InvalidInputError: A mask, a constant or an id is refused.
        """
        labels = tokens = _as_int64("input_ids", sample.tokens, sample, start, stop)
        if sample.labels is not sample.tokens:
            labels = _as_int64("labels", sample.labels, sample, start, stop)
        extras = sample.extras
        if extras is None:
            return Sample(tokens, labels, sample.dataset, sample.number)
        if extras.masks and labels is tokens:
            labels = tokens.copy()
        piece = (sample,), (start,), (stop,)
        _apply_masks(labels, *piece)
        kept = self._joined_columns(*piece)
        own = Extras({}, {}, kept, extras.values) if kept or extras.values else None
        return Sample(tokens, labels, sample.dataset, sample.number, own)

    def _joined_columns(
        self, samples: Sequence[Sample], starts: Sequence[int], stops: Sequence[int]
    ) -> dict[str, NDArray[Any]]:
        """The columns of all pieces, without padding, one after the other."""
        # Every sample has extras if there are columns.
        extras = [sample.extras for sample in samples if sample.extras]
        return {
            key: _joined(
                key, [extra.columns[key] for extra in extras], samples, starts, stops, dtype_of(padding)
            )
            for key, padding in self._columns.items()
        }

    def _custom_positions(
        self,
        positions: Positions,
        tokens: NDArray[np.int64],
        columns: Mapping[str, NDArray[Any]],
        samples: Sequence[Sample],
        layout: _Layout,
    ) -> NDArray[np.int64]:
        """Call `positions` for each piece of an item, and put what it gives one after the other.

        Args:
            positions: The function, as `PackedDataset` documents it.
            tokens: The pieces' own tokens, without padding, (tokens,).
            columns: Their columns, (tokens,) each.
            samples: The sample of each piece.
            layout: The pieces of the item.

        Returns:
            (tokens with padding,), or (1 + rows, tokens with padding), of which the first row counts from 0 in each
            piece. The padding of a piece continues its positions.
        """
        bounds = layout.tokens.tolist()
        parts: list[NDArray[np.int64]] = []
        for number, sample in enumerate(samples):
            own = slice(bounds[number], bounds[number + 1])
            piece = {"input_ids": torch.from_numpy(tokens[own].copy())}
            piece |= {key: torch.from_numpy(column[own].copy()) for key, column in columns.items()}
            values = sample.extras.values if sample.extras else {}
            piece |= {key: values[key] for key in self._sample_columns if key in values}
            try:
                made = positions(piece)
            except Exception as error:
                error.add_note(
                    f"raised by positions for a piece of {name_sample(sample.dataset, sample.number)}"
                )
                raise
            part = _checked_positions(made, own.stop - own.start, sample)
            if parts and part.shape[:-1] != parts[0].shape[:-1]:
                raise InvalidInputError(
                    f"positions gave the shape {part.shape} for {name_sample(sample.dataset, sample.number)}, and "
                    f"{parts[0].shape} for a piece of the same pack: the number of rows must be the same"
                )
            padding = layout.sizes[number] - part.shape[-1]
            if padding:
                more = part[..., -1:] + np.arange(1, padding + 1)
                part = np.concatenate([part, more], axis=-1)
            parts.append(part)
        joined = np.concatenate(parts, axis=-1)
        return joined if joined.ndim == 1 else np.concatenate([layout.positions()[None], joined])


def _checked_positions(made: Any, tokens: int, sample: Sample) -> NDArray[np.int64]:
    where = name_sample(sample.dataset, sample.number)
    try:
        array = made.numpy(force=True) if isinstance(made, torch.Tensor) else np.asarray(made)
    except (TypeError, ValueError, RuntimeError) as error:
        # torch raises any of these for a tensor.
        raise InvalidTypeError(f"positions gave {format_type(made)} for {where}: {error}") from error
    if array.dtype.kind not in "iu":
        raise InvalidTypeError(
            f"positions gave {format_type(made)} of dtype {array.dtype} for {where}: positions are integers"
        )
    if array.ndim not in (1, 2) or array.shape[-1] != tokens or not array.size:
        raise InvalidInputError(
            f"positions gave the shape {array.shape} for a piece of {where} with {tokens} tokens: give ({tokens},), or "
            f"(rows, {tokens}), as get_rope_index(...)[0][:, 0] of transformers has it"
        )
    if array.dtype == np.uint64 and (largest := int(array.max())) > np.iinfo(np.int64).max:
        raise InvalidInputError(f"positions gave {largest} for {where}: positions are int64")
    return array.astype(np.int64)


def aligned_sizes(sizes: Sequence[int], align: int) -> list[int]:
    """Round the sizes of pieces up to multiples of `align`."""
    return [-(-size // align) * align for size in sizes]


class _Layout:
    """The pieces of an item, each followed by the padding that makes it a multiple of `align` tokens.

    The padding belongs to its piece: with causal attention no token before it sees it, so the piece's bounds can
    include it. Megatron-LM and verl pad packed sequences for context parallelism in this way.

    Args:
        sizes: Tokens of each piece, all above 0.
        align: `PackPlan.align`.

    Attributes:
        tokens: Bounds of the pieces' own tokens, without padding, int64, (pieces + 1,).
        bounds: Bounds of the pieces with their padding, int64, (pieces + 1,).
        sizes: Tokens of each piece with its padding.
    """

    def __init__(self, sizes: Sequence[int], align: int) -> None:
        self.tokens = self.bounds = _bounds(sizes)
        self.sizes = sizes
        self._places: NDArray[np.int64] | None = None
        if align > 1:
            self.sizes = aligned_sizes(sizes, align)
            self.bounds = _bounds(self.sizes)
            moves = (self.bounds - self.tokens)[:-1].repeat(sizes)
            self._places = np.arange(self.tokens[-1], dtype=np.int64) + moves

    def padded(self, values: NDArray[D], padding: Any) -> NDArray[D]:
        """Spread the values of the pieces' own tokens, (tokens,), over the item; `padding` fills the rest."""
        if self._places is None:
            return values
        spread = np.full(self.bounds[-1], padding, dtype=values.dtype)
        spread[self._places] = values
        return spread

    def positions(self) -> NDArray[np.int64]:
        """Numbers that count from 0 in each piece, and on through its padding."""
        positions = np.arange(self.bounds[-1], dtype=np.int64)
        positions -= self.bounds[:-1].repeat(self.sizes)
        return positions


def _bounds(sizes: Sequence[int]) -> NDArray[np.int64]:
    return np.array([0, *itertools.accumulate(sizes)], dtype=np.int64)


def _joined(
    key: str,
    arrays: Sequence[NDArray[Any]],
    samples: Sequence[Sample],
    starts: Sequence[int],
    stops: Sequence[int],
    dtype: type[np.generic] = np.int64,
) -> NDArray[Any]:
    """The values from `starts` to `stops` of each array, one after the other; `key` and `samples` name them.

    Raises:
        InvalidInputError: One does not fit int64, or is finite and beyond float32.
    """
    parts = [array[start:stop] for array, start, stop in zip(arrays, starts, stops, strict=True)]
    if dtype is np.int64 and any(part.dtype.kind == "u" and part.dtype.itemsize == 8 for part in parts):
        for sample, start, part in zip(samples, starts, parts, strict=True):
            _refuse_first(part > np.iinfo(np.int64).max, part, start, key, sample, _INT64_ADVICE)
    if dtype is not np.float32:
        # Kinds were checked; "unsafe" lets unsigned 64-bit ids through.
        return np.concatenate(parts, dtype=dtype, casting="unsafe")
    # A value beyond float32 becomes infinite, which is looked for here.
    with np.errstate(over="ignore"):
        values = np.concatenate(parts, dtype=dtype, casting="unsafe")
    if not np.isfinite(values).all():
        largest = float(np.finfo(np.float32).max)
        for sample, start, part in zip(samples, starts, parts, strict=True):
            wrong = np.isfinite(part) & (np.abs(part) > largest)
            _refuse_first(wrong, part, start, key, sample, _FLOAT32_ADVICE)
    return values


def _as_int64(key: str, values: NDArray[Any], sample: Sample, start: int, stop: int) -> NDArray[np.int64]:
    if values.dtype.kind == "i":
        # All values fit, and `_joined`, which checks that, takes four times as long.
        return values[start:stop].astype(np.int64)
    return _joined(key, (values,), (sample,), (start,), (stop,))


def _apply_masks(
    labels: NDArray[np.int64], samples: Sequence[Sample], starts: Sequence[int], stops: Sequence[int]
) -> None:
    """Set the labels of tokens that are not learned to -100, in place; checks all masks and constants.

    Raises:
        InvalidInputError: A mask holds another number than 0 and 1, or a constant is another one.
    """
    first = 0
    for sample, start, stop in zip(samples, starts, stops, strict=True):
        last = first + stop - start
        if sample.extras is not None:
            for key, mask in sample.extras.masks.items():
                part = mask[start:stop]
                learned = part != 0
                if part.dtype.kind != "b":
                    _refuse_first(learned & (part != 1), part, start, key, sample, _MASK_ADVICE)
                labels[first:last][~learned] = IGNORED_LABEL
            for key, constant in sample.extras.constants.items():
                part = constant[start:stop]
                _refuse_first(part != CONSTANT_KEYS[key], part, start, key, sample, _CONSTANT_ADVICE[key])
        first = last


def _refuse_first(
    wrong: NDArray[np.bool_], values: NDArray[Any], start: int, key: str, sample: Sample, advice: str
) -> None:
    """Refuse the first of `values` that is `wrong`; the first of them is at position `start` in the sample."""
    if wrong.any():
        position = int(wrong.argmax())
        value = values[position].item()
        shown = int(value) if isinstance(value, bool) else value
        raise InvalidInputError(
            f"{name_sample(sample.dataset, sample.number, key)} is {shown} at position {start + position}: {advice}"
        )


def collected(values: Sequence[Any]) -> torch.Tensor | list[Any]:
    """Concatenate tensors, or arrays, of one dtype and of one shape but for the first dimension; list anything else.

    Args:
        values: At least one.

    Returns:
        A tensor that owns its memory, or a list of the values themselves.
    """
    first = values[0]
    if isinstance(first, torch.Tensor):
        if _is_concatenable(first) and all(
            isinstance(value, torch.Tensor)
            and _is_concatenable(value)
            and (value.dtype, value.device, value.shape[1:]) == (first.dtype, first.device, first.shape[1:])
            for value in values
        ):
            return torch.cat(list(values))
    elif (
        isinstance(first, np.ndarray)
        and first.dtype.kind in "biufc"
        and first.ndim
        and all(
            isinstance(value, np.ndarray)
            and value.ndim
            and (value.dtype, value.shape[1:]) == (first.dtype, first.shape[1:])
            for value in values
        )
    ):
        return torch.from_numpy(np.concatenate(values))
    return list(values)


def _is_concatenable(tensor: torch.Tensor) -> bool:
    # A nested tensor has no shape that can be asked for.
    return tensor.layout is torch.strided and not tensor.is_nested and tensor.ndim > 0
