"""Replaces or collects the tensors of an object, or its parts of another type.

Invariants:

1. Nothing that was given is changed, and containers keep their types.
2. Containers are dicts, lists, tuples, deques, `UserDict`, `UserList`, `SimpleNamespace`, dataclasses and their
   subclasses. Every other object stays the very object that it is, and is not searched.
3. If nothing in a container is replaced, the container itself is returned. One that occurs twice stays one object.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections import UserDict, UserList, deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tundish.errors import InvalidInputError, InvalidTypeError
from tundish.tree.tensors import Refusal

Kinds = type | tuple[type, ...]

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, Tensor})
_DICTS = (dict, UserDict)
_LISTS = (list, deque, UserList)
_IN_PROGRESS = object()


def map(  # noqa: A001 (as `map` of JAX's trees and torch's)
    function: Callable[[Any], Any],
    obj: Any,
    *,
    kinds: Kinds = Tensor,
    enter: Callable[[Any], Any] | None = None,
    name: str = "obj",
) -> Any:
    """Replace each tensor in nested containers by `function(tensor)`.

    Args:
        function: called each time that a tensor is named, in the order in which they are met. It may raise `Refusal`,
            which becomes its error with the path.
        obj: nested containers: dicts, lists, tuples, namedtuples, deques, dataclasses and their subclasses, such as
            the outputs and batches of transformers. Other objects, arrays too, are left as they are.
        kinds: a class, or a tuple of classes, whose instances are replaced in place of tensors.
        enter: called with each container; its result is traversed in its place.
        name: stands for `obj` in messages.

    Returns:
        The object with the replaced parts; `obj` itself where there are none.

    Raises:
        InvalidInputError: a container contains itself, or is too deep.
        InvalidTypeError: `kinds` is neither a class nor a tuple of classes.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> td.tree.map(lambda tensor: tuple(tensor.shape), {"a": [torch.zeros(2, 3), 1]})
        {'a': [(2, 3), 1]}
    """
    classes = kinds if isinstance(kinds, tuple) else (kinds,)
    if not all(isinstance(kind, type) for kind in classes):
        raise InvalidTypeError(f"kinds is {kinds!r}: give a class, or a tuple of classes")
    run = _Run(classes, function, enter)
    try:
        return run.map(obj)
    except Refusal as refusal:
        path = name + "".join(reversed(run.path))
        raise refusal.kind(f"{path} {refusal.reason}") from refusal.__cause__


def find_all(kinds: Kinds, obj: Any) -> list[Any]:
    """Return all parts of `obj` that are of one of the `kinds`.

    Args:
        kinds: a class, or a tuple of classes.
        obj: as for `map`.

    Returns:
        The parts in the order in which they are met, each as often as it is named.

    Raises:
        InvalidInputError, InvalidTypeError: as for `map`.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> td.tree.find_all(torch.Tensor, {"a": [torch.tensor(3), 1], "b": torch.tensor(4)})
        [tensor(3), tensor(4)]
    """
    found: list[Any] = []

    def collect(part: Any) -> Any:
        found.append(part)
        return part

    map(collect, obj, kinds=kinds)
    return found


def format_key(key: Any) -> str:
    """Format a key of a dict for a message."""
    if type(key) is str:
        return '"' + key.replace('"', '\\"') + '"'
    if not isinstance(key, (int, float, bytes, tuple)):
        return type(key).__name__
    try:
        text = repr(key)
    except Exception:  # noqa: BLE001 (code of users; a key without a repr can still travel)
        return type(key).__name__
    return text if len(text) <= 60 else text[:57] + "..."


def _index_label(key: Any) -> str:
    return f"[{format_key(key)}]"


class _Run:
    """One traversal.

    Attributes:
        path: after a refusal, the labels that lead to the refused part, innermost first.
    """

    def __init__(
        self,
        kinds: tuple[type, ...],
        function: Callable[[Any], Any],
        enter: Callable[[Any], Any] | None,
    ) -> None:
        self.path: list[str] = []
        self._kinds = kinds
        self._plain = frozenset(kind for kind in _PLAIN if not issubclass(kind, kinds))
        self._function = function
        self._enter = enter
        # The result for each container, by `id`; and the containers, so that no other object gets their `id`.
        self._done: dict[int, Any] = {}
        self._alive: list[Any] = []

    def map(self, value: Any) -> Any:
        if type(value) in self._plain:
            return value
        if isinstance(value, self._kinds):
            return self._function(value)
        if not is_container(value):
            return value
        identity = id(value)
        done = self._done.get(identity, self)
        if done is _IN_PROGRESS:
            raise Refusal(InvalidInputError, "contains itself: put something else in place of the inner one")
        if done is not self:
            return done
        self._done[identity] = _IN_PROGRESS
        self._alive.append(value)
        try:
            entered = value if self._enter is None else self._enter(value)
            self._alive.append(entered)
            made = self._map_tuple(entered) if isinstance(entered, tuple) else self._map_parts(entered)
        except RecursionError as error:
            raise Refusal(InvalidInputError, "is nested too deep") from error
        self._done[identity] = made
        return made

    def _map_tuple(self, value: tuple[Any, ...]) -> Any:
        names = getattr(type(value), "_fields", None)
        items = tuple.__iter__(value)
        label = _index_label if names is None else lambda number: f".{names[number]}"
        made = [self._map_part(part, label, number) for number, part in enumerate(items)]
        if all(one is part for one, part in zip(made, tuple.__iter__(value), strict=True)):
            return value
        if type(value) is tuple:
            return tuple(made)
        result = tuple.__new__(type(value), made)
        if hasattr(value, "__dict__"):
            vars(result).update(vars(value))
        return result

    def _map_parts(self, value: Any) -> Any:
        if isinstance(value, _DICTS):
            # A subclass may look its items up in another way.
            parts = dict.items(value) if isinstance(value, dict) else value.data.items()
            changed = self._changed_parts(parts, _index_label)
        elif isinstance(value, _LISTS):
            changed = self._changed_parts(enumerate(value), _index_label)
        else:
            changed = {}
        changed_attributes = self._changed_parts(_attributes_of(value), lambda name: f".{name}")
        if not changed and not changed_attributes:
            return value
        made = copy.copy(value)
        for key, part in changed.items():
            made[key] = part
        for name, part in changed_attributes.items():
            object.__setattr__(made, name, part)
        return made

    def _changed_parts(self, parts: Any, label: Callable[[Any], str]) -> dict[Any, Any]:
        """The results for parts that change, by key."""
        changed = {}
        for key, part in parts:
            if type(part) in self._plain:
                continue
            made = self._map_part(part, label, key)
            if made is not part:
                changed[key] = made
        return changed

    def _map_part(self, part: Any, label: Callable[[Any], str], key: Any) -> Any:
        try:
            return self.map(part)
        except Refusal:
            self.path.append(label(key))
            raise


def is_container(value: Any) -> bool:
    """Whether the parts of a value are searched."""
    return isinstance(value, (tuple, *_DICTS, *_LISTS, types.SimpleNamespace)) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )


def _attributes_of(value: Any) -> list[tuple[str, Any]]:
    """The attributes of a namespace or a dataclass, also in slots, and those that a subclass of a container has."""
    if type(value) in (dict, list):
        return []
    found = dict(getattr(value, "__dict__", {}))
    if isinstance(value, UserDict | UserList):
        del found["data"]
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name not in found and hasattr(value, field.name):
                found[field.name] = getattr(value, field.name)
    # The outputs of transformers have their items as attributes too, which go with them.
    items = {id(part) for part in value.values()} if isinstance(value, _DICTS) else ()
    return [(name, part) for name, part in found.items() if id(part) not in items]
