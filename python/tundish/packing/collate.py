"""`PackedCollator`: items of a `PackedDataset` as the keyword arguments of a transformers model.

What always holds: the keys, shapes, dtypes and values are those that transformers'
`DataCollatorWithFlattening` yields for the same pieces, each as a feature of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tundish.errors import InvalidInputError, InvalidTypeError
from tundish.packing.dataset import IGNORED_LABEL

__all__ = ["PackedCollator"]

_TENSOR_KEYS = ("input_ids", "labels", "position_ids", "cu_seqlens")
_ITEM_KEYS = (*_TENSOR_KEYS, "max_seqlen")


class PackedCollator:
    """The `collate_fn` that lays the packs of a batch end to end in one row, without padding.

    | key | type | when |
    |---|---|---|
    | `input_ids`, `labels`, `position_ids` | int64, (1, tokens) | always |
    | `seq_idx` | int32, (1, tokens): number of the piece in the batch | `return_seq_idx=True` |
    | `cu_seq_lens_q`, `cu_seq_lens_k` | int32, (pieces + 1,) | `return_flash_attn_kwargs=True` |
    | `max_length_q`, `max_length_k` | int | `return_flash_attn_kwargs=True` |

    The label of each piece's first token is -100, whatever the dataset was told: the model shifts labels by
    one over the whole row, and would otherwise learn to predict it from another piece.

    Args:
        return_flash_attn_kwargs: give the bounds to flash attention, so that it does not work them out from
            `position_ids` in each layer.
        return_seq_idx: give the number of the piece that each token is in, which Mamba-like layers take.

    Raises:
        InvalidTypeError: an option is not a boolean.
    """

    def __init__(self, *, return_flash_attn_kwargs: bool = False, return_seq_idx: bool = False) -> None:
        for name, value in (
            ("return_flash_attn_kwargs", return_flash_attn_kwargs),
            ("return_seq_idx", return_seq_idx),
        ):
            if not isinstance(value, bool):
                raise InvalidTypeError(f"{name} must be True or False, got {value!r}")
        self.return_flash_attn_kwargs = return_flash_attn_kwargs
        self.return_seq_idx = return_seq_idx

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Give the model's arguments for a batch of items.

        Raises:
            InvalidInputError: there are no items.
            InvalidTypeError: an item does not come from a `PackedDataset`.
        """
        _check(items)
        # What is small is done in numpy: an operation of torch takes several times as long to start, and some start
        # threads and wait for them.
        bounds = [np.zeros(1, dtype=np.int32)]
        before = 0
        for item in items:
            bounds.append(item["cu_seqlens"].numpy()[1:] + np.int32(before))
            before += len(item["input_ids"])
        cu_seqlens = np.concatenate(bounds)
        labels = torch.cat([item["labels"] for item in items])
        labels.numpy()[cu_seqlens[:-1]] = IGNORED_LABEL
        batch: dict[str, Any] = {
            "input_ids": torch.cat([item["input_ids"] for item in items])[None],
            "labels": labels[None],
            "position_ids": torch.cat([item["position_ids"] for item in items])[None],
        }
        if self.return_seq_idx:
            pieces = np.arange(len(cu_seqlens) - 1, dtype=np.int32)
            batch["seq_idx"] = torch.from_numpy(pieces.repeat(np.diff(cu_seqlens)))[None]
        if self.return_flash_attn_kwargs:
            longest = max(item["max_seqlen"] for item in items)
            batch |= {
                "cu_seq_lens_q": torch.from_numpy(cu_seqlens),
                "cu_seq_lens_k": torch.from_numpy(cu_seqlens.copy()),
                "max_length_q": longest,
                "max_length_k": longest,
            }
        return batch


def _check(items: Any) -> None:
    if not isinstance(items, Sequence) or isinstance(items, str | bytes):
        raise InvalidTypeError(
            f"a batch is a list of items of a PackedDataset, not of type {type(items).__name__}: "
            "PackedCollator is a collate_fn, which the DataLoader calls with such a list"
        )
    if not items:
        raise InvalidInputError("a batch needs at least one item")
    for number, item in enumerate(items):
        if not isinstance(item, Mapping):
            wrong = f"is of type {type(item).__name__}"
        elif missing := [key for key in _ITEM_KEYS if key not in item]:
            wrong = f"lacks {', '.join(missing)}"
        elif others := [key for key in _TENSOR_KEYS if not isinstance(item[key], torch.Tensor)]:
            wrong = f"has no tensor as its {', '.join(others)}"
        else:
            continue
        raise InvalidTypeError(
            f"item {number} of the batch {wrong}: PackedCollator takes whole items of a PackedDataset. (The Trainer of "
            "transformers takes out what the model's forward does not name: give it remove_unused_columns=False)"
        )
