"""The bytes of a batch: tensors into one buffer where it is sent, and out of it where it is received.

Invariants:
- Each tensor has a storage of its own, and the storage keeps the memory alive. Saving one tensor saves no other.
- A batch goes to a device in one transfer.
"""

from __future__ import annotations

import pickle
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tundish import _native
from tundish.errors import InvalidInputError, InvalidTypeError, NotPicklableError
from tundish.tensor_bytes import INTEGER_DTYPES
from tundish.tree import (
    DLPACK_DTYPES,
    DLPACK_EXCHANGE,
    NUMPY_DTYPES,
    BufferLayout,
    Schema,
    flatten_with_addresses,
    unflatten_unchecked,
)

# More threads do not make a copy faster.
_MAX_THREADS = 4

# DLPack's code and bits of the dtypes that the compiled module makes tensors of.
_DLPACK_TYPES: dict[torch.dtype, tuple[int, int]] = {
    **{dtype: code for code, dtype in DLPACK_DTYPES.items()},
    torch.complex64: (5, 64),
    torch.complex128: (5, 128),
}

# For each tensor of a layout: shape, numpy's dtype or None, offset in bytes, dtype, number of values.
_Places = list[tuple[torch.Size, "type[np.generic] | None", int, torch.dtype, int]]


class OutgoingBatch:
    """A batch to send, flattened.

    Attributes:
        schema: the batch without its tensors.
        tensors: the tensors that travel.
        size: bytes of the tensors in one buffer, as the schema's layout places them.
        is_contiguous: whether all tensors are contiguous and in host memory.
    """

    def __init__(self, batch: Any, rank: int, threads: int) -> None:
        self.tensors, self.schema, self._addresses = flatten_with_addresses(batch, f"rank {rank}'s batch")
        self.size = self.schema.layout.total
        self.is_contiguous = bool(self._addresses) or not self.tensors
        self._threads = threads

    @cached_property
    def encoded_schema(self) -> bytes:
        """The schema in bytes."""
        return pickle.dumps(self.schema, 5)

    def write(self, buffer: _native.SendBuffer) -> None:
        """Write the tensors to the first `size` bytes of a buffer in shared memory."""
        layout = self.schema.layout
        if self.is_contiguous:
            buffer.fill(self._addresses, layout.size_bytes, layout.offset_bytes, self._threads)
            return
        places = layout.tensors_in(torch.frombuffer(buffer, dtype=torch.uint8, count=self.size))
        for place, tensor in zip(places, self.tensors, strict=True):
            # As integers, since torch cannot copy tensors of every dtype.
            integer = INTEGER_DTYPES.get(tensor.itemsize)
            if integer is None:
                place.copy_(tensor)
            else:
                place.view(integer).copy_(tensor.view(integer))


def copy_threads(receivers: int) -> int:
    """How many threads copy a batch on a node with so many receivers."""
    return max(1, min(_MAX_THREADS, _native.available_processors() // max(1, receivers)))


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


def resolve_device(device: Any) -> torch.device | None:
    """The device that the caller named; None for host memory.

    Raises:
        InvalidTypeError: `device` is neither a device nor the name of one.
        InvalidInputError: the device does not exist, or this process cannot use it.
    """
    if device is None:
        return None
    try:
        if isinstance(device, bool):
            raise TypeError
        found = torch.device(device)
    except TypeError:
        raise InvalidTypeError(f"device is {device!r}: give a torch.device, or the name of one") from None
    except RuntimeError as error:
        raise InvalidInputError(
            f"device is {device!r}: give a device of torch, such as 'cpu' or 'cuda:0' ({_first_line(error)})"
        ) from None
    if found.type == "cpu":
        return None
    try:
        torch.empty(0, device=found)
    except Exception as error:
        raise InvalidInputError(
            f"device is {device!r}, which cannot be used here: {_first_line(error)}"
        ) from error
    return found


def unflatten_to_device(schema: Schema, tensors: list[Tensor], device: torch.device) -> Any:
    """The object of `schema`, with its tensors copied to `device`; arrays of numpy stay in host memory."""
    on_host = schema.layout.host_only_tensors
    moved = [
        tensor if number in on_host else copy_to_device(tensor, device)
        for number, tensor in enumerate(tensors)
    ]
    return unflatten_unchecked(schema, moved)


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`. The copy goes on while the caller does."""
    is_pinned = tensor.is_pinned()
    if device.type == "cuda" and tensor.is_cpu and not is_pinned:
        # A copy from pageable memory would wait for all earlier work on the caller's stream.
        tensor, is_pinned = pinned_copy(tensor), True
    return tensor.to(device, non_blocking=is_pinned)


def pinned_copy(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, which torch keeps for the next copy."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
