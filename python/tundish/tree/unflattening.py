"""Rebuilds an object from its tensors and schema.

The builders of containers are here; those of tensors are in `tensors_and_arrays`.

Invariants:

1. Everything that can be changed is made anew. Only the tensors are the ones that were given, or views of them.
2. A builder calls no code of a type that pickle would not call.
"""

from __future__ import annotations

import operator
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils import _pytree

from tundish.errors import InvalidInputError, InvalidTypeError, counted
from tundish.tree.containers import REGISTERED
from tundish.tree.node_spec import (
    AGAIN,
    CONSTANT,
    GIVES_ITSELF,
    HOST,
    ITSELF,
    KEYS,
    LIST,
    TUPLE,
    WHOLE,
    Token,
)
from tundish.tree.pickled_values import loads_values
from tundish.tree.schema import Schema, values_of
from tundish.tree.tensors_and_arrays import TENSOR_BUILDERS, array_of

__all__ = ["build", "unflatten", "unflatten_unchecked"]

_get_dtype = operator.attrgetter("dtype")
_get_shape = operator.attrgetter("shape")


def unflatten(schema: Schema, tensors: Sequence[Tensor]) -> Any:
    """Rebuild the object that `flatten` took apart.

    Args:
        schema: what `flatten` returned, here or in another process of the same job.
        tensors: the tensors that it returned, or tensors of the same dtypes and shapes in the same order, on any
        device.

    Returns:
        The object. Its tensors are `tensors`, or views of them.

    Raises:
        InvalidInputError: number, dtypes or shapes of the tensors are not the schema's.
        InvalidTypeError: a type is registered where the object was flattened, and not here.
    """
    if not isinstance(schema, Schema):
        raise InvalidTypeError(
            f"unflatten takes the schema that flatten returned, not {type(schema).__qualname__}"
        )
    tensors = list(tensors)
    layout = schema.layout
    if len(tensors) != len(layout.shapes):
        raise InvalidInputError(
            f"the schema is one of {counted(len(layout.shapes), 'tensor')}, and {len(tensors)} were given"
        )
    for number, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise InvalidTypeError(f"tensors[{number}] is a {type(tensor).__qualname__}, not a tensor")
    if tuple(map(_get_dtype, tensors)) != layout.dtypes or tuple(map(_get_shape, tensors)) != layout.shapes:
        for number, tensor in enumerate(tensors):
            dtype, shape = layout.dtypes[number], layout.shapes[number]
            if tensor.dtype != dtype or tensor.shape != shape:
                raise InvalidInputError(
                    f"tensors[{number}] is {tensor.dtype} of shape {tuple(tensor.shape)}; "
                    f"the schema has {dtype} of shape {tuple(shape)} there"
                )
    return unflatten_unchecked(schema, tensors)


def build(token: Token, parts: list[Any]) -> Any:
    """Build the object of `token` from `parts`."""
    return _BUILDERS[token[0]](token, parts)


def unflatten_unchecked(schema: Schema, tensors: Sequence[Tensor]) -> Any:
    """As `unflatten`, without checking the tensors."""
    leaves = schema.layout.leaves(tensors)
    # Arrays, and tensors that are more than a leaf, that are named inside of pickled values and outside, by what they
    # are made of; with that, or its identity would be another object's.
    known: dict[Any, tuple[Any, list[Any]]] = {}

    def build_once(token: Token, parts: list[Any]) -> Any:
        made = build(token, parts)
        known[_key(token, parts)] = made, parts
        return made

    values = loads_values(schema.values, leaves, build_once) if schema.pickled else values_of(schema.values)
    quick = schema.structure.fast_program
    if quick is not None:
        return quick.build(list(leaves), values)
    next_value = iter(values).__next__
    stack: list[Any] = []
    put = stack.append
    built: list[Any] = []
    for token in schema.structure.program:
        kind = type(token)
        if kind is int:
            put(leaves[token])
        elif token is None:
            put(None)
        elif kind is range:
            stack += leaves[token.start : token.stop]
        elif kind is str:
            put(next_value())
        else:
            count, inner = token
            name = inner[0]
            if name == AGAIN:
                put(built[inner[1]])
                continue
            if name == CONSTANT:
                put(inner[1])
                continue
            first = len(stack) - count
            parts = stack[first:]
            before = known.get(_key(inner, parts)) if known and name in _OF_TENSORS else None
            made = _BUILDERS[name](inner, parts) if before is None else before[0]
            del stack[first:]
            put(made)
            built.append(made)
    return stack[0]


def _key(token: Token, parts: list[Any]) -> Any:
    """Equal for the two builds of one tensor or array: each has parts of its own, the same objects in both."""
    return token[0], *(id(part) for part in parts if isinstance(part, Tensor))


@lru_cache(1024)
def _base_new(kind: type) -> Callable[..., Any]:
    """What makes an empty object of the type `kind` without calling code of the type's own."""
    for one in kind.__mro__:
        new = vars(one).get("__new__")
        if isinstance(new, types.BuiltinFunctionType):
            return new
    return object.__new__


def _make_dict(token: Token, parts: list[Any]) -> Any:
    _, kind, keys, factory, state = token
    return _filled(kind, zip(keys, parts, strict=False), parts[len(keys) :], factory, state)


def _make_pairs(token: Token, parts: list[Any]) -> Any:
    _, kind, count, factory, state = token
    return _filled(kind, zip(parts[:count], parts[count:], strict=False), parts[2 * count :], factory, state)


def _filled(kind: type, pairs: Iterable[tuple[Any, Any]], more: list[Any], factory: bool, state: Any) -> Any:
    made = _base_new(kind)(kind)
    # The type's own way of setting items may do more than that.
    put = OrderedDict.__setitem__ if issubclass(kind, OrderedDict) else dict.__setitem__
    for key, value in pairs:
        put(made, key, value)
    if factory:
        made.default_factory = more[0]
    if state == ITSELF:
        made.__dict__ = made
    elif state == GIVES_ITSELF:
        _set_state(made, made)
    elif state:
        _set_state(made, more[-1])
    return made


def _make_list(token: Token, parts: list[Any]) -> Any:
    _, kind, state = token
    made = _base_new(kind)(kind)
    list.extend(made, parts[: len(parts) - state])
    if state:
        _set_state(made, parts[-1])
    return made


def _make_tuple(token: Token, parts: list[Any]) -> Any:
    _, kind, state = token
    made = tuple.__new__(kind, parts[: len(parts) - state])
    if state:
        _set_state(made, parts[-1])
    return made


def _make_attributes(token: Token, parts: list[Any]) -> Any:
    _, kind, attributes, slots = token
    made = _base_new(kind)(kind)
    if attributes:
        vars(made).update(zip(attributes, parts, strict=False))
    for name, value in zip(slots, parts[len(attributes) :], strict=True):
        object.__setattr__(made, name, value)
    return made


def _make_state(token: Token, parts: list[Any]) -> Any:
    kind = token[1]
    made = _base_new(kind)(kind)
    _set_state(made, parts[0])
    return made


def _make_fields(token: Token, parts: list[Any]) -> Any:
    kind = token[1]
    made = _base_new(kind)(kind)
    made.__setstate__(parts)
    return made


def _set_state(made: Any, state: Any) -> None:
    """As pickle does."""
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
        return
    attributes, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    if attributes:
        vars(made).update(attributes)
    for name, value in (slots or {}).items():
        object.__setattr__(made, name, value)


def _make_reduced(token: Token, parts: list[Any]) -> Any:
    _, arguments, state, listed, paired = token
    function, *rest = parts
    made = function(*rest[:arguments])
    rest = rest[arguments:]
    # The order is pickle's: items first.
    items = rest[1:] if state is True else rest
    if listed:
        extend = getattr(made, "extend", None)
        if extend is None:
            for item in items[:listed]:
                made.append(item)
        else:
            extend(items[:listed])
    for key, value in zip(items[listed : listed + paired], items[listed + paired :], strict=True):
        made[key] = value
    if state:
        _set_state(made, made if state == GIVES_ITSELF else rest[0])
    return made


def _make_registered(token: Token, parts: list[Any]) -> Any:
    kind = token[1]
    if kind not in REGISTERED:
        raise InvalidTypeError(
            f"{kind.__module__}.{kind.__qualname__} is registered where the batch was flattened, and not here: "
            "call td.tree.register for it in every process"
        )
    *children, context = parts
    return REGISTERED[kind][1](children, context)


def _make_pytree(token: Token, parts: list[Any]) -> Any:
    kind = token[1]
    node = _pytree.SUPPORTED_NODES.get(kind)
    if node is None:
        raise InvalidTypeError(
            f"{kind.__module__}.{kind.__qualname__} is registered with torch's pytree where the batch was flattened, "
            "and not here"
        )
    *children, context = parts
    return node.unflatten_fn(children, context)


def _make_array(token: Token, parts: list[Any]) -> Any:
    _, name, writable = token
    return array_of(parts[0], None if name is None else np.dtype(name), writable)


_BUILDERS: dict[str, Callable[[Token, list[Any]], Any]] = {
    KEYS: lambda token, parts: dict(zip(token[1], parts, strict=True)),
    LIST: lambda _, parts: parts,
    TUPLE: lambda _, parts: tuple(parts),
    WHOLE: lambda _, parts: parts[0],
    HOST: lambda _, parts: parts[0].cpu(),
    "dict": _make_dict,
    "pairs": _make_pairs,
    "list": _make_list,
    "tuple": _make_tuple,
    "attributes": _make_attributes,
    "state": _make_state,
    "reduced": _make_reduced,
    "registered": _make_registered,
    "pytree": _make_pytree,
    "array": _make_array,
    "array of": lambda token, parts: array_of(parts[1], parts[0], token[1]),
    "array as": lambda token, parts: parts[0].view(token[1]),
    "fields": _make_fields,
    **TENSOR_BUILDERS,
}

# Their parts are tensors, and no two of them have the same.
_OF_TENSORS = frozenset({"array", "array of", *TENSOR_BUILDERS})
