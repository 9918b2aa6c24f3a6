"""Handles: `TensorShardInfo`, handles as bytes, and handles in nested containers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from tundish._native import RTensor, dump_handles, load_handles, shard_ids
from tundish.errors import InvalidTypeError
from tundish.rtensor.arguments import check_claim_of_handles, check_container, check_iterator
from tundish.tree import find_all, map_only

__all__ = [
    "OPAQUE",
    "RTensor",
    "TensorShardInfo",
    "by_owner",
    "claimed",
    "collect_shards",
    "dumps",
    "elements_of",
    "flatten_shard_ids",
    "handles_of",
    "loads",
    "replace_handles",
    "suggestion",
]


class TensorShardInfo(NamedTuple):
    """The location of a tensor.

    Attributes:
        shard_id: its name: up to 128 characters out of `A-Z a-z 0-9 . _ : -`.
        node_addr: the address of its owner's server, `"host:port"`: up to 300 ASCII characters without spaces.
        ref: what the backend needs besides: an `ObjectRef` of Ray.
    """

    shard_id: str
    node_addr: str
    ref: Any = None


def dumps(obj: Any) -> bytes:
    """Serializes nested containers of handles. Nothing is pickled; a handle takes a few bytes.

    Args:
        obj: dicts, lists and tuples of handles, numbers, strings, bytes and None.

    Raises:
        InvalidTypeError: anything else is in it, or more than 500 containers are nested. The message has the path.
    """
    return dump_handles(obj)


def loads(data: bytes | bytearray | memoryview) -> Any:
    """Restores what `dumps` serialized. Safe for untrusted bytes: makes only handles, containers and plain values.

    Args:
        data: the bytes.

    Raises:
        InvalidInputError: `dumps` did not make these bytes.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise InvalidTypeError(f"loads takes bytes, not a {type(data).__qualname__}")
    return load_handles(bytes(data))


def restore(data: bytes, ref: Any) -> RTensor:
    """Restores a pickled handle."""
    handle: RTensor = load_handles(data)
    return handle if ref is None else handle.with_ref(ref)


# The tree finds nothing in these containers.
OPAQUE: Final[tuple[type[Any], ...]] = (
    set,
    frozenset,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
    MappingProxyType,
)


def handles_of(obj: Any) -> list[RTensor]:
    """The handles in nested containers, with repetitions.

    Raises:
        InvalidTypeError: handles are in a set or a view of a dict, in which none would be found; or it is an iterator.
    """
    found = find_all((RTensor, *OPAQUE), obj)
    handles = [part for part in found if isinstance(part, RTensor)]
    if len(handles) < len(found):
        for part in found:
            if isinstance(part, OPAQUE) and handles_of(elements_of(part)):
                raise InvalidTypeError(
                    f"handles are found in dicts, lists and tuples, and not in {suggestion(part)}"
                )
    if not handles:
        check_iterator(obj)
    return handles


def elements_of(opaque: Any) -> list[Any]:
    """The elements of an `OPAQUE` container."""
    return list(opaque.values()) if isinstance(opaque, MappingProxyType) else list(opaque)


def suggestion(opaque: Any) -> str:
    """The type of an `OPAQUE` container, and what to give in its place."""
    kind = "dict" if isinstance(opaque, MappingProxyType) else "list"
    return f"a {type(opaque).__qualname__}: give {kind}(…) of it"


def claimed(obj: Any, function: str) -> list[RTensor]:
    """The handles in the argument of `function`, which claims, keeps or drains them.

    Raises:
        InvalidTypeError: it has ids of shards instead of handles; or as `handles_of`.
    """
    check_claim_of_handles(obj, function)
    return handles_of(obj)


def replace_handles(function: Callable[[RTensor], Any], obj: Any) -> Any:
    """Nested containers like `obj`, with `function(handle)` in place of each handle."""
    return map_only(RTensor, function, obj)


def flatten_shard_ids(obj: Any) -> list[str]:
    """The ids of all shards of the handles in `obj`, each once.

    Send these where shards are to be dropped.

    Args:
        obj: nested containers of handles.

    Raises:
        InvalidTypeError: it is a set, an iterator or a view of a dict, in which no handles are found.
    """
    check_container(obj, "flatten_shard_ids")
    return shard_ids(handles_of(obj))


def collect_shards(obj: Any) -> dict[str, list[str]]:
    """The ids of all shards of the handles in `obj`, each once, by the address of their owner.

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
