"""The memory of a tensor as bytes, to write, send and read it without knowing its dtype."""

from __future__ import annotations

import torch

__all__ = ["raw_bytes"]


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a contiguous tensor as bytes, in the same memory; shape (bytes,)."""
    # torch calls a single value contiguous whatever its strides, and then cannot view it as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
