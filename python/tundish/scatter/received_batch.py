"""A batch that came: from the bytes of its tensors to the object.

Owns the making of tensors over memory that is not torch's. What always holds: each tensor has a storage of its own,
which keeps the memory, so that saving one saves no other and writing to one is no change of another; what goes to a
device goes there in one transfer.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tundish import _native
from tundish.errors import InvalidInputError, InvalidTypeError
from tundish.tree import (
    DLPACK_DTYPES,
    DLPACK_EXCHANGE,
    NUMPY_DTYPES,
    BufferLayout,
    Schema,
    unflatten_unchecked,
)

__all__ = ["ReceivedBatch", "bytes_of", "device_of", "on_device"]

# By DLPack's code and bits, those of which torch makes tensors all at once.
_CODES: dict[torch.dtype, tuple[int, int]] = {
    **{dtype: code for code, dtype in DLPACK_DTYPES.items()},
    torch.complex64: (5, 64),
    torch.complex128: (5, 128),
}

# Devices other than host memory on which this process made a tensor.
_usable: set[torch.device] = set()

# Where the tensors of a layout lie: shape, dtype of numpy or None, offset, dtype, how many values.
_Places = list[tuple[torch.Size, "type[np.generic] | None", int, torch.dtype, int]]


class ReceivedBatch(NamedTuple):
    """A batch as it came.

    Attributes:
        schema: of the batch.
        memory: the bytes of its tensors, None where there are none.
        parcel: what they lie in, where others are to get it from this rank.
        on_device: the bytes, where they came to a device.
        tensors: over the bytes, where they were made while these were still being written.
        made: the object of them, where it was made then too.
        is_lent: whether the memory is still being written and is not to be kept: it is copied once the bytes are there.
    """

    schema: Schema
    memory: NDArray[np.uint8] | None
    parcel: _native.SendBuffer | None = None
    on_device: Tensor | None = None
    tensors: list[Tensor] | None = None
    made: Any = None
    is_lent: bool = False

    def prepared(self, device: torch.device | None) -> ReceivedBatch:
        """The same with what can be made of it before its bytes are there, which nothing looks at.

        Objects that were pickled are made later: classes may look at their tensors when they are. Never raises: what
        cannot be made now is told of when the batch is built.
        """
        schema = self.schema
        if self.is_lent:
            return self
        try:
            is_light = (
                schema.layout.recipes is None and not schema.pickled and schema.structure.quick is not None
            )
            tensors = _host_tensors(schema.layout, self.memory)
            made = unflatten_unchecked(schema, tensors) if is_light and device is None else None
        except Exception:  # noqa: BLE001 (it is raised again, where nothing is under way)
            return self
        return self._replace(tensors=tensors, made=made)

    def filled(self, schema: Schema) -> ReceivedBatch:
        """The same, its bytes there, with the batch's own schema, of the same form."""
        if self.is_lent and self.memory is not None:
            return self._replace(schema=schema, memory=self.memory.copy(), is_lent=False)
        return self if schema is self.schema else self._replace(schema=schema, made=None)

    def staged(self, device: torch.device) -> ReceivedBatch:
        """The same in memory that `device` reads by itself, where it has such."""
        if device.type != "cuda" or self.memory is None:
            return self
        pinned = _pinned(torch.from_numpy(self.memory[: self.schema.layout.total]))
        return self._replace(memory=pinned.numpy(), tensors=None, made=None)

    def build(self, device: torch.device | None) -> Any:
        """The object, its tensors in `memory` or on `device`; once, as it is the caller's."""
        if self.made is not None and device is None:
            return self.made
        layout = self.schema.layout
        if self.on_device is not None:
            return self._build_there(self.on_device, device)
        tensors = self.tensors or _host_tensors(layout, self.memory)
        if device is not None:
            if self.memory is None:
                moved = torch.empty(0, dtype=torch.uint8, device=device)
            else:
                moved = _moved(torch.from_numpy(self.memory[: layout.total]), device)
            stay = self.schema.host_tensors
            there = layout.tensors_in(moved)
            tensors = [(tensors if number in stay else there)[number] for number in range(len(tensors))]
        return unflatten_unchecked(self.schema, tensors)

    def _build_there(self, buffer: Tensor, device: torch.device | None) -> Any:
        layout, stay = self.schema.layout, self.schema.host_tensors
        there = [] if device is None else layout.tensors_in(buffer.to(device))
        here = layout.tensors_in(buffer.cpu()) if device is None or stay else there
        tensors = [
            (here if device is None or number in stay else there)[number] for number in range(len(here))
        ]
        return unflatten_unchecked(self.schema, tensors)


def bytes_of(memory: _native.SendBuffer | _native.ReceivedBuffer | _native.SegmentView) -> NDArray[np.uint8]:
    """The bytes of `memory`, and its export for as long as an array of them or a tensor over them lives.

    torch, and numpy where it makes an array of another shape, hold on to what is behind a `memoryview`, not to the
    export.
    """
    return np.frombuffer(memoryview(memory), np.uint8)


def device_of(device: Any) -> torch.device | None:
    """The device that is meant; None for host memory.

    Raises `InvalidTypeError` and `InvalidInputError` for what is none, or one that this process cannot use.
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
        raise InvalidInputError(f"device is {device!r}, which is none: {_first_line(error)}") from None
    if found.type == "cpu":
        return None
    if found not in _usable:
        try:
            torch.empty(0, device=found)
        except Exception as error:
            raise InvalidInputError(
                f"device is {device!r}, which cannot be used here: {_first_line(error)}"
            ) from error
        _usable.add(found)
    return found


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def on_device(schema: Schema, tensors: list[Tensor], device: torch.device) -> Any:
    """The object whose carried tensors are in this process already, with them on `device`."""
    stay = schema.host_tensors
    moved = [tensor if number in stay else _moved(tensor, device) for number, tensor in enumerate(tensors)]
    return unflatten_unchecked(schema, moved)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    is_pinned = tensor.is_pinned()
    if device.type == "cuda" and tensor.is_cpu and not is_pinned:
        # Else the caller would wait not for the copy alone, but for all that it has given the device to do.
        tensor, is_pinned = _pinned(tensor), True
    return tensor.to(device, non_blocking=is_pinned)


def _pinned(tensor: Tensor) -> Tensor:
    # torch keeps the memory for the next one when the copy is over.
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)


def _host_tensors(layout: BufferLayout, memory: NDArray[np.uint8] | None) -> list[Tensor]:
    places, plan = _plan(layout)
    if memory is None:
        return [torch.empty(shape, dtype=dtype, device="cpu") for shape, _, _, dtype, _ in places]
    if plan is not None:
        return plan.tensors(memory)
    return [_tensor(memory, *place) for place in places]


def _tensor(
    memory: NDArray[np.uint8],
    shape: torch.Size,
    known: type[np.generic] | None,
    offset: int,
    dtype: torch.dtype,
    count: int,
) -> Tensor:
    if count == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    if known is not None:
        return torch.from_numpy(np.ndarray(shape, known, memory, offset))
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape).data


@lru_cache(256)
def _plan(layout: BufferLayout) -> tuple[_Places, _native.TensorPlan | None]:
    """Where the tensors lie, and what makes all of them at once, where there is such."""
    places = [
        (shape, NUMPY_DTYPES.get(dtype), offset, dtype, shape.numel())
        for dtype, shape, offset in zip(layout.dtypes, layout.shapes, layout.offsets, strict=True)
    ]
    plan = None
    if DLPACK_EXCHANGE is not None and all(dtype in _CODES and count for _, _, _, dtype, count in places):
        plan = DLPACK_EXCHANGE.plan(
            [(*_CODES[dtype], list(shape), offset) for shape, _, offset, dtype, _ in places]
        )
    return places, plan
