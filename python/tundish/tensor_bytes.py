"""Tensors as memory: their bytes, the elements that they span, and integers of the same width."""

from __future__ import annotations

from typing import Final

import torch

# The integer dtype of each item size in bytes. It stands for dtypes of the same width: copies of integers change no
# bit, and numpy has them.
INTEGER_DTYPES: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a contiguous tensor as bytes, in the same memory; shape (bytes,)."""
    # torch calls a single value contiguous whatever its strides, and then cannot view it as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def extent(tensor: torch.Tensor) -> int:
    """The number of elements from the first of a tensor to its last in memory, gaps included."""
    if not tensor.numel():
        return 0
    if tensor.is_contiguous():
        return tensor.numel()
    return 1 + sum((int(n) - 1) * int(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
