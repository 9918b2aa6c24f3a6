"""Positions of pieces that a function of the user's computes, for models that do not count tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tundish.errors import InvalidInputError, InvalidTypeError, format_type
from tundish.packing.dataset.piece_layout import PieceLayout
from tundish.packing.dataset.samples import Sample, name_sample

__all__ = ["Positions", "custom_positions"]

Positions = Callable[[dict[str, Any]], Any]


def custom_positions(
    positions: Positions,
    tokens: NDArray[np.int64],
    columns: Mapping[str, NDArray[Any]],
    sample_columns: Sequence[str],
    samples: Sequence[Sample],
    layout: PieceLayout,
) -> NDArray[np.int64]:
    """Call `positions` for each piece of an item, and put what it gives one after the other.

    Args:
        positions: The function, as `PackedDataset` documents it.
        tokens: The pieces' own tokens, without padding, (tokens,).
        columns: Their columns, (tokens,) each.
        sample_columns: Names of the values that each piece gets from its sample.
        samples: The sample of each piece.
        layout: The pieces of the item.

    Returns:
        (tokens with padding,), or (1 + rows, tokens with padding), of which the first row counts from 0 in each piece.
        The padding of a piece continues its positions.
    """
    bounds = layout.tokens.tolist()
    parts: list[NDArray[np.int64]] = []
    for number, sample in enumerate(samples):
        own = slice(bounds[number], bounds[number + 1])
        piece = {"input_ids": torch.from_numpy(tokens[own].copy())}
        piece |= {key: torch.from_numpy(column[own].copy()) for key, column in columns.items()}
        values = sample.extras.values if sample.extras else {}
        piece |= {key: values[key] for key in sample_columns if key in values}
        try:
            made = positions(piece)
        except Exception as error:
            error.add_note(f"raised by positions for a piece of {name_sample(sample.dataset, sample.number)}")
            raise
        part = _checked(made, own.stop - own.start, sample)
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


def _checked(made: Any, tokens: int, sample: Sample) -> NDArray[np.int64]:
    where = name_sample(sample.dataset, sample.number)
    try:
        array = made.numpy(force=True) if isinstance(made, torch.Tensor) else np.asarray(made)
    except (TypeError, ValueError) as error:
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
    return array.astype(np.int64)
