"""The rules for containers: what objects of each type consist of.

A type's rule is chosen once, in this order: registered here; a subclass of a built-in container, which keeps its
attributes (torch's pytree forgets them for some); registered with torch's pytree; a dataclass, or another type that
only holds objects. Objects of all other types are opaque: they are pickled, and only the tensors in them travel apart.
The builders in `unflattening` are the other half, found by the first item of each token.
"""

from __future__ import annotations

import copyreg
import dataclasses
import types
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree

from tundish.errors import InvalidTypeError
from tundish.tree.node_spec import GIVES_ITSELF, HOST, ITSELF, HostOnly, NodeSpec
from tundish.tree.tensors_and_arrays import (
    array_spec,
    array_subclass_spec,
    pickles_as_array,
    tensor_subclass_spec,
)

__all__ = ["KEY_TYPES", "PLAIN_TUPLES", "REGISTERED", "Rule", "dict_spec", "key_text", "register", "rule_of"]

# None: the object is opaque.
Rule = Callable[[Any], NodeSpec | None]

# By type, what users registered: to children and context, and back.
REGISTERED: dict[type, tuple[Callable[[Any], Any], Callable[[list[Any], Any], Any]]] = {}

_BUILTINS: frozenset[type] = frozenset(
    {type(None), bool, int, float, complex, str, bytes, dict, list, tuple, np.ndarray}
)
_REDUCES_AS_ITS_BASE = frozenset(
    one.__reduce__ for one in (object, OrderedDict, defaultdict, Counter, types.SimpleNamespace)
)
_CONTAINERS = (dict, list, tuple, deque, UserDict, UserList, types.SimpleNamespace)

# Keys that stand in a token: those of which equal ones are the same (1 and True are not).
KEY_TYPES: frozenset[type] = frozenset({str, int})

_NEW_OBJECT = copyreg.__newobj__  # type: ignore[attr-defined]

# Subclasses of `tuple` whose rule finds nothing but their items, whatever object it is asked about: those of
# `_tuple_subclass` without attributes.
PLAIN_TUPLES: set[type] = set()

_rules: dict[type, Rule] = {}
# Programs that make types without end do not fill memory with rules for them.
_MOST_RULES = 4096


def register(
    kind: type,
    flatten: Callable[[Any], tuple[Iterable[Any], Any]],
    unflatten: Callable[[list[Any], Any], Any],
) -> None:
    """Register how objects of exactly the type `kind` are flattened and rebuilt.

    Every process that objects of the type travel to has to register it too.

    Args:
        kind: a class. This replaces an earlier registration, here or with torch's pytree.
        flatten: called with an object; returns its children, which may be containers again, and a context: whatever
            else rebuilding takes, with tensors or without.
        unflatten: called with the list of children and the context; returns the object.

    Raises:
        InvalidTypeError: `kind` is no class, or is a tensor or a built-in type; or a function is not callable.

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
            "register takes two functions: one that takes an object apart, one that makes it again"
        )
    REGISTERED[kind] = flatten, unflatten
    _forget()


def rule_of(kind: type) -> Rule:
    """The rule for objects of the type `kind`."""
    rule = _rules.get(kind)
    # Somebody may have registered it with torch since.
    if rule is None or (rule is _opaque and _is_pytree_node(kind)):
        if len(_rules) >= _MOST_RULES:
            _forget()
        _rules[kind] = rule = _choose(kind)
        if rule is _tuple_subclass and _has_no_state(kind):
            PLAIN_TUPLES.add(kind)
    return rule


def _forget() -> None:
    _rules.clear()
    PLAIN_TUPLES.clear()


def _choose(kind: type) -> Rule:
    if kind in REGISTERED:
        return _registered
    if issubclass(kind, torch.Tensor):
        return tensor_subclass_spec
    if kind is np.ndarray:
        return array_spec
    if issubclass(kind, np.ndarray) and pickles_as_array(kind):
        return array_subclass_spec
    if kind is PackedSequence:
        return _packed_sequence
    if kind is HostOnly:
        return _host
    plain = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ in _REDUCES_AS_ITS_BASE
    if issubclass(kind, dict):
        return _dict_subclass if plain and not _has_arguments(kind) else _reduced
    if issubclass(kind, tuple):
        return _tuple_subclass if plain else _reduced
    if _is_pytree_node(kind) and not issubclass(kind, (list, deque)):
        return _pytree_node
    if plain and not _has_arguments(kind):
        if issubclass(kind, list):
            return _list_subclass
        if issubclass(kind, (UserDict, UserList, types.SimpleNamespace)) or dataclasses.is_dataclass(kind):
            return _attributes_only
    if issubclass(kind, _CONTAINERS) or dataclasses.is_dataclass(kind):
        return _reduced
    return _opaque


def _is_pytree_node(kind: type) -> bool:
    # A constant of torch's pytree has no parts, and itself as the context.
    return kind in _pytree.SUPPORTED_NODES and kind not in getattr(_pytree, "CONSTANT_NODES", ())


def _has_arguments(kind: type) -> bool:
    """Whether instances say what they have to be made with, which only `__reduce_ex__` asks them."""
    return hasattr(kind, "__getnewargs__") or hasattr(kind, "__getnewargs_ex__")


def _has_no_state(kind: Any) -> bool:
    return not kind.__dictoffset__ and kind.__getstate__ is object.__getstate__


def _opaque(_: Any) -> None:
    return None


def _host(part: HostOnly) -> NodeSpec:
    return NodeSpec((HOST,), (part.tensor,), ("",))


def _registered(value: Any) -> NodeSpec:
    kind = type(value)
    children, context = REGISTERED[kind][0](value)
    return _with_context("registered", kind, list(children), context)


def _pytree_node(value: Any) -> NodeSpec:
    kind = type(value)
    children, context = _pytree.SUPPORTED_NODES[kind].flatten_fn(value)
    return _with_context("pytree", kind, list(children), context)


def _with_context(builder: str, kind: type, children: list[Any], context: Any) -> NodeSpec:
    labels = [f" (part {number} of the {kind.__name__})" for number in range(len(children))]
    return NodeSpec((builder, kind), (*children, context), (*labels, f" (context of the {kind.__name__})"))


def _packed_sequence(value: PackedSequence) -> NodeSpec:
    data, batch_sizes, *indices = value
    # torch wants the sizes in host memory wherever the data is.
    return NodeSpec(
        ("tuple", type(value), False), (data, HostOnly(batch_sizes), *indices), _dotted(value._fields)
    )


def _tuple_subclass(value: Any) -> NodeSpec:
    kind = type(value)
    names = getattr(kind, "_fields", ())
    # The class may show its items otherwise than it holds them.
    items = tuple(tuple.__iter__(value))
    labels = _dotted(names) if len(names) == len(items) else [f"[{index}]" for index in range(len(items))]
    state = value.__getstate__()
    if state is None:
        return NodeSpec(("tuple", kind, False), items, labels)
    return NodeSpec(("tuple", kind, True), (*items, state), (*labels, ".__dict__"))


def _list_subclass(value: Any) -> NodeSpec:
    state = value.__getstate__()
    children = list.__iter__(value)
    if state is None:
        return NodeSpec(("list", type(value), False), list(children))
    labels = [f"[{index}]" for index in range(list.__len__(value))]
    return NodeSpec(("list", type(value), True), (*children, state), (*labels, ".__dict__"))


def _dict_subclass(value: Any) -> NodeSpec:
    kind = type(value)
    # The class may show its items otherwise than it holds them.
    items = list((OrderedDict if issubclass(kind, OrderedDict) else dict).items(value))
    more: list[Any] = []
    labels: list[str] = []
    factory = issubclass(kind, defaultdict)
    if factory:
        more.append(value.default_factory)
        labels.append(".default_factory")
    state = value.__getstate__()
    # As pickle has it: None alone is no state. An empty one is, and the type may make its own of that.
    how: bool | str = state is not None
    if state is value:
        # What is made so that its attributes are its items, unless it says so of its state alone.
        how = ITSELF if kind.__dictoffset__ and vars(value) is value else GIVES_ITSELF
    elif how:
        more.append(state)
        labels.append(".__dict__")
    return _pairs(kind, items, (factory, how), more, labels)


def dict_spec(value: dict[Any, Any]) -> NodeSpec:
    """A dict whose keys are not all texts and integers: they may be anything, tensors too."""
    return _pairs(dict, list(value.items()), (False, False), [], [])


def _pairs(
    kind: type, items: list[tuple[Any, Any]], flags: tuple[bool, Any], more: list[Any], labels: list[str]
) -> NodeSpec:
    keys = tuple([key for key, _ in items])
    values = [item for _, item in items]
    named = [f"[{key_text(key)}]" for key in keys]
    if KEY_TYPES.issuperset(map(type, keys)):
        return NodeSpec(("dict", kind, keys, *flags), values + more, named + labels)
    numbered = [f" (key {index})" for index in range(len(keys))]
    return NodeSpec(("pairs", kind, len(keys), *flags), [*keys, *values, *more], numbered + named + labels)


def _attributes_only(value: Any) -> NodeSpec | None:
    kind = type(value)
    # What transformers' batches pickle of themselves is not all of them.
    state = object.__getstate__(value) if _forgets(kind) else value.__getstate__()
    if type(state) is list and getattr(kind.__getstate__, "__module__", "") == "dataclasses":
        # Frozen and with slots: the values of the fields.
        return NodeSpec(("fields", kind), state, _dotted(field.name for field in dataclasses.fields(value)))
    if state is None or _forgets(kind) or not hasattr(kind, "__setstate__"):
        attributes, slots = state if type(state) is tuple else (state, None)
        if type(attributes or {}) is dict and type(slots or {}) is dict:
            attributes, slots = attributes or {}, slots or {}
            names = (*attributes, *slots)
            if all(type(name) is str for name in names):
                return NodeSpec(
                    ("attributes", kind, tuple(attributes), tuple(slots)),
                    (*attributes.values(), *slots.values()),
                    _dotted(names),
                )
    return NodeSpec(("state", kind), (state,), ("",))


def _forgets(kind: type) -> bool:
    return issubclass(kind, UserDict) and any(
        one.__module__.partition(".")[0] == "transformers"
        for one in kind.__mro__
        if "__getstate__" in vars(one)
    )


def _reduced(value: Any) -> NodeSpec | None:
    """As pickle takes it apart."""
    reduced = value.__reduce_ex__(4)
    if not isinstance(reduced, tuple) or len(reduced) > 5:
        return None
    function, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    if function is _NEW_OBJECT and arguments and arguments[0] is not type(value):
        return None
    listed = [] if items is None else list(items)
    paired = [] if pairs is None else list(pairs)
    keys = [key for key, _ in paired]
    values = [item for _, item in paired]
    # As the dicts of addict do, of which one is no part of itself for that.
    how = GIVES_ITSELF if state is value else state is not None
    states = (state,) if how is True else ()
    return NodeSpec(
        ("reduced", len(arguments), how, len(listed), len(paired)),
        (function, *arguments, *states, *listed, *keys, *values),
        (
            *([""] * (1 + len(arguments) + len(states))),
            *(f"[{index}]" for index in range(len(listed))),
            *(f" (key {index})" for index in range(len(keys))),
            *(f"[{key_text(key)}]" for key in keys),
        ),
    )


def _dotted(names: Iterable[str]) -> list[str]:
    return [f".{name}" for name in names]


def key_text(key: Any) -> str:
    """A key of a dict as a message shows it."""
    if type(key) is str:
        return '"' + key.replace('"', '\\"') + '"'
    if not isinstance(key, (int, float, bytes, tuple)):
        return type(key).__name__
    try:
        text = repr(key)
    except Exception:  # noqa: BLE001 (code of users, of an object in a tuple: what cannot be shown can be carried)
        return type(key).__name__
    return text if len(text) <= 60 else text[:57] + "..."
