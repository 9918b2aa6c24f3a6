"""Handles: small, and made for travelling.

Owns what a handle is called and how nested containers of handles become bytes. What always holds: no handle holds a
tensor before it was asked for it; nothing that came as bytes is a name of something that is imported or called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from tundish._native import RTensor, dump_handles, load_handles, shard_ids
from tundish.errors import InvalidTypeError
from tundish.rtensor.checks import check_claim_of_handles, check_container, check_iterator
from tundish.tree import find_all, map_only

__all__ = [
    "CLOSED",
    "RTensor",
    "TensorShardInfo",
    "by_owner",
    "claimed",
    "collect_shards",
    "dumps",
    "flatten_shard_ids",
    "handles_of",
    "in_place_of_handles",
    "inside",
    "loads",
    "opened",
]


class TensorShardInfo(NamedTuple):
    """Where a tensor is.

    Attributes:
        shard_id: names it: up to 128 characters out of `A-Z a-z 0-9 . _ : -`.
        node_addr: where its owner serves it, as `"host:port"`: up to 300 ASCII characters without spaces.
        ref: what the backend needs beside these: an `ObjectRef` of Ray.
    """

    shard_id: str
    node_addr: str
    ref: Any = None


def dumps(obj: Any) -> bytes:
    """A nested structure of handles as bytes: dicts, lists and tuples of handles, numbers, texts, bytes and None.

    A handle takes a few bytes, one where it is that of the next shard like the one before. Nothing is pickled.

    Raises `InvalidTypeError`, with the path, for anything else, and for what lies in more than 500 containers.
    """
    return dump_handles(obj)


def loads(data: bytes | bytearray | memoryview) -> Any:
    """What `dumps` was given.

    The bytes may come from anybody: no more than handles, containers and values is made of them. Raises
    `InvalidInputError` for bytes that `dumps` did not make.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise InvalidTypeError(f"loads takes bytes, not a {type(data).__qualname__}")
    return load_handles(bytes(data))


def restore(data: bytes, ref: Any) -> RTensor:
    """A handle that was pickled."""
    handle: RTensor = load_handles(data)
    return handle if ref is None else handle.with_ref(ref)


# In these a tree finds nothing; iterators, which may hold something as well, are not to be used up.
CLOSED: Final[tuple[type[Any], ...]] = (
    set,
    frozenset,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
    MappingProxyType,
)


_HANDLES = {RTensor}


def handles_of(obj: Any) -> list[RTensor]:
    """The handles in a nested structure, as often as they are named.

    Raises `InvalidTypeError` for handles in a set or a view of a dict, which would be passed over without a word, and
    for an iterator.
    """
    if type(obj) is RTensor:
        return [obj]
    if _is_flat(obj):
        return list(obj.values()) if type(obj) is dict else list(obj)
    found = find_all((RTensor, *CLOSED), obj)
    handles = [part for part in found if isinstance(part, RTensor)]
    if len(handles) < len(found):
        for part in found:
            if isinstance(part, CLOSED) and handles_of(inside(part)):
                raise InvalidTypeError(
                    f"handles are found in dicts, lists and tuples, and not in {opened(part)}"
                )
    if not handles:
        check_iterator(obj)
    return handles


def inside(closed: Any) -> list[Any]:
    """What is in one of the `CLOSED`."""
    return list(closed.values()) if isinstance(closed, MappingProxyType) else list(closed)


def opened(closed: Any) -> str:
    """What one of the `CLOSED` is, and what to give in its place."""
    kind = "dict" if isinstance(closed, MappingProxyType) else "list"
    return f"a {type(closed).__qualname__}: give {kind}(…) of it"


def claimed(obj: Any, what: str) -> list[RTensor]:
    """The handles in what is claimed, kept or drained; what else is there may be anything.

    Raises `InvalidTypeError` for names of shards, and as `handles_of`.
    """
    check_claim_of_handles(obj, what)
    return handles_of(obj)


def in_place_of_handles(function: Callable[[RTensor], Any], obj: Any) -> Any:
    """The nested `obj` with `function(handle)` in place of each of its handles."""
    if type(obj) is RTensor:
        return function(obj)
    if not _is_flat(obj):
        return map_only(RTensor, function, obj)
    if type(obj) is dict:
        return dict(zip(obj, map(function, obj.values()), strict=True))
    return type(obj)(map(function, obj))


def _is_flat(obj: Any) -> bool:
    """Whether it is a plain container of handles alone: many fetches are small, and a walk takes some microseconds."""
    kind = type(obj)
    if kind is dict:
        return set(map(type, obj.values())) == _HANDLES
    return (kind is list or kind is tuple) and set(map(type, obj)) == _HANDLES


def flatten_shard_ids(obj: Any) -> list[str]:
    """The ids of all shards that handles in `obj` lead to, each once.

    To be sent where shards are to be dropped: texts, since handles would be fetched on arrival. Raises
    `InvalidTypeError` for a set, an iterator or a view of a dict, in which no handles are found.
    """
    check_container(obj, "flatten_shard_ids")
    return shard_ids(handles_of(obj))


def collect_shards(obj: Any) -> dict[str, list[str]]:
    """The ids of all shards that handles in `obj` lead to, each once, by the address of their owner.

    Raises as `flatten_shard_ids`.
    """
    check_container(obj, "collect_shards")
    return by_owner(handles_of(obj))


def by_owner(handles: Iterable[RTensor]) -> dict[str, list[str]]:
    """The ids of the shards of `handles`, each once, by the address of their owner."""
    owned: dict[str, list[RTensor]] = {}
    for handle in handles:
        owned.setdefault(handle.node_addr, []).append(handle)
    return {owner: shard_ids(some) for owner, some in owned.items()}
