"""Handles: `TensorShardInfo`, handles in nested containers, and such containers as bytes.

Invariants:
    Loading makes handles, tensors, Python's own containers and plain values, and nothing else. Nothing is looked up by
    a name in the bytes, but the dtypes of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView, Set
from typing import Any, Final, NamedTuple

import msgpack
import torch
from msgpack import ExtType
from torch import Tensor

from tundish import tree
from tundish._native import RTensor, shard_ids
from tundish.errors import InvalidInputError, InvalidTypeError, format_type
from tundish.rtensor.dense_tensors import STORED_DTYPES, dense
from tundish.tensor_bytes import raw_bytes
from tundish.tree import Refusal, find_all

# Codes of msgpack's extension types: of a mark before the items of a tuple, of an integer of more than 64 bits, of a
# handle's fields, and of a tensor's dtype, shape and bytes. Integers are in two's complement, least significant byte
# first.
_TUPLE, _INTEGER, _HANDLE, _TENSOR = 1, 2, 3, 4
_TUPLE_MARK: Final = ExtType(_TUPLE, b"")
_PLAIN: Final = frozenset({type(None), bool, float, bytes})
_DECODED: Final = _PLAIN | {int, str}
_DEEPEST: Final = 100
# More than any tensor has dimensions.
_MOST_FIELDS: Final = 64
_DTYPES: Final = {str(dtype).removeprefix("torch."): dtype for dtype in STORED_DTYPES}


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
    """Serialize nested containers of handles as msgpack. Nothing is pickled.

    Args:
        obj: dicts, lists and tuples of handles, tensors, numbers, strings, bytes and None. Keys may be tuples. Tensors
            are written with their values; they come back in host memory.

    Returns:
        The bytes: some 60 for each handle.

    Raises:
        InvalidTypeError: `obj` has anything else in it, or more than 100 nested containers. The message has the path.
        InvalidInputError: a tensor has no values, for example because its storage was freed.

    Example:
        >>> import tundish as td
        >>> len(td.rtensor.dumps({"step": 3, "handles": []})) < 100
        True
    """
    try:
        return msgpack.packb(_encoded(obj, 0))  # type: ignore[no-any-return]
    except _RefusedError as refused:
        raise refused.kind(f"obj{''.join(reversed(refused.path))} {refused.reason}") from refused


def loads(data: bytes | bytearray | memoryview) -> Any:
    """Restore what `dumps` serialized. It is safe for untrusted bytes: it makes handles, containers and plain values.

    Args:
        data: the bytes.

    Returns:
        The containers, handles and tensors.

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
    try:
        return _Decoder(bytes(data)).decode()
    except (ValueError, TypeError, OverflowError, RuntimeError, msgpack.UnpackException) as error:
        # Some errors of msgpack have no message.
        reason = str(error) or type(error).__name__
        raise InvalidInputError(f"these bytes are not what dumps returned: {reason}") from error


class _RefusedError(Exception):
    """An object that cannot be serialized, and the path to it from the inside out."""

    def __init__(self, kind: type[Exception], reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason
        self.path: list[str] = []


def _encoded(value: Any, depth: int) -> Any:
    """`value` made of types that msgpack has. A tuple becomes an array that begins with `_TUPLE_MARK`."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is str:
        return _encoded_text(value)
    if kind is int:
        is_short = -(2**63) <= value < 2**64
        size = value.bit_length() // 8 + 1
        return value if is_short else ExtType(_INTEGER, value.to_bytes(size, "little", signed=True))
    if kind is RTensor:
        return _encoded_handle(value)
    if isinstance(value, Tensor):
        return _encoded_tensor(value)
    if kind not in (dict, list, tuple):
        raise _RefusedError(
            InvalidTypeError,
            f"is a {kind.__module__}.{kind.__qualname__}: handles travel in dicts, lists and tuples, beside tensors, "
            "numbers, strings, bytes and None; make it one of these",
        )
    if depth == _DEEPEST:
        raise _RefusedError(
            InvalidTypeError,
            f"lies deeper than {_DEEPEST} containers, or in a container that contains itself",
        )
    if kind is dict:
        return _encoded_dict(value, depth)
    items = []
    for place, item in enumerate(value):
        try:
            items.append(_encoded(item, depth + 1))
        except _RefusedError as refused:
            refused.path.append(f"[{place}]")
            raise
    return items if kind is list else (_TUPLE_MARK, *items)


def _encoded_dict(items: dict[Any, Any], depth: int) -> dict[Any, Any]:
    encoded: dict[Any, Any] = {}
    for key, item in items.items():
        if isinstance(key, Tensor):
            raise _RefusedError(
                InvalidTypeError, "(a key) is a tensor: give numbers, strings or tuples as keys"
            )
        try:
            encoded_key = _encoded(key, depth + 1)
        except _RefusedError as refused:
            refused.path.append(" (a key)")
            raise
        try:
            encoded[encoded_key] = _encoded(item, depth + 1)
        except _RefusedError as refused:
            refused.path.append(f"[{key!r}]")
            raise
    return encoded


def _encoded_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _RefusedError(InvalidTypeError, f"is no text: {error}") from error
    return text


def _encoded_handle(handle: RTensor) -> ExtType:
    if handle.ref is not None:
        raise _RefusedError(
            InvalidTypeError,
            "is a handle of Ray's object store, whose reference only Ray itself can carry: pass the handle to a remote "
            "function or actor as it is",
        )
    try:
        return ExtType(_HANDLE, msgpack.packb(handle.fields()))
    except InvalidInputError as error:
        # A backend may give addresses of its own kind.
        raise _RefusedError(InvalidTypeError, f"is a handle that cannot travel: {error}") from error


def _encoded_tensor(tensor: Tensor) -> ExtType:
    try:
        values = dense(tensor)
    except Refusal as refusal:
        raise _RefusedError(refusal.kind, refusal.reason) from refusal
    name = str(values.dtype).removeprefix("torch.")
    return ExtType(_TENSOR, msgpack.packb([name, list(values.shape), raw_bytes(values).numpy().tobytes()]))


class _Decoder:
    """Restores what `_encoded` made, out of bytes that anybody may have made.

    Invariants:
        No memory is allocated for items that are only announced: containers grow with the items that are there.
        Containers nest at most `_DEEPEST` deep, and only the extension types of this module are known.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._unpacker = msgpack.Unpacker(max_buffer_size=len(data), strict_map_key=False)
        self._unpacker.feed(data)
        # The latest handle: the next one mostly has the same owner, dtype and shape.
        self._latest: RTensor | None = None

    def decode(self) -> Any:
        value = self._next(0)
        if self._left():
            raise ValueError(f"{self._left()} bytes follow")
        return value

    def _left(self) -> int:
        left: int = len(self._data) - self._unpacker.tell()
        return left

    def _next(self, depth: int, *, begins_array: bool = False) -> Any:
        place = self._unpacker.tell()
        if place >= len(self._data):
            raise ValueError("they end too early")
        first = self._data[place]
        if 0x90 <= first <= 0x9F or first in (0xDC, 0xDD):
            return self._array(self._unpacker.read_array_header(), depth + 1)
        if 0x80 <= first <= 0x8F or first in (0xDE, 0xDF):
            return self._map(self._unpacker.read_map_header(), depth + 1)
        value = self._unpacker.unpack()
        if type(value) is ExtType:
            return self._extension(value, begins_array=begins_array)
        if type(value) not in _DECODED:
            raise ValueError(f"a {type(value).__name__} is none of their types")
        return value

    def _check(self, count: int, depth: int) -> None:
        if depth > _DEEPEST:
            raise ValueError(f"more than {_DEEPEST} containers are nested")
        # Each item takes a byte at least.
        if count > self._left():
            raise ValueError("they end too early")

    def _array(self, count: int, depth: int) -> Any:
        self._check(count, depth)
        items = [self._next(depth, begins_array=place == 0) for place in range(count)]
        return tuple(items[1:]) if items and items[0] is _TUPLE_MARK else items

    def _map(self, count: int, depth: int) -> dict[Any, Any]:
        self._check(2 * count, depth)
        items = {}
        for _ in range(count):
            key = self._next(depth)
            if isinstance(key, Tensor):
                raise ValueError("a tensor is a key")
            items[key] = self._next(depth)
        return items

    def _extension(self, value: ExtType, *, begins_array: bool) -> Any:
        if value == _TUPLE_MARK and begins_array:
            return _TUPLE_MARK
        if value.code == _INTEGER:
            return int.from_bytes(value.data, "little", signed=True)
        if value.code not in (_HANDLE, _TENSOR):
            raise ValueError(f"extension type {value.code} is none of theirs")
        # The fields of one handle or tensor nest once, and are few.
        fields = msgpack.unpackb(value.data, use_list=False, max_array_len=_MOST_FIELDS, max_map_len=0)
        if value.code == _TENSOR:
            return _decoded_tensor(*fields)
        self._latest = RTensor.from_fields(*fields, like=self._latest)
        return self._latest


def _decoded_tensor(name: str, shape: tuple[int, ...], values: bytes) -> Tensor:
    dtype = _DTYPES.get(name)
    if dtype is None or not isinstance(values, bytes):
        raise ValueError(f"no tensor has the dtype {name!r}")
    if len(values) != math.prod(shape) * dtype.itemsize or min(shape, default=0) < 0:
        raise ValueError(f"{len(values)} bytes are no tensor of {dtype} of shape {shape}")
    # They can be trained with even if they are made in inference mode.
    with torch.inference_mode(False):
        if not values:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(bytearray(values), dtype=dtype).view(shape)


def restore(fields: tuple[Any, ...], ref: Any) -> RTensor:
    """Restore a pickled handle."""
    handle: RTensor = RTensor.from_fields(*fields)
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
        InvalidInputError: there are tensors and no handles, or only ids of shards. `remotize` was probably forgotten.
    """
    searched = _searchable(obj)
    handles = handles_of(searched)
    if not handles and find_all(Tensor, searched):
        raise InvalidInputError(f"{argument} has tensors and no handles: give what remotize returned")
    texts = [searched] if isinstance(searched, str) else searched
    if texts and isinstance(texts, list | tuple | set) and all(isinstance(one, str) for one in texts):
        raise InvalidInputError(
            f"{argument} has strings and no handles: give what remotize returned, not the ids"
        )
    return handles


def replace_handles(function: Callable[[RTensor], Any], obj: Any) -> Any:
    """Nested containers like `obj`, with `function(handle)` in place of each handle."""
    return tree.map(function, obj, kinds=RTensor)


def check_shard_id(shard_id: Any) -> None:
    """Raise `InvalidTypeError` for anything but a string."""
    if not isinstance(shard_id, str):
        raise InvalidTypeError(f"shard_id is {format_type(shard_id)}: give the name of a shard, a string")


def check_shard_ids(shard_ids: Any, function: str) -> None:
    """Raise `InvalidTypeError` for anything but an iterable of shard ids, such as a handle or a dict of handles."""
    if not isinstance(shard_ids, Iterable) or isinstance(shard_ids, (bytes, Mapping)):
        raise InvalidTypeError(
            f"{function} takes shard ids, not {format_type(shard_ids)}: give flatten_shard_ids(obj) for the handles in "
            "obj"
        )


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
