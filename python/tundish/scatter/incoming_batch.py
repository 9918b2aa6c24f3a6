"""An incoming batch: from the bytes of its tensors to the object.

Invariants:
- Each tensor has a storage of its own, and the storage keeps the memory alive. Saving one tensor saves no other.
- A batch goes to a device in one transfer.
"""

from __future__ import annotations

import pickle
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tundish import _native
from tundish.errors import NotPicklableError
from tundish.scatter.target_device import copy_to_device, pinned_copy
from tundish.tree import (
    DLPACK_DTYPES,
    DLPACK_EXCHANGE,
    NUMPY_DTYPES,
    BufferLayout,
    Schema,
    unflatten_unchecked,
)

__all__ = ["IncomingBatch", "bytes_of", "decode_schema"]

# DLPack's code and bits of the dtypes that the compiled module makes tensors of.
_DLPACK_TYPES: dict[torch.dtype, tuple[int, int]] = {
    **{dtype: code for code, dtype in DLPACK_DTYPES.items()},
    torch.complex64: (5, 64),
    torch.complex128: (5, 128),
}

# For each tensor of a layout: shape, numpy's dtype or None, offset in bytes, dtype, number of values.
_Places = list[tuple[torch.Size, "type[np.generic] | None", int, torch.dtype, int]]


class IncomingBatch(NamedTuple):
    """A batch as it was received.

    Attributes:
        schema: the batch without its tensors.
        memory: the bytes of its tensors, shape (size,), uint8; None where it has none or they are on a device.
        device_buffer: the same bytes on a device, where they travelled from device to device.
    """

    schema: Schema
    memory: NDArray[np.uint8] | None
    device_buffer: Tensor | None = None

    def pinned(self, device: torch.device) -> IncomingBatch:
        """The same batch in pinned memory, if `device` can read that by itself."""
        if device.type != "cuda" or self.memory is None:
            return self
        return self._replace(memory=pinned_copy(torch.from_numpy(self.memory)).numpy())

    def build(self, device: torch.device | None) -> Any:
        """The object, with its tensors in `memory` (None) or on `device`. Call it once: the caller owns the result."""
        layout, host_only = self.schema.layout, self.schema.layout.host_only_tensors
        on_host: list[Tensor] = []
        if self.device_buffer is None:
            on_host = _host_tensors(layout, self.memory)
        elif device is None or host_only:
            on_host = layout.tensors_in(self.device_buffer.cpu())
        if device is None:
            return unflatten_unchecked(self.schema, on_host)
        if self.device_buffer is not None:
            buffer = self.device_buffer.to(device)
        elif self.memory is not None:
            buffer = copy_to_device(torch.from_numpy(self.memory), device)
        else:
            buffer = torch.empty(0, dtype=torch.uint8, device=device)
        tensors = [
            on_host[number] if number in host_only else tensor
            for number, tensor in enumerate(layout.tensors_in(buffer))
        ]
        return unflatten_unchecked(self.schema, tensors)


def decode_schema(encoded: NDArray[np.uint8]) -> Schema:
    """The schema that `OutgoingBatch.encoded_schema` returned on another rank of this job.

    Raises `NotPicklableError` where the bytes are damaged. A type that is not found here is an error of `build`.
    """
    try:
        schema: Schema = pickle.loads(encoded.data)  # noqa: S301 (ranks of a process group trust each other)
    except Exception as error:
        raise NotPicklableError(f"the schema of a batch cannot be read: {error}") from error
    return schema


def bytes_of(memory: _native.SendBuffer | _native.ReceivedBuffer) -> NDArray[np.uint8]:
    """The bytes of a buffer, which lives as long as any array or tensor over them.

    torch and numpy may keep the object behind a `memoryview` instead of the view, so an array holds the view.
    """
    return np.frombuffer(memoryview(memory), np.uint8)


def _host_tensors(layout: BufferLayout, memory: NDArray[np.uint8] | None) -> list[Tensor]:
    places, builder = _places_and_builder(layout)
    if memory is None:
        return [torch.empty(shape, dtype=dtype, device="cpu") for shape, _, _, dtype, _ in places]
    if builder is not None:
        return builder.build(memory)
    return [_tensor(memory, *place) for place in places]


def _tensor(
    memory: NDArray[np.uint8],
    shape: torch.Size,
    numpy_type: type[np.generic] | None,
    offset: int,
    dtype: torch.dtype,
    count: int,
) -> Tensor:
    if count == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    if numpy_type is not None:
        return torch.from_numpy(np.ndarray(shape, numpy_type, memory, offset))
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape).data


@lru_cache(256)
def _places_and_builder(layout: BufferLayout) -> tuple[_Places, _native.TensorBuilder | None]:
    """The places of a layout's tensors, and a builder that makes them in one call; None if no builder can."""
    places = [
        (shape, NUMPY_DTYPES.get(dtype), offset, dtype, shape.numel())
        for dtype, shape, offset in zip(layout.dtypes, layout.shapes, layout.offsets, strict=True)
    ]
    builder = None
    if DLPACK_EXCHANGE is not None and all(
        dtype in _DLPACK_TYPES and count for _, _, _, dtype, count in places
    ):
        builder = DLPACK_EXCHANGE.builder(
            [(*_DLPACK_TYPES[dtype], list(shape), offset) for shape, _, offset, dtype, _ in places]
        )
    return places, builder
