"""Pieces of samples in memory of their own, and the same as tensors in a state."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tundish.packing.dataset.loss_masks import apply_masks
from tundish.packing.dataset.sample_keys import Padding, dtype_of
from tundish.packing.dataset.samples import Extras, Sample, joined

__all__ = ["as_piece", "pack_pieces", "unpack_pieces"]


def as_piece(sample: Sample, start: int, stop: int, columns: Mapping[str, Padding]) -> Sample:
    """The tokens `start` … `stop` - 1 of a sample, in the form that items have.

    Args:
        sample: A sample, or a piece.
        start: The first token.
        stop: One past the last token.
        columns: The columns, with their padding values.

    Returns:
        A sample of these tokens alone. Its arrays are copies: `tokens` and `labels` int64, the columns in their dtypes.
        Masks are in the labels; constants were checked.

    Raises:
        InvalidInputError: A mask holds another number than 0 and 1, a constant is another one, or an id is 2⁶³ or more.
    """
    labels = tokens = _as_int64("input_ids", sample.tokens, sample, start, stop)
    if sample.labels is not sample.tokens:
        labels = _as_int64("labels", sample.labels, sample, start, stop)
    extras = sample.extras
    if extras is None:
        return Sample(tokens, labels, sample.dataset, sample.number)
    whole, starts, stops = (sample,), (start,), (stop,)
    if extras.masks and labels is tokens:
        labels = tokens.copy()
    apply_masks(labels, whole, starts, stops)
    kept = {
        key: joined(key, (extras.columns[key],), whole, starts, stops, dtype_of(padding))
        for key, padding in columns.items()
    }
    if not kept and not extras.values:
        return Sample(tokens, labels, sample.dataset, sample.number)
    return Sample(tokens, labels, sample.dataset, sample.number, Extras({}, {}, kept, extras.values))


def _as_int64(key: str, values: NDArray[Any], sample: Sample, start: int, stop: int) -> NDArray[np.int64]:
    if values.dtype.kind == "i":
        # All values fit, and `joined`, which checks that, takes four times as long.
        return values[start:stop].astype(np.int64)
    return joined(key, (values,), (sample,), (start,), (stop,))


def pack_pieces(
    pieces: Sequence[Sample], columns: Mapping[str, Padding], values: Sequence[str]
) -> dict[str, Any]:
    """The pieces as a few tensors, whatever their number is, and lists of the `values` that samples have once."""

    def tensor(arrays: Sequence[NDArray[Any]], dtype: type[np.generic] = np.int64) -> torch.Tensor:
        return torch.from_numpy(np.concatenate((np.empty(0, dtype), *arrays), dtype=dtype))

    has_labels = any(piece.labels is not piece.tokens for piece in pieces)
    extras = [piece.extras for piece in pieces if piece.extras is not None]
    return {
        "samples": torch.tensor([piece.number for piece in pieces], dtype=torch.int64),
        "lengths": torch.tensor([len(piece.tokens) for piece in pieces], dtype=torch.int64),
        "input_ids": tensor([piece.tokens for piece in pieces]),
        "labels": tensor([piece.labels for piece in pieces]) if has_labels else None,
        "columns": {
            key: tensor([extra.columns[key] for extra in extras], dtype_of(padding))
            for key, padding in columns.items()
        },
        "values": {key: [extra.values[key] for extra in extras] for key in values},
    }


def unpack_pieces(state: Mapping[str, Any]) -> list[Sample]:
    """The pieces that `pack_pieces` made tensors of.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: They do not fit together.
    """
    lengths = state["lengths"].tolist()
    bounds = list(itertools.pairwise(itertools.accumulate(lengths, initial=0)))

    def parts(tensor: torch.Tensor) -> list[NDArray[Any]]:
        array = tensor.numpy()
        if array.shape != (sum(lengths),):
            raise ValueError(f"{array.shape[0]} entries for {sum(lengths)} tokens")
        # Copies, because the state is the caller's.
        return [array[start:stop].copy() for start, stop in bounds]

    tokens = parts(state["input_ids"])
    labels = tokens if state["labels"] is None else parts(state["labels"])
    columns = {key: parts(tensor) for key, tensor in state["columns"].items()}
    values = state["values"]
    pieces = []
    for place, number in enumerate(state["samples"].tolist()):
        extras = None
        if columns or values:
            own = {key: arrays[place] for key, arrays in columns.items()}
            extras = Extras({}, {}, own, {key: listed[place] for key, listed in values.items()})
        pieces.append(Sample(tokens[place], labels[place], 0, number, extras))
    if len(pieces) != len(lengths):
        raise ValueError(f"{len(lengths)} lengths for {len(pieces)} pieces")
    return pieces
