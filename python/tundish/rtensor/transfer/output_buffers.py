"""Checks the output buffers that a caller fetches into.

Invariants:
    Every element of every buffer has memory of its own: nothing that arrives overwrites another value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tundish._native import RTensor
from tundish.errors import InvalidInputError, InvalidTypeError, counted
from tundish.rtensor.transfer.dense_tensors import extent, is_whole

__all__ = ["output_buffers"]


def output_buffers(out: Any, handles: list[RTensor]) -> list[Tensor]:
    """The tensors of `out`, one for each handle.

    Raises:
        InvalidTypeError: `out` has something else than dense tensors with memory.
        InvalidInputError: a tensor does not fit its handle, or has memory in common with itself or another one.
    """
    if not isinstance(out, Iterable):
        raise InvalidTypeError(f"out is a {type(out).__qualname__}: give a tensor, or a list of tensors")
    buffers = [out] if isinstance(out, Tensor) else list(out)
    if len(buffers) != len(handles):
        raise InvalidInputError(
            f"`out` has {counted(len(buffers), 'tensor')}, and there are {counted(len(handles), 'handle')}"
        )
    for number, (handle, buffer) in enumerate(zip(handles, buffers, strict=True)):
        _check(number, buffer, handle)
    _check_disjoint(buffers)
    return buffers


def _check(number: int, buffer: Any, handle: RTensor) -> None:
    if not isinstance(buffer, Tensor):
        raise InvalidTypeError(f"out[{number}] is a {type(buffer).__qualname__}, not a tensor")
    if buffer.layout is not torch.strided or buffer.is_nested or buffer.is_meta:
        raise InvalidTypeError(
            f"out[{number}] is not dense or has no memory: no bytes can be received into it"
        )
    if buffer.dtype != handle.dtype or buffer.shape != handle.shape:
        raise InvalidInputError(
            f"out[{number}] is {buffer.dtype} of shape {tuple(buffer.shape)}, and its handle is "
            f"{handle.dtype} of shape {tuple(handle.shape)}"
        )
    if not is_whole(buffer):
        raise InvalidInputError(
            f"out[{number}] has no memory for its values: its storage was freed or cut, or it never had any"
        )
    if buffer.requires_grad:
        raise InvalidInputError(f"out[{number}] requires a gradient: give its detach()")
    if _overlaps_itself(buffer):
        raise InvalidInputError(
            f"out[{number}] overlaps itself: by strides {buffer.stride()} several of its elements share memory or may "
            "do so"
        )


def _overlaps_itself(buffer: Tensor) -> bool:
    """Whether elements may share memory: a step along a dimension is within the reach of the smaller ones."""
    if buffer.is_contiguous():
        return False
    reach = 0
    for stride, length in sorted(zip(buffer.stride(), buffer.shape, strict=True)):
        if length > 1:
            if stride <= reach:
                return True
            reach += (length - 1) * stride
    return False


def _check_disjoint(buffers: list[Tensor]) -> None:
    """Raises `InvalidInputError` where two buffers have memory in common."""
    by_device: dict[torch.device, list[tuple[int, int, int]]] = {}
    for number, buffer in enumerate(buffers):
        if buffer.numel():
            start = buffer.data_ptr()
            span = start, start + extent(buffer) * buffer.itemsize, number
            by_device.setdefault(buffer.device, []).append(span)
    for spans in by_device.values():
        for group in _intersecting(spans):
            _check_interleaved(buffers, group)


def _intersecting(spans: list[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Groups of spans (start, stop, number) that reach into each other."""
    group: list[tuple[int, int, int]] = []
    end = 0
    for span in sorted(spans):
        if span[0] >= end:
            if len(group) > 1:
                yield group
            group = []
        group.append(span)
        end = max(end, span[1])
    if len(group) > 1:
        yield group


def _check_interleaved(buffers: list[Tensor], group: list[tuple[int, int, int]]) -> None:
    """Marks the bytes of each buffer in a map of their memory. A buffer with marked bytes shares memory."""
    lowest = group[0][0]
    is_taken = np.zeros(max(stop for _, stop, _ in group) - lowest, dtype=np.bool_)

    def bytes_of(place: int) -> Any:
        start, _, number = group[place]
        buffer = buffers[number]
        shape = (*buffer.shape, buffer.itemsize)
        strides = (*(stride * buffer.itemsize for stride in buffer.stride()), 1)
        return np.lib.stride_tricks.as_strided(is_taken[start - lowest :], shape, strides)

    for place, (_, _, number) in enumerate(group):
        if bytes_of(place).any():
            is_taken[:] = False
            bytes_of(place)[...] = True
            other = next(group[before][2] for before in range(place) if bytes_of(before).any())
            first, second = sorted((other, number))
            raise InvalidInputError(
                f"out[{first}] and out[{second}] share memory: what arrives in one would be in both; give tensors "
                "that lie apart"
            )
        bytes_of(place)[...] = True
