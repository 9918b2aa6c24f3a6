"""Checks the output buffers that a caller fetches into."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tundish._native import RTensor
from tundish.errors import InvalidInputError, InvalidTypeError, format_count, format_type
from tundish.rtensor.dense_tensors import is_whole

__all__ = ["output_buffers"]


def output_buffers(out: Any, handles: list[RTensor]) -> list[Tensor]:
    """The tensors of `out`, one for each handle.

    Raises:
        InvalidTypeError: `out` contains anything but dense tensors with memory.
        InvalidInputError: a tensor does not fit its handle, or has no memory of its own for each value.
    """
    if not isinstance(out, Iterable):
        raise InvalidTypeError(f"out is {format_type(out)}: give a tensor, or a list of tensors")
    buffers = [out] if isinstance(out, Tensor) else list(out)
    if len(buffers) != len(handles):
        raise InvalidInputError(
            f"out has {format_count(len(buffers), 'tensor')} and obj has {format_count(len(handles), 'handle')}: "
            "give a tensor for each handle"
        )
    for number, (handle, buffer) in enumerate(zip(handles, buffers, strict=True)):
        _check(number, buffer, handle)
    return buffers


def _check(number: int, buffer: Any, handle: RTensor) -> None:
    if not isinstance(buffer, Tensor):
        raise InvalidTypeError(f"out[{number}] is {format_type(buffer)}: give a tensor")
    if buffer.layout is not torch.strided or buffer.is_nested or buffer.is_meta:
        raise InvalidTypeError(
            f"out[{number}] is not dense, or is on the device meta: give a dense tensor with memory"
        )
    if buffer.dtype != handle.dtype or buffer.shape != handle.shape:
        raise InvalidInputError(
            f"out[{number}] is {buffer.dtype} of shape {tuple(buffer.shape)}, and its handle is "
            f"{handle.dtype} of shape {tuple(handle.shape)}: give a tensor like the handle"
        )
    if not is_whole(buffer):
        raise InvalidInputError(
            f"out[{number}] has no memory for its values, because its storage was freed or cut: give another tensor"
        )
    if any(not step and size > 1 for step, size in zip(buffer.stride(), buffer.shape, strict=True)):
        raise InvalidInputError(
            f"out[{number}] is expanded, so several of its elements share memory: give a clone() of it"
        )
    if buffer.requires_grad:
        raise InvalidInputError(f"out[{number}] requires a gradient: give its detach()")
