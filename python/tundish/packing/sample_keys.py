"""The keys that samples may have, and the arguments that name further ones.

Invariants: every key of a sample is used, checked or in `IGNORED_KEYS`, which the guide lists. Others are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tundish.errors import InvalidInputError, InvalidTypeError, format_integer, format_type

__all__ = [
    "COLUMN_PADDING",
    "CONSTANT_KEYS",
    "IGNORED_KEYS",
    "MADE_KEYS",
    "MASK_KEYS",
    "MEANINGFUL_KEYS",
    "Padding",
    "as_columns",
    "as_sample_columns",
    "dtype_of",
]

# A column has the dtype of its padding value, so that it is the same in every item.
Padding = bool | int | float

# The names of TRL, of transformers' chat templates, and of most other trainers.
MASK_KEYS = ("completion_mask", "assistant_masks", "loss_mask")

# Tokenizers add these keys. They are left out while every value is the one here, and refused otherwise.
CONSTANT_KEYS = {"attention_mask": 1, "token_type_ids": 0}

# Lengths, and texts that samples were tokenized from.
IGNORED_KEYS = frozenset({"length", "num_tokens", "text", "messages", "prompt", "completion"})

# Under this key, an item has the padding values of its columns.
COLUMN_PADDING = "column_padding"

# Keys of items and of batches that have a meaning of their own.
MADE_KEYS = frozenset(
    {
        "position_ids",
        "cu_seqlens",
        "max_seqlen",
        COLUMN_PADDING,
        "seq_idx",
        "document_ids",
        "loss_weights",
        "shift_labels",
        "shift_loss_weights",
        "num_unlearned_pieces",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
    }
)


# Left out of a sample in silence, these would change what is trained: sources look for them by name, not by type.
MEANINGFUL_KEYS = frozenset({"labels", *MASK_KEYS, *CONSTANT_KEYS, *MADE_KEYS})


def dtype_of(padding: Padding) -> type[np.generic]:
    """The dtype of the column that a value pads."""
    if isinstance(padding, bool):
        return np.bool_
    return np.int64 if isinstance(padding, int) else np.float32


def as_columns(columns: Any) -> dict[str, Padding]:
    """Check the argument `columns`, and return its padding values as Python's own numbers.

    Raises:
        InvalidTypeError: It is no mapping of names to numbers.
        InvalidInputError: A name has another meaning, or a padding value is beyond int64 or float32.
    """
    if columns is None:
        return {}
    if not isinstance(columns, Mapping):
        raise InvalidTypeError(
            f"columns is {format_type(columns)}: give the padding value of each column by its name, for example "
            "{'loss_weight': 0.0}"
        )
    checked: dict[str, Padding] = {}
    for name, padding in columns.items():
        _check_name(name, "columns")
        value = padding.item() if isinstance(padding, np.generic) else padding
        if not isinstance(value, bool | int | float):
            raise InvalidTypeError(
                f"columns[{name!r}] is {format_type(padding)}: give the padding value: a float for float32, "
                "an integer for int64, False for bool columns"
            )
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise InvalidInputError(
                f"columns[{name!r}] is {format_integer(value)}, beyond the int64 of the column"
            )
        if isinstance(value, float) and math.isfinite(value) and abs(value) > float(np.finfo(np.float32).max):
            raise InvalidInputError(f"columns[{name!r}] is {value}, beyond the float32 of the column")
        checked[name] = value
    return checked


def as_sample_columns(names: Any, columns: Mapping[str, Padding]) -> tuple[str, ...]:
    """Check the argument `sample_columns`.

    Raises:
        InvalidTypeError: It is no list of names.
        InvalidInputError: A name has another meaning, or is among `columns` too.
    """
    if names is None:
        return ()
    if not isinstance(names, list | tuple):
        raise InvalidTypeError(
            f"sample_columns is {format_type(names)}: give a list of names, for example ['pixel_values']"
        )
    for name in names:
        _check_name(name, "sample_columns")
        if name in columns:
            raise InvalidInputError(
                f"{name!r} is in columns and in sample_columns: a sample has it for each token, or once"
            )
    return tuple(dict.fromkeys(names))


def _check_name(name: Any, argument: str) -> None:
    if not isinstance(name, str):
        raise InvalidTypeError(f"{argument} names {name!r}, which is {format_type(name)}: names are strings")
    if name in ("input_ids", "labels"):
        why = "PackedDataset reads it in any case"
    elif name in MASK_KEYS:
        why = "PackedDataset makes labels of -100 of it"
    elif name == "attention_mask":
        why = "packs hold no padding, and a mask would let pieces see each other"
    elif name in MADE_KEYS:
        why = "PackedDataset or PackedCollator makes it; rename the column"
    else:
        return
    raise InvalidInputError(f"{argument} names {name!r}: take it out, because {why}")
