"""Replaces or collects the parts of an object that are of given types.

Invariants:

1. Nothing that was given is changed, and containers keep their types.
2. If nothing in an object is replaced, the object itself is returned. An object that occurs twice stays one object.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from tundish.errors import InvalidInputError, InvalidTypeError
from tundish.tree.container_rules import build, parts_of
from tundish.tree.object_parts import ObjectParts, Refusal, part_label

__all__ = ["find_all", "map_only"]

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_IN_PROGRESS = object()


def map_only(
    kinds: type | tuple[type, ...],
    function: Callable[[Any], Any],
    obj: Any,
    *,
    enter: Callable[[Any], Any] | None = None,
    name: str = "obj",
) -> Any:
    """Replace each part of `obj` that is of one of the `kinds` by `function(part)`.

    Args:
        kinds: parts of these classes, or of subclasses, are replaced; they are not traversed.
        function: called each time that such a part is named, in the order in which they are met. It may raise
            `Refusal`, which becomes its error with the path.
        obj: anything that `flatten` takes. Objects that it would pickle are left as they are, and so are arrays, and
            tensors of other types.
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
        >>> td.tree.map_only(torch.Tensor, lambda tensor: tuple(tensor.shape), {"a": [torch.zeros(2, 3), 1]})
        {'a': [(2, 3), 1]}
    """
    classes = kinds if isinstance(kinds, tuple) else (kinds,)
    if not all(isinstance(kind, type) for kind in classes):
        raise InvalidTypeError(f"kinds is {kinds!r}: give a class, or a tuple of classes")
    run = _MapOnly(classes, function, enter)
    try:
        return run.map(obj)
    except Refusal as refusal:
        path = name + "".join(reversed(run.path))
        raise refusal.kind(f"{path} {refusal.reason}") from refusal.__cause__


class _MapOnly:
    def __init__(
        self,
        kinds: tuple[type, ...],
        function: Callable[[Any], Any],
        enter: Callable[[Any], Any] | None,
    ) -> None:
        # After a refusal: the labels that lead to the refused part, innermost first.
        self.path: list[str] = []
        self._kinds = kinds
        self._exact = frozenset(kinds)
        self._plain = frozenset(kind for kind in _PLAIN if not issubclass(kind, kinds))
        self._function = function
        self._enter = enter
        # The result for each container, by `id`; and objects that are kept alive so that no other one gets their `id`.
        self._done: dict[int, Any] = {}
        self._alive: list[Any] = []

    def map(self, value: Any) -> Any:
        if type(value) in self._plain:
            return value
        if isinstance(value, self._kinds):
            return self._function(value)
        if isinstance(value, (np.ndarray, Tensor)):
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
            made = self._map_container(value if self._enter is None else self._enter(value))
        except RecursionError as error:
            raise Refusal(InvalidInputError, "is nested too deep") from error
        self._done[identity] = made
        return made

    def _map_container(self, value: Any) -> Any:
        parts = parts_of(value)
        if parts is None:
            return value
        self._alive.append((value, parts.children))
        made = self._map_parts(parts)
        return value if all(map(operator.is_, made, parts.children)) else build(parts.token, made)

    def _map_parts(self, parts: ObjectParts) -> list[Any]:
        made: list[Any] = []
        # Where all are to be replaced, no other check is needed.
        each = self._function if self._exact.issuperset(map(type, parts.children)) else self.map
        try:
            for part in parts.children:
                made.append(each(part))  # noqa: PERF401 (their number tells which part was refused)
        except Refusal:
            self.path.append(part_label(parts, len(made)))
            raise
        return made


def find_all(kinds: type | tuple[type, ...], obj: Any) -> list[Any]:
    """Return all parts of `obj` that are of one of the `kinds`.

    Args:
        kinds: as for `map_only`.
        obj: as for `map_only`.

    Returns:
        The parts in the order in which they are met, each as often as it is named.

    Raises:
        InvalidInputError, InvalidTypeError: as for `map_only`.

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

    map_only(kinds, collect, obj)
    return found
