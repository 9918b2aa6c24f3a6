"""Takes an object apart into its tensors and a schema, and puts it together again.

The schema is a pickle of the object in which each tensor is a number. Tensors and arrays that are more than a plain
tensor are pickled as `tensors` says; all other objects are pickled as their classes say.

The first pass assumes that each object of exactly the type `torch.Tensor` is plain. If a check of all tensors together
refutes that, a second pass examines each of them, which takes ten times as long.
"""

from __future__ import annotations

import dataclasses
import io
import operator
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from tundish.errors import (
    InvalidInputError,
    InvalidTypeError,
    NotPicklableError,
    TundishError,
    format_count,
    format_type,
)
from tundish.tree.layout import BufferLayout, decode_layout, layout_as_is, layout_of, tensors_to_send
from tundish.tree.mapping import format_key
from tundish.tree.tensors import Refusal, build_array, reduce_array, reduce_tensor

_get_dtype = operator.attrgetter("dtype")
_get_shape = operator.attrgetter("shape")


@dataclasses.dataclass(frozen=True, repr=False, slots=True)
class Schema:
    """All that `unflatten` needs beside the tensors. It pickles, and is equal where `layout` and `skeleton` are.

    Attributes:
        layout: dtypes, shapes, sizes and offsets of the tensors.
        skeleton: the pickle of the object, with numbers in place of its tensors.
    """

    layout: BufferLayout
    skeleton: bytes

    def __repr__(self) -> str:
        return f"<Schema of {len(self.layout.shapes)} tensors, {sum(self.layout.sizes)} bytes>"

    def __reduce__(self) -> tuple[Any, ...]:
        # Layouts are encoded and decoded once, as long as they are recent.
        return _schema_of, (self.layout.encoded, self.skeleton)


def _schema_of(layout: bytes, skeleton: bytes) -> Schema:
    return Schema(decode_layout(layout), skeleton)


def flatten(obj: Any) -> tuple[list[Tensor], Schema]:
    """Flatten a nested object into its tensors and a schema of the rest.

    Args:
        obj: nested containers of tensors, arrays and other values that can be pickled. It is not changed, and must not
            change meanwhile. Tensors may be of any dtype and strides, sparse, jagged, subclasses or parameters. They
            come back with `requires_grad`; without `grad`, graph, dimension names and added attributes. Arrays with a
            pickle format of their own, such as `MaskedArray`, are pickled whole.

    Returns:
        The tensors and the schema. The tensors are the object's own, or views of them, in the order in which they are
        met: dense, without gradients or lazy conjugation, on their device. No two overlap: a tensor that is named twice
        is there once, and so is memory that several tensors are views of. Read-only arrays, and arrays that torch
        cannot view, are copied. The schema can be pickled.

    Raises:
        InvalidTypeError: a tensor has no memory of its own, or is a part of something distributed.
        NotPicklableError: an object cannot be pickled, or its type is not found by its name.
            Each error names the path, as in `batch["pixel"][3].mask`.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> rows = torch.zeros(4, 2)
        >>> tensors, schema = td.tree.flatten({"all": rows, "first": rows[0]})
        >>> len(tensors)
        1
        >>> back = td.tree.unflatten(schema, [tensor.clone() for tensor in tensors])
        >>> back["first"].fill_(1.0)
        tensor([1., 1.])
        >>> back["all"][0]
        tensor([1., 1.])
    """
    tensors, schema, _ = flatten_with_addresses(obj)
    return tensors, schema


def flatten_with_addresses(obj: Any, name: str = "batch") -> tuple[list[Tensor], Schema, bytes]:
    """Flatten like `flatten`, and return the addresses of the tensors too.

    Args:
        obj: as for `flatten`.
        name: stands for `obj` in messages.

    Returns:
        The tensors, the schema, and the addresses as native 64-bit integers. There are no addresses unless all tensors
        are contiguous and in host memory.

    Raises:
        InvalidTypeError, NotPicklableError: as for `flatten`.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> tensors, schema, addresses = td.tree.flatten_with_addresses({"ids": torch.arange(3)})
        >>> len(addresses)
        8
    """
    try:
        return _flatten(obj)
    except Exception as error:  # noqa: BLE001 (code of users; it is raised as an error of the library)
        place, cause = _find_place(obj, error)
        if isinstance(cause, Refusal):
            raise cause.kind(f"{name}{place} {cause.reason}") from cause.__cause__
        reason = "it is nested too deep to be pickled" if isinstance(cause, RecursionError) else cause
        raise NotPicklableError(f"{name}{place} cannot be sent between processes: {reason}") from cause


def _flatten(obj: Any) -> tuple[list[Tensor], Schema, bytes]:
    pickler = _Pickler(examines_all=False)
    pickler.dump(obj)
    known = layout_as_is(pickler.leaves)
    if known is not None:
        layout, addresses = known
        if pickler.array_leaves:
            layout = layout_of(layout.dtypes, layout.shapes, None, tuple(pickler.array_leaves))
        return pickler.leaves, Schema(layout, pickler.skeleton), addresses
    if any(reduce_tensor(leaf) is not None for leaf in pickler.leaves):
        pickler = _Pickler(examines_all=True)
        pickler.dump(obj)
    tensors, layout, addresses = tensors_to_send(pickler.leaves, tuple(pickler.array_leaves))
    return tensors, Schema(layout, pickler.skeleton), addresses


def unflatten(schema: Schema, tensors: Sequence[Tensor]) -> Any:
    """Rebuild the object that `flatten` took apart.

    Args:
        schema: the schema that `flatten` returned, here or in another process of the same job: it holds a pickle.
        tensors: the tensors that it returned, or tensors of the same dtypes and shapes in the same order, on any
            device.

    Returns:
        The object. Its tensors are `tensors`, or views of them.

    Raises:
        InvalidInputError: number, dtypes or shapes of the tensors are not the schema's.
        InvalidTypeError: `schema` is no schema, or `tensors` has something that is no tensor.
        NotPicklableError: an object cannot be unpickled in this process; its type is not found, for example.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> tensors, schema = td.tree.flatten({"ids": torch.arange(3), "task": "caption"})
        >>> td.tree.unflatten(schema, tensors)
        {'ids': tensor([0, 1, 2]), 'task': 'caption'}
    """
    if not isinstance(schema, Schema):
        raise InvalidTypeError(f"unflatten takes the schema that flatten returned, not {format_type(schema)}")
    tensors = list(tensors)
    layout = schema.layout
    if len(tensors) != len(layout.shapes):
        raise InvalidInputError(
            f"the schema is of {format_count(len(layout.shapes), 'tensor')}, and tensors has {len(tensors)}: give "
            "those that flatten returned with it, in the same order"
        )
    for number, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise InvalidTypeError(f"tensors[{number}] is {format_type(tensor)}: give a tensor")
    if tuple(map(_get_dtype, tensors)) != layout.dtypes or tuple(map(_get_shape, tensors)) != layout.shapes:
        for number, tensor in enumerate(tensors):
            dtype, shape = layout.dtypes[number], layout.shapes[number]
            if tensor.dtype != dtype or tensor.shape != shape:
                raise InvalidInputError(
                    f"tensors[{number}] is {tensor.dtype} of shape {tuple(tensor.shape)}; "
                    f"the schema has {dtype} of shape {tuple(shape)} there: give the tensors in the order of flatten"
                )
    return unflatten_unchecked(schema, tensors)


def unflatten_unchecked(schema: Schema, tensors: Sequence[Tensor]) -> Any:
    """Rebuild the object like `unflatten`, without checking the tensors.

    Args:
        schema: as for `unflatten`.
        tensors: as for `unflatten`.

    Returns:
        The object.

    Raises:
        NotPicklableError: as for `unflatten`.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> tensors, schema = td.tree.flatten({"ids": torch.arange(3)})
        >>> td.tree.unflatten_unchecked(schema, tensors)
        {'ids': tensor([0, 1, 2])}
    """
    unpickler = _Unpickler(schema.skeleton, schema.layout.leaves(tensors))
    try:
        return unpickler.load()
    except TundishError:
        raise
    except Exception as error:
        raise NotPicklableError(
            f"an object of the batch cannot be unpickled in this process: {type(error).__name__}: {error}"
        ) from error


def _next_leaf() -> Tensor:
    """Stands in a skeleton for the next of the unpickler's leaves: they are read in the order that they were met in."""
    raise NotImplementedError


_NEXT_LEAF = _next_leaf, ()


class _Pickler(pickle.Pickler):
    """Pickles an object without its tensors.

    Args:
        examines_all: whether to examine each object of exactly the type `torch.Tensor`. Else all are leaves.

    Attributes:
        leaves: the tensors, in the order in which they are met.
        array_leaves: the numbers of those that arrays are made of.
    """

    def __init__(self, *, examines_all: bool) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, 5)
        self.leaves: list[Tensor] = []
        self.array_leaves: list[int] = []
        # Not `persistent_id`, which pickle calls for numbers and texts too.
        # An attribute: a closure takes half the time of a method.
        vars(self)["reducer_override"] = _reducer(self.leaves, self.array_leaves, examines_all=examines_all)

    @property
    def skeleton(self) -> bytes:
        """The pickle."""
        return self._file.getvalue()


def _reducer(leaves: list[Tensor], array_leaves: list[int], *, examines_all: bool) -> Callable[[Any], Any]:
    """The function that pickle calls with each object that is not of Python's simplest types."""
    add_leaf = leaves.append

    def reduce(value: Any) -> Any:
        if type(value) is Tensor:
            reduced = reduce_tensor(value) if examines_all else None
            if reduced is None:
                add_leaf(value)
                return _NEXT_LEAF
            return reduced
        if isinstance(value, Tensor):
            return reduce_tensor(value)
        if isinstance(value, np.ndarray):
            reduced = reduce_array(value)
            if reduced is not None:
                if reduced[0] is build_array:
                    # Its tensor is pickled next.
                    array_leaves.append(len(leaves))
                return reduced
        return NotImplemented

    return reduce


class _Unpickler(pickle.Unpickler):
    def __init__(self, skeleton: bytes, leaves: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(skeleton))
        self._next_leaf: Callable[[], Tensor] = iter(leaves).__next__

    def find_class(self, module: str, name: str) -> Any:
        if name == _next_leaf.__name__ and module == __name__:
            return self._next_leaf
        return super().find_class(module, name)


def _find_place(obj: Any, error: Exception) -> tuple[str, Exception]:
    """Where the innermost part lies that cannot be flattened, and its error; `error` is that of `obj`."""
    if isinstance(error, RecursionError):
        return "", error
    place = ""
    # By identity, and alive, because another object may get the `id` of a freed one.
    seen: dict[int, Any] = {}
    while id(obj) not in seen:
        seen[id(obj)] = obj
        for label, part in _parts_of(obj):
            failure = None if id(part) in seen else _failure_of(part)
            if failure is not None:
                place, obj, error = place + label, part, failure
                break
    return place, error


def _failure_of(obj: Any) -> Exception | None:
    try:
        _flatten(obj)
    except Exception as error:  # noqa: BLE001 (code of users; the caller raises it)
        return error
    return None


def _parts_of(obj: Any) -> Iterator[tuple[str, Any]]:
    """The parts of an object that are pickled for it, as far as they have names, with what follows its name."""
    if isinstance(obj, (Tensor, np.ndarray, type)):
        return
    fields = getattr(type(obj), "_fields", None)
    if isinstance(obj, tuple) and fields is not None:
        yield from ((f".{name}", part) for name, part in zip(fields, obj, strict=False))
        return
    function: Any = None
    arguments: Any = ()
    state: Any = None
    items: Any = None
    pairs: Any = None
    if type(obj) is dict:
        pairs = obj.items()
    elif type(obj) in (list, tuple, set, frozenset):
        items = obj
    else:
        try:
            function, arguments, state, items, pairs = (*obj.__reduce_ex__(5), None, None, None)[:5]
        except Exception:  # noqa: BLE001 (code of users; the object has no parts then)
            return
    yield from ((f"[{number}]", part) for number, part in enumerate(items or ()))
    for key, part in pairs or ():
        yield f"[{format_key(key)}]", part
        yield f" (key {format_key(key)})", key
    if dataclasses.is_dataclass(obj) and isinstance(state, list):
        # With slots, the state has no names.
        names = (field.name for field in dataclasses.fields(obj))
        state = dict(zip(names, state, strict=False))
    for attributes in state if type(state) is tuple else (state,):
        if isinstance(attributes, Mapping):
            yield from ((f".{name}", part) for name, part in attributes.items())
    if function is not None:
        yield from (("", part) for part in arguments)
