"""Stores tensors and fetches them: `remotize`, `localize`, and shards of this process by name."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Iterable, Sequence, Set
from functools import partial
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor

from tundish import tree
from tundish._native import RTensor, ShardStore
from tundish.errors import InvalidInputError, InvalidTypeError, format_count, format_type
from tundish.rtensor.backends import Removed, current_backend
from tundish.rtensor.dense_tensors import dense, is_whole
from tundish.rtensor.handles import check_shard_ids, replace_handles
from tundish.rtensor.monitoring import warn_if_no_step_began
from tundish.rtensor.server import DEFAULT_TIMEOUT
from tundish.timeouts import check_seconds
from tundish.tree import Refusal, find_all

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


def localize(
    obj: Any, *, out: Tensor | Sequence[Tensor] | None = None, timeout: float = DEFAULT_TIMEOUT
) -> Any:
    """Fetch the tensors of the handles in `obj` and return nested containers with them in their place.

    What was fetched in this step comes from the fetch buffer, and stays there until the step ends. Everything else
    is fetched in one request an owner, all owners at once; fetches that another thread has begun are waited for. The
    tensors are in host memory. You may write to them: no other reader sees the change. Equal handles become one
    tensor.

    Args:
        obj: a handle, or nested containers of handles. Everything else stays as it is.
        out: output buffers: a tensor for a handle, else as many tensors as `obj` has handles, in their order, with
            their shapes and dtypes. The fetched tensors are copied into them, and they come in place of the handles.
        timeout: seconds until everything has arrived.

    Returns:
        Containers like `obj`, with a CPU tensor of the handle's shape and dtype, or the output buffer, for each handle.

    Raises:
        ShardGoneError: a shard was removed, or drained with its step, or the step ended meanwhile.
        TransferError: an owner does not answer, or sent damaged bytes; the message has its address.
        NotAuthorizedError: an owner wants a token; see `serve`.
        ShardMismatchError: a tensor has another dtype or shape than its handle.
        TensorStoreFullError: the fetch buffer stayed at its limit.
        TimedOutError: it took too long.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> handle = td.rtensor.remotize(torch.arange(6).view(3, 2))
        >>> with td.rtensor.step(claim=handle):
        ...     td.rtensor.localize(handle[1:])  # only these rows are fetched
        tensor([[2, 3],
                [4, 5]])
    """
    timeout = check_seconds(timeout)
    handles: list[RTensor] = find_all(RTensor, obj)
    buffers = None if out is None else output_buffers(out, handles)
    if not handles:
        return obj
    unique = list(dict.fromkeys(handles))
    tensors = dict(zip(unique, current_backend().fetch(unique, timeout), strict=True))
    warn_if_no_step_began()
    if buffers is None:
        return replace_handles(tensors.__getitem__, obj)
    for handle, buffer in zip(handles, buffers, strict=True):
        buffer.copy_(tensors[handle])
    outputs = iter(buffers)
    return replace_handles(lambda _: next(outputs), obj)


def clear_fetch_buffer(shard_ids: str | Iterable[str] | None = None) -> int:
    """Drop what this process fetched. Tensors that were handed out stay valid.

    Args:
        shard_ids: one shard to drop, or several; None drops everything.

    Returns:
        The number of entries that were dropped.

    Example:
        >>> import tundish as td
        >>> td.rtensor.clear_fetch_buffer()
        0
    """
    ids = [shard_ids] if isinstance(shard_ids, str) else shard_ids
    if ids is not None:
        check_shard_ids(ids, "clear_fetch_buffer")
    return ShardStore.clear_buffer(ids)


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


def store(shard_id: str, tensor: Tensor, *, timeout: float = DEFAULT_TIMEOUT) -> RTensor:
    """Store a copy of `tensor` under a name, and return its handle.

    Do not reuse a name within a step: see `remove`.

    Args:
        shard_id: the name: up to 128 characters out of `A-Z a-z 0-9 . _ : -`.
        tensor: a dense tensor on any device.
        timeout: seconds to wait for memory while the storage is at its limit.

    Returns:
        The handle of the stored copy.

    Raises:
        InvalidInputError: a shard of that name exists.
        TensorStoreFullError, InvalidTypeError: as `remotize`.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> handle = td.rtensor.store("rewards", torch.ones(2))
        >>> td.rtensor.localize(handle)
        tensor([1., 1.])
    """
    timeout = check_seconds(timeout)
    _check_shard_id(shard_id)
    if not isinstance(tensor, Tensor):
        raise InvalidTypeError(
            f"tensor is {format_type(tensor)}: give a tensor; remotize takes containers of tensors"
        )
    try:
        values = dense(tensor)
    except Refusal as refusal:
        raise refusal.kind(f"the tensor to be stored as {shard_id} {refusal.reason}") from refusal
    return current_backend().store_as(shard_id, values, timeout)


def fetch(shard_id: str) -> Tensor:
    """Return the tensor that this process stores under a name, in host memory. You may write to it.

    Args:
        shard_id: the name.

    Returns:
        A CPU tensor.

    Raises:
        ShardGoneError: this process stores no tensor under this name.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> handle = td.rtensor.store("rewards", torch.ones(2))
        >>> td.rtensor.fetch("rewards")
        tensor([1., 1.])
    """
    _check_shard_id(shard_id)
    found: Tensor = current_backend().handle_of(shard_id).to_local()
    return found


def remove(shard_ids: str | Iterable[str]) -> int:
    """Remove shards that this process stores, and what it fetched of them.

    Other processes keep what they fetched until their step ends or `clear_batches` drains it. Until then they read the
    old tensor, even through a handle of a new tensor with the same name.

    Args:
        shard_ids: one name, or names. Unknown and repeated names are ignored.

    Returns:
        The number of shards that were removed.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> handle = td.rtensor.store("rewards", torch.ones(2))
        >>> td.rtensor.remove(["rewards", "unknown"])
        1
    """
    names: Sequence[str] | Iterable[str] = [shard_ids] if isinstance(shard_ids, str) else shard_ids
    check_shard_ids(names, "remove")
    return current_backend().remove(names)["cleared_count"]


def clear_node() -> Removed:
    """Remove everything that this process stores or fetched, claimed or not.

    Returns:
        The counts of the storage: `cleared_count` shards, `num_tensors` and `total_bytes`.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> handle = td.rtensor.store("rewards", torch.ones(2))
        >>> td.rtensor.clear_node()["cleared_count"]
        1
    """
    return current_backend().clear()


def _check_shard_id(shard_id: str) -> None:
    if not isinstance(shard_id, str):
        raise InvalidTypeError(f"shard_id is {format_type(shard_id)}: give the name of a shard, a string")
