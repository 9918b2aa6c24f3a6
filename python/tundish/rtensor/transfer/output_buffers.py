"""Checks the output buffers that a caller fetches into."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tundish._native import RTensor
from tundish.errors import InvalidInputError, InvalidTypeError, counted
from tundish.rtensor.transfer.dense_tensors import is_whole

__all__ = ["is_direct", "output_buffers"]


def output_buffers(out: Any, handles: list[RTensor]) -> list[Tensor]:
    """The tensors of `out`, one for each handle.

    Raises:
        InvalidTypeError: `out` has something else than dense tensors with memory.
        InvalidInputError: a tensor does not fit its handle, or two tensors that bytes go into directly overlap.
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
    spans = sorted(
        (buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes, number)
        for number, buffer in enumerate(buffers)
        if buffer.numel() and is_direct(buffer)
    )
    for (_, end, one), (start, _, other) in pairwise(spans):
        if start < end:
            first, second = sorted((one, other))
            raise InvalidInputError(
                f"out[{first}] and out[{second}] share memory: give tensors that lie apart"
            )
    return buffers


def is_direct(buffer: Tensor) -> bool:
    """Whether bytes are received into its memory, and not into a copy."""
    return buffer.is_cpu and buffer.is_contiguous() and not buffer.is_conj() and not buffer.is_neg()


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
    if any(not step and size > 1 for step, size in zip(buffer.stride(), buffer.shape, strict=True)):
        raise InvalidInputError(f"out[{number}] overlaps itself: several of its elements share memory")
    if buffer.requires_grad:
        raise InvalidInputError(f"out[{number}] requires a gradient: give its detach()")
