"""The device that a batch goes to: checks of the `device` argument, and copies to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tundish.errors import InvalidInputError, InvalidTypeError
from tundish.tree import Schema, unflatten_unchecked

__all__ = ["copy_to_device", "pinned_copy", "resolve_device", "unflatten_to_device"]


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
