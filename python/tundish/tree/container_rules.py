"""The rules for containers and other objects, and the builders that undo them.

A rule returns the parts of an object. Each type has one, chosen in this order:

1. the functions given to `register`, here or with torch's pytree;
2. of tensors and arrays, the rules in `tensor_rules` and `array_rules`;
3. of namedtuples and other plain subclasses of `tuple`, their items;
4. of all other containers and of dataclasses, the parts that pickle would pickle;
5. none: objects of all other types are pickled whole.
"""

from __future__ import annotations

import copyreg
import dataclasses
import types
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree

from tundish.errors import InvalidTypeError, format_type
from tundish.tree.array_rules import ARRAY_BUILDERS, array_rule_of
from tundish.tree.object_parts import ObjectParts, Refusal, Token, format_key
from tundish.tree.tensor_rules import TENSOR_BUILDERS, tensor_subclass_parts

__all__ = ["PLAIN_TUPLES", "Rule", "build", "parts_of", "register", "rule_of"]

Rule = Callable[[Any], ObjectParts | None]

# The types of plain tuples met so far. The compiled traversal handles them without a rule.
PLAIN_TUPLES: set[type] = set()

_registered: dict[type, tuple[Callable[[Any], Any], Callable[[list[Any], Any], Any]]] = {}

_BUILTINS: frozenset[type] = frozenset(
    {type(None), bool, int, float, complex, str, bytes, dict, list, tuple, np.ndarray}
)
_CONTAINERS = (dict, list, tuple, deque, UserDict, UserList, types.SimpleNamespace)
# Their values are singletons or classes, and are part of the token.
_CONSTANTS: frozenset[type] = frozenset({torch.dtype, torch.layout, torch.memory_format, type})
# Equal keys of these types are interchangeable. With more types, 1 and True would count as one key.
_KEY_TYPES: frozenset[type] = frozenset({str, int})
_NAME_TYPES: frozenset[type] = frozenset({str})
_FUNCTIONS = (type, types.FunctionType, types.BuiltinFunctionType)

# Stands for the state of an object whose `__reduce_ex__` returns the object itself as its state.
_ITSELF = "itself"


def register(
    kind: type,
    flatten: Callable[[Any], tuple[Iterable[Any], Any]],
    unflatten: Callable[[list[Any], Any], Any],
) -> None:
    """Register how objects of exactly the type `kind` are flattened and rebuilt.

    Every process that objects of the type travel to has to register it too.

    Args:
        kind: a class. This replaces an earlier registration, here or with torch's pytree.
        flatten: called with an object; returns its children, which may be containers, and a context with all else
            that rebuilding needs.
        unflatten: called with the list of children and the context; returns the object.

    Raises:
        InvalidTypeError: `kind` is no class, or is a tensor or a built-in type; or a function is not callable. Later
            calls raise it if `flatten` returns something else, or `unflatten` raises a TypeError.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> class Span:
        ...     def __init__(self, tokens, name):
        ...         self.tokens, self.name = tokens, name
        >>> td.tree.register(Span, lambda span: ([span.tokens], span.name), lambda parts, name: Span(*parts, name))
    """
    if not isinstance(kind, type):
        raise InvalidTypeError(f"register takes a class, not {kind!r}")
    if kind in _BUILTINS or issubclass(kind, torch.Tensor):
        raise InvalidTypeError(f"{kind.__qualname__} cannot be registered: how it is flattened is fixed")
    if not callable(flatten) or not callable(unflatten):
        raise InvalidTypeError(
            "register takes two functions: one that flattens an object, one that rebuilds it"
        )
    _registered[kind] = flatten, unflatten
    rule_of.cache_clear()
    PLAIN_TUPLES.discard(kind)


@lru_cache(4096)
def rule_of(kind: type) -> Rule:
    """The rule for objects of the type `kind`. A rule returns None for an object to pickle."""
    if kind in _registered:
        return _registered_parts
    if issubclass(kind, torch.Tensor):
        return tensor_subclass_parts
    if issubclass(kind, np.ndarray):
        return array_rule_of(kind) or _no_parts
    if kind in _CONSTANTS:
        return _constant_parts
    if kind is _Attributes:
        return _attributes_parts
    if _is_plain_tuple(kind):
        return _tuple_parts
    if _is_pytree_node(kind) and not issubclass(kind, (dict, tuple, list, deque)):
        return _registered_parts
    if issubclass(kind, _CONTAINERS) or dataclasses.is_dataclass(kind):
        return _reduced_parts
    return _no_parts


def parts_of(value: Any) -> ObjectParts | None:
    """The parts of any object; None for an object to pickle."""
    kind: Any = type(value)
    if kind is dict and _KEY_TYPES.issuperset(map(type, value)):
        return ObjectParts(("dict", tuple(value)), list(value.values()))
    if kind is list or kind is tuple:
        return ObjectParts((kind.__name__,), value)
    return rule_of(kind)(value)


def build(token: Token, parts: list[Any]) -> Any:
    """Build the object of `token` from `parts`."""
    return _BUILDERS[token[0]](token, parts)


def _is_plain_tuple(kind: Any) -> bool:
    """Whether objects of the type `kind` are nothing but the items of a tuple, as those of most namedtuples are."""
    return (
        issubclass(kind, tuple)
        and kind not in _registered
        and not kind.__dictoffset__
        and kind.__getstate__ is object.__getstate__
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
    )


def _is_pytree_node(kind: type) -> bool:
    # A constant of torch's pytree has no parts, and itself as the context.
    return kind in _pytree.SUPPORTED_NODES and kind not in getattr(_pytree, "CONSTANT_NODES", ())


def _no_parts(_: Any) -> None:
    return None


def _constant_parts(value: Any) -> ObjectParts:
    return ObjectParts(("constant", value), ())


def _registered_parts(value: Any) -> ObjectParts:
    kind = type(value)
    if kind in _registered:
        name, flatten = "register", _registered[kind][0]
    else:
        name, flatten = "pytree", _pytree.SUPPORTED_NODES[kind].flatten_fn
    result = flatten(value)
    if not isinstance(result, tuple) or len(result) != 2:
        raise Refusal(
            InvalidTypeError,
            f"is a {kind.__qualname__}, whose registered flatten function returned {format_type(result)}: let it "
            "return the pair (children, context)",
        )
    children, context = result
    try:
        parts = [*iter(children), context]
    except TypeError as error:
        raise Refusal(
            InvalidTypeError,
            f"is a {kind.__qualname__}, whose registered flatten function returned {format_type(children)} as its "
            "children: let it return them in a list",
        ) from error
    labels = [f" (part {number} of the {kind.__name__})" for number in range(len(parts) - 1)]
    return ObjectParts((name, kind), parts, [*labels, f" (context of the {kind.__name__})"])


def _build_registered(token: Token, parts: list[Any]) -> Any:
    name, kind = token
    *children, context = parts
    unflatten: Callable[[list[Any], Any], Any] | None = None
    if name == "register" and kind in _registered:
        unflatten = _registered[kind][1]
    elif name == "pytree" and kind in _pytree.SUPPORTED_NODES:
        unflatten = _pytree.SUPPORTED_NODES[kind].unflatten_fn
    if unflatten is not None:
        try:
            return unflatten(children, context)
        except TypeError as error:
            raise InvalidTypeError(
                f"the unflatten function that is registered for {kind.__module__}.{kind.__qualname__} failed on "
                f"{len(children)} children and a context: {error}; it is called as unflatten(children, context)"
            ) from error
    call = "td.tree.register" if name == "register" else "torch.utils._pytree.register_pytree_node"
    raise InvalidTypeError(
        f"{kind.__module__}.{kind.__qualname__} is registered where the batch was flattened, and not here: call "
        f"{call} for it in every process"
    )


def _tuple_parts(value: Any) -> ObjectParts:
    fields = getattr(type(value), "_fields", None)
    labels = None if fields is None else [f".{name}" for name in fields]
    # The class may override `__iter__`.
    return ObjectParts(("tuple subclass", type(value)), tuple(tuple.__iter__(value)), labels)


class _Attributes(dict[str, Any]):
    """A dict of an object's attributes. Messages show them as `.name`, and the keys of other dicts as `["name"]`."""


def _attributes_parts(value: dict[str, Any]) -> ObjectParts:
    names = tuple(value)
    return ObjectParts(("dict", names), list(value.values()), lambda number: f".{names[number]}")


def _reduced_parts(value: Any) -> ObjectParts | None:
    """Take `value` apart as pickle does: a function and its arguments, a state, and items to add."""
    if isinstance(value, UserDict):
        # transformers' batches pickle some of their attributes only.
        reduced: Any = copyreg.__newobj__, (type(value),), vars(value)  # type: ignore[attr-defined]
    else:
        reduced = value.__reduce_ex__(4)
    if not isinstance(reduced, tuple) or len(reduced) > 5 or not isinstance(reduced[0], _FUNCTIONS):
        return None
    function, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    # The class that `copyreg.__newobj__` makes an object of.
    fixed = arguments[:1] if arguments and isinstance(arguments[0], type) else ()
    arguments = arguments[len(fixed) :]
    states = [] if state is None or state is value else [_mark_attributes(state)]
    item_list = [] if items is None else list(items)
    pair_list = [] if pairs is None else list(pairs)
    keys = tuple([key for key, _ in pair_list])
    # Other keys may be anything, tensors too.
    fixed_keys = keys if _KEY_TYPES.issuperset(map(type, keys)) else None
    counts = len(arguments), _ITSELF if state is value else len(states), len(item_list), len(keys)
    return ObjectParts(
        ("reduced", function, fixed, counts, fixed_keys),
        [
            *arguments,
            *states,
            *item_list,
            *[item for _, item in pair_list],
            *(keys if fixed_keys is None else ()),
        ],
        lambda number: _reduced_label(len(arguments) + len(states), len(item_list), keys, number),
    )


def _reduced_label(unnamed: int, item_count: int, keys: tuple[Any, ...], number: int) -> str:
    if number < unnamed:
        return ""
    number -= unnamed
    if number < item_count:
        return f"[{number}]"
    number -= item_count
    return f"[{format_key(keys[number])}]" if number < len(keys) else f" (key {number - len(keys)})"


def _mark_attributes(state: Any) -> Any:
    """`state` with its dicts of attributes marked as such; with slots it is a pair of dicts."""
    if type(state) is tuple:
        return tuple(map(_mark_attributes, state))
    return _Attributes(state) if type(state) is dict and _NAME_TYPES.issuperset(map(type, state)) else state


def _build_reduced(token: Token, parts: list[Any]) -> Any:
    _, function, fixed, (argument_count, states, item_count, pair_count), keys = token
    take = iter(parts)
    made = function(*fixed, *islice(take, argument_count))
    state = next(take) if states == 1 else None
    # The order is pickle's: items first.
    items = list(islice(take, item_count))
    if items and hasattr(made, "extend"):
        made.extend(items)
    else:
        for item in items:
            made.append(item)
    values = list(islice(take, pair_count))
    for key, value in zip(take if keys is None else keys, values, strict=True):
        made[key] = value
    if states == _ITSELF and not hasattr(made, "__setstate__"):
        # A dict whose items are its attributes.
        made.__dict__ = made
    elif states:
        _set_state(made, made if states == _ITSELF else state)
    return made


def _set_state(made: Any, state: Any) -> None:
    if hasattr(made, "__setstate__") and not isinstance(made, UserDict):
        made.__setstate__(state)
        return
    attributes, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    if attributes:
        vars(made).update(attributes)
    for name, value in (slots or {}).items():
        object.__setattr__(made, name, value)


_BUILDERS: dict[str, Callable[[Token, list[Any]], Any]] = {
    "dict": lambda token, parts: dict(zip(token[1], parts, strict=True)),
    "list": lambda _, parts: parts,
    "tuple": lambda _, parts: tuple(parts),
    "tuple subclass": lambda token, parts: tuple.__new__(token[1], parts),
    "constant": lambda token, _: token[1],
    "register": _build_registered,
    "pytree": _build_registered,
    "reduced": _build_reduced,
    **ARRAY_BUILDERS,
    **TENSOR_BUILDERS,
}
