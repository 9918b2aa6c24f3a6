"""`remotize`: stores the tensors of nested containers and puts handles in their place."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Iterable, Sequence, Set
from functools import partial
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor

from tundish import tree
from tundish.errors import InvalidInputError, InvalidTypeError
from tundish.rtensor.arguments import DEFAULT_TIMEOUT
from tundish.rtensor.backends.current_backend import current_backend
from tundish.rtensor.dense_tensors import dense, is_whole
from tundish.timeouts import check_seconds

__all__ = ["remotize"]

_MASK: Final = "attention_mask"
# A floating-point mask may be additive, and cuts nothing.
_MASK_DTYPES: Final = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def remotize(obj: Any, *, trim: bool | Sequence[str] = True, timeout: float = DEFAULT_TIMEOUT) -> Any:
    """Store the tensors in `obj` and return nested containers with handles in their place.

    Copies are stored: detached, in host memory, of the values that a tensor shows and not of the base that it is a
    view of. The same tensor twice is stored once. No step owns the shards until one claims them; they stay until
    they are removed or that step ends.

    Args:
        obj: nested containers of tensors, of the types that `td.tree` knows. Everything but tensors stays as it is.
        trim: whether to cut trailing columns that no row uses, in dicts with an `attention_mask`: shape (rows, …,
            columns), bool or integer, nonzero where a column is used. They are cut from the mask and from all tensors
            of the dict with exactly its shape. Names, as in `("logits",)`, cut the dict's tensors of these names too:
            their shape begins with that of the mask, as (rows, columns, vocabulary) does.
        timeout: seconds to wait for memory while the storage is at its limit.

    Returns:
        Containers like `obj`, with an `RTensor` of the same shape (after trimming) and dtype for each tensor.

    Raises:
        TensorStoreFullError: the storage stayed at its limit.
        InvalidTypeError: a tensor is sparse, quantized or otherwise more than values in memory, or its dtype cannot be
            sent. The message has the path. Or `trim` is neither a bool nor names.
        InvalidInputError: a tensor that `trim` names does not begin with the shape of its `attention_mask`.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> batch = td.rtensor.remotize({"rewards": torch.ones(2, 3), "task": "sums"})
        >>> batch["rewards"].shape, batch["rewards"].dtype, batch["task"]
        (torch.Size([2, 3]), torch.float32, 'sums')
        >>> td.rtensor.localize(batch)["rewards"].sum()
        tensor(6.)
        >>> td.rtensor.remove(td.rtensor.flatten_shard_ids(batch))
        1
    """
    timeout = check_seconds(timeout)
    names = _names_to_trim(trim)
    found: list[Tensor] = []
    places: list[int] = []
    place_of: dict[Any, int] = {}
    # Keeps every tensor alive, so that no other one takes its address meanwhile.
    alive: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        place = place_of.setdefault(_identity(tensor), len(found))
        if place == len(found):
            found.append(dense(tensor))
        places.append(place)
        return tensor

    tree.map(collect, obj, enter=None if names is None else partial(_trimmed, names))
    if not found:
        return obj
    handles = current_backend().store(found, timeout)
    following = iter(places)
    return tree.map(lambda _: handles[next(following)], obj)


def _identity(tensor: Tensor) -> Any:
    """Equal for tensors that show the same values in the same memory."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return id(tensor)
    # Tensors inside a transformation have no address, and those without memory may stand for zeros.
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or not tensor.data_ptr():
        return id(tensor)
    form = (tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.is_conj(), tensor.is_neg())
    return tensor.data_ptr(), form


def _names_to_trim(trim: Any) -> Set[str] | None:
    """The names that `trim` adds to tensors of the mask's shape; None trims nothing."""
    if isinstance(trim, bool):
        return frozenset() if trim else None
    if isinstance(trim, str) or not isinstance(trim, Iterable):
        raise InvalidTypeError(f'trim is {trim!r}: give True, False, or names such as ("logits",)')
    names = list(trim)
    if not all(isinstance(name, str) for name in names):
        raise InvalidTypeError(f'trim is {trim!r}: give names of tensors, such as ("logits",)')
    return frozenset(names)


def _trimmed(names: Set[str], container: Any) -> Any:
    """A dict without trailing columns that no row of its mask uses; or the same one."""
    if not isinstance(container, (dict, UserDict)):
        return container
    mask = container.get(_MASK)
    if not _is_dense_table(mask) or mask.dtype not in _MASK_DTYPES or not mask.numel() or not is_whole(mask):
        return container
    columns = mask.shape[-1]
    used = mask.detach().ne(0).reshape(-1, columns).any(0).nonzero()
    width = int(used[-1]) + 1 if len(used) else 0
    trimmed = copy.copy(container)
    for key, value in container.items():
        if key in names and isinstance(value, Tensor):
            if not _is_dense_table(value) or value.shape[: mask.ndim] != mask.shape:
                raise InvalidInputError(
                    f"trim names {key!r}, whose shape {tuple(value.shape)} does not begin with that of {_MASK}, "
                    f"{tuple(mask.shape)}: name tensors with the mask's rows and columns"
                )
            trimmed[key] = value.narrow(mask.ndim - 1, 0, width)
        elif _is_dense_table(value) and value.shape == mask.shape:
            trimmed[key] = value[..., :width]
    return container if width == columns else trimmed


def _is_dense_table(value: Any) -> TypeGuard[Tensor]:
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not value.is_nested
        and not value.is_meta
        and value.ndim >= 2
    )
