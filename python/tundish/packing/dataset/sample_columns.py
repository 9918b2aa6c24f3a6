"""Collects the values that samples have once, such as images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["collected"]


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
