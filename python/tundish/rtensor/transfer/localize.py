"""`localize`: fetches the tensors of handles in nested containers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from tundish._native import RTensor, ShardStore
from tundish.rtensor.arguments import DEFAULT_TIMEOUT, check_shard_ids
from tundish.rtensor.backends.current_backend import current_backend
from tundish.rtensor.handles import replace_handles
from tundish.rtensor.steps.no_step_began_warning import warn_if_no_step_began
from tundish.rtensor.transfer.output_buffers import output_buffers
from tundish.timeouts import check_seconds
from tundish.tree import find_all

__all__ = ["clear_fetch_buffer", "fetch_buffer_stats", "localize"]


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


def fetch_buffer_stats() -> dict[str, Any]:
    """Counts of what this process fetched and holds until the end of the step.

    Returns:
        A dict with these counts:

        - `num_entries`, `total_bytes`: all fetched tensors.
        - `kept_entries`, `kept_bytes`: those that outlive the step, because `keep` was called for them.
        - `high_water_bytes`: the largest `total_bytes` so far.
        - `hits`, `misses`: tensors that were in the buffer, and tensors that had to be fetched.
        - `in_flight`: tensors that are being fetched.
        - `late_inserts_refused`: tensors that arrived after their step had ended.
        - `oldest_step`: the oldest step that still has bytes, or None.
        - `memory`: bytes of allocated memory, as in `storage_stats`.

    Example:
        >>> import tundish as td
        >>> td.rtensor.fetch_buffer_stats()["num_entries"]
        0
    """
    found: dict[str, Any] = current_backend().stats()["buffer"]
    return found
