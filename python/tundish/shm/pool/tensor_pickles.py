"""Tensors in messages: they travel as arrays do, so that large ones lie in parcels and are copied once.

Owns how they are pickled. What always holds: a tensor arrives with its dtype, shape, strides and all that belongs to
it. Those that numpy's form would take something from (a gradient, strides, attributes, a class) are pickled as torch
does it. As with arrays, what two tensors of one message share is theirs alone when they arrive.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray

from tundish.shm.tensors import numpy_view_of

__all__ = ["dumps_with_tensors"]


def dumps_with_tensors(
    value: Any, protocol: int, *, buffer_callback: Callable[[pickle.PickleBuffer], Any]
) -> bytes:
    """As `pickle.dumps`."""
    stream = io.BytesIO()
    _Pickler(stream, protocol, buffer_callback=buffer_callback).dump(value)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or not _is_plain(value):
            return NotImplemented
        return _restored, numpy_view_of(value)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and not tensor.__dict__
    )


def _restored(array: NDArray[Any], torch_dtype: str | None) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if torch_dtype is None else tensor.view(getattr(torch, torch_dtype))
