"""`remotize`: stores the tensors of nested containers and puts handles in their place."""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any, Final

import torch
from torch import Tensor

from tundish.errors import InvalidTypeError
from tundish.rtensor.arguments import DEFAULT_TIMEOUT, check_iterator, check_seconds
from tundish.rtensor.backends.http import current_backend
from tundish.rtensor.handles import OPAQUE, elements_of, suggestion
from tundish.rtensor.transfer.dense_tensors import STORED_DTYPES, dense, is_whole
from tundish.tree import Refusal, find_all, map_only

__all__ = ["remotize"]

_MASK: Final = "attention_mask"


def remotize(obj: Any, *, trim: bool = True, timeout: float = DEFAULT_TIMEOUT) -> Any:
    """Stores the tensors in `obj` and returns nested containers with handles in their place.

    Copies are stored: detached, in host memory, of the values that a tensor shows and not of the base that it is a
    view of. The same tensor twice is stored once. No step owns the shards until one claims them; they stay until
    they are removed or that step ends.

    Args:
        obj: nested containers of tensors, of the types that `td.tree` knows. Everything but tensors stays as it is.
        trim: whether to cut trailing columns that no row uses, by the `attention_mask` of a dict: of the mask (two
            or more dimensions), and of all tensors in the dict with its rows and columns. Nonzero means used. A
            floating-point mask counts only if it holds nothing but 0 and 1, and not only 0: an additive mask (0 and
            -inf) cuts nothing.
        timeout: seconds to wait for memory where the storage is at its limit.

    Raises:
        StoreFullError: the storage stayed at its limit.
        InvalidTypeError: a tensor is sparse, quantized or otherwise more than values in memory; its dtype cannot be
            sent; or it is in a set or a view of a dict. The message has the path.
    """
    timeout = check_seconds(timeout)
    found: list[Tensor] = []
    # Keeps every tensor alive, so that no other one takes its address meanwhile.
    alive: list[Tensor] = []
    numbers_at: dict[Any, list[int]] = {}
    order: list[int] = []

    def collect(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            if find_all(Tensor, elements_of(tensor)):
                raise Refusal(
                    InvalidTypeError,
                    f"has tensors, which are found in dicts, lists and tuples, and is {suggestion(tensor)}",
                )
            return tensor
        here = numbers_at.setdefault(_identity(tensor), [])
        for number in here:
            if alive[number] is tensor or _shows_same(alive[number], tensor):
                break
        else:
            number = len(found)
            found.append(dense(tensor))
            alive.append(tensor)
            here.append(number)
        order.append(number)
        return tensor

    map_only((Tensor, *OPAQUE), collect, obj, enter=_trimmed if trim else None)
    if not found:
        check_iterator(obj)
        return obj
    handles = current_backend().store(found, timeout)
    numbers = iter(order)
    return map_only(Tensor, lambda _: handles[next(numbers)], obj)


def _identity(tensor: Tensor) -> Any:
    """Equal for tensors that may show the same values."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return id(tensor)
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        # It has no address; `dense` refuses it.
        return id(tensor)
    # Tensors without memory may stand for zeros, or have lost their storage.
    return tensor.data_ptr() or id(tensor), tensor.dtype, tensor.shape


def _shows_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one identity show the same values: what is too slow to ask of every tensor."""
    first, second = (
        (tensor.stride(), tensor.device, tensor.is_conj(), tensor.is_neg()) for tensor in (one, other)
    )
    return first == second


def _trimmed(container: Any) -> Any:
    """A dict without trailing columns that no row of its mask uses; or the same one."""
    if not isinstance(container, (dict, UserDict)):
        return container
    mask = container.get(_MASK)
    if (
        not isinstance(mask, Tensor)
        or mask.layout is not torch.strided
        or mask.is_nested
        or mask.is_meta
        or mask.dtype not in STORED_DTYPES
        or not is_whole(mask)
    ):
        # `dense` refuses it.
        return container
    if mask.ndim < 2 or not mask.numel():
        return container
    rows, columns = mask.shape[0], mask.shape[-1]
    values = mask.detach()
    try:
        is_used = values.ne(0)
    except RuntimeError:
        # torch does not compare values of this dtype.
        return container
    if (mask.is_floating_point() or mask.is_complex()) and not _is_zeros_and_ones(values, is_used):
        return container
    used = is_used.reshape(-1, columns).any(0).nonzero()
    width = int(used[-1]) + 1 if len(used) else 0
    if width == columns:
        return container
    trimmed = copy.copy(container)
    for key, value in container.items():
        if (
            isinstance(value, Tensor)
            and value.layout is torch.strided
            and not value.is_nested
            and value.ndim >= 2
            and (value.shape[0], value.shape[-1]) == (rows, columns)
        ):
            trimmed[key] = value[..., :width]
    return trimmed


def _is_zeros_and_ones(values: Tensor, is_used: Tensor) -> bool:
    """Whether a floating-point mask holds only 0 and 1, and some 1. All 0 may be an additive mask."""
    return bool(((values.eq(1) == is_used).all() & is_used.any()).item())
