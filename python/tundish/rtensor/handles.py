"""Handles: `TensorShardInfo`, handles as bytes, and handles in nested containers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MappingView, Set
from typing import Any, NamedTuple

from torch import Tensor

from tundish import tree
from tundish._native import RTensor, dump_handles, load_handles, shard_ids
from tundish.errors import InvalidInputError, InvalidTypeError, format_type
from tundish.tree import find_all

__all__ = [
    "RTensor",
    "TensorShardInfo",
    "by_owner",
    "collect_shards",
    "dumps",
    "flatten_shard_ids",
    "handles_of",
    "loads",
    "replace_handles",
    "required_handles",
]


class TensorShardInfo(NamedTuple):
    """The location of a tensor.

    Attributes:
        shard_id: its name: up to 128 characters out of `A-Z a-z 0-9 . _ : -`.
        node_addr: the address of its owner's server, `"host:port"`: up to 300 ASCII characters without spaces.
        ref: a reference of the backend: an `ObjectRef` of Ray, else None.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> td.rtensor.set_backend(td.rtensor.LocalBackend())
        >>> td.rtensor.store("rewards", torch.ones(2)).shard
        TensorShardInfo(shard_id='rewards', node_addr='local', ref=None)
        >>> td.rtensor.set_backend(None)
    """

    shard_id: str
    node_addr: str
    ref: Any = None


def dumps(obj: Any) -> bytes:
    """Serialize nested containers of handles. Nothing is pickled.

    Args:
        obj: dicts, lists and tuples of handles, numbers, strings, bytes and None.

    Returns:
        The bytes: a few for each handle.

    Raises:
        InvalidTypeError: `obj` has anything else in it, or more than 500 nested containers. The message has the path.

    Example:
        >>> import tundish as td
        >>> len(td.rtensor.dumps({"step": 3, "handles": []})) < 100
        True
    """
    return dump_handles(obj)


def loads(data: bytes | bytearray | memoryview) -> Any:
    """Restore what `dumps` serialized. It is safe for untrusted bytes: it makes handles, containers and plain values.

    Args:
        data: the bytes.

    Returns:
        The containers and handles. Handles of equal owner, dtype and shape share memory.

    Raises:
        InvalidInputError: `dumps` did not make these bytes.
        InvalidTypeError: `data` is not bytes.

    Example:
        >>> import tundish as td
        >>> td.rtensor.loads(td.rtensor.dumps({"step": 3, "handles": []}))
        {'step': 3, 'handles': []}
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise InvalidTypeError(f"data is {format_type(data)}: give the bytes that dumps returned")
    return load_handles(bytes(data))


def restore(data: bytes, ref: Any) -> RTensor:
    """Restore a pickled handle."""
    handle: RTensor = load_handles(data)
    return handle if ref is None else handle.with_ref(ref)


def handles_of(obj: Any) -> list[RTensor]:
    """The handles in nested containers, with repetitions.

    `find_all` does not search sets, iterators and views of dicts. They are searched only as the outermost container.
    """
    handles: list[RTensor] = find_all(RTensor, _searchable(obj))
    return handles


def _searchable(obj: Any) -> Any:
    """`obj`, or a list of its items if `find_all` does not search such a container."""
    is_unsearched = isinstance(obj, (Set, MappingView, Iterator))
    return list(obj) if is_unsearched else obj


def required_handles(obj: Any, argument: str) -> list[RTensor]:
    """The handles in nested containers, with repetitions, as `handles_of`.

    Raises:
        InvalidInputError: there are tensors and no handles. `remotize` was probably forgotten.
    """
    searched = _searchable(obj)
    handles = handles_of(searched)
    if not handles and find_all(Tensor, searched):
        raise InvalidInputError(f"{argument} has tensors and no handles: give what remotize returned")
    return handles


def replace_handles(function: Callable[[RTensor], Any], obj: Any) -> Any:
    """Nested containers like `obj`, with `function(handle)` in place of each handle."""
    return tree.map(function, obj, kinds=RTensor)


def flatten_shard_ids(obj: Any) -> list[str]:
    """Return the ids of all shards of the handles in `obj`, to be passed to `remove` or `clear_fetch_buffer`.

    Args:
        obj: nested containers of handles.

    Returns:
        Each id once, in the order of the handles.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> td.rtensor.flatten_shard_ids([td.rtensor.store("rewards", torch.ones(2))])
        ['rewards']
    """
    return shard_ids(handles_of(obj))


def collect_shards(obj: Any) -> dict[str, list[str]]:
    """Return the ids of all shards of the handles in `obj`, by owner.

    Args:
        obj: nested containers of handles.

    Returns:
        For the address of each owner, the ids of its shards, each once.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> td.rtensor.set_backend(td.rtensor.LocalBackend())
        >>> td.rtensor.collect_shards([td.rtensor.store("rewards", torch.ones(2))])
        {'local': ['rewards']}
        >>> td.rtensor.set_backend(None)
    """
    return by_owner(handles_of(obj))


def by_owner(handles: Iterable[RTensor]) -> dict[str, list[str]]:
    """The ids of the shards of `handles`, each once, by the address of their owner."""
    owned: dict[str, list[RTensor]] = {}
    for handle in handles:
        owned.setdefault(handle.node_addr, []).append(handle)
    return {owner: shard_ids(some) for owner, some in owned.items()}
