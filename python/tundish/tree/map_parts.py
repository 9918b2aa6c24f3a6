"""Replaces or collects the parts of an object that are of given types.

Invariants:

1. Nothing that was given is changed, and containers keep their types.
2. An object without a replaced part is the very object that was given; one that is named twice is one object
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from tundish.errors import InvalidInputError
from tundish.tree.containers import KEY_TYPES, dict_spec, key_text, rule_of
from tundish.tree.node_spec import HOST, KEYS, LIST, TUPLE, Refusal, Token
from tundish.tree.unflattening import build

__all__ = ["find_all", "map_only"]

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_OPEN = object()


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

    Example:
        >>> import torch
        >>> import tundish as td
        >>> td.tree.map_only(torch.Tensor, lambda tensor: tuple(tensor.shape), {"a": [torch.zeros(2, 3), 1]})
        {'a': [(2, 3), 1]}
    """
    mapping = _Mapping(kinds if isinstance(kinds, tuple) else (kinds,), function, enter)
    try:
        return mapping.of(obj)
    except _Misplaced as misplaced:
        path = name + "".join(reversed(misplaced.path))
        raise misplaced.refusal.kind(f"{path} {misplaced.refusal.reason}") from misplaced.refusal.__cause__


class _Misplaced(Exception):
    """A refusal, and the labels on the path to the refused part, innermost first."""

    def __init__(self, refusal: Refusal, *path: str) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal
        self.path = list(path)


class _Mapping:
    def __init__(
        self,
        kinds: tuple[type, ...],
        function: Callable[[Any], Any],
        enter: Callable[[Any], Any] | None,
    ) -> None:
        self._kinds = kinds
        self._exact = frozenset(kinds)
        # What is left as it is without another look.
        self._plain = frozenset(kind for kind in _PLAIN if not issubclass(kind, kinds))
        self._function = function
        self._enter = enter
        # By identity of a container, what became of it; and what keeps identities from being others'.
        self._done: dict[int, Any] = {}
        self._alive: list[Any] = []

    def of(self, value: Any) -> Any:
        kind = type(value)
        if kind in self._plain:
            return value
        if isinstance(value, self._kinds):
            try:
                return self._function(value)
            except Refusal as refusal:
                raise _Misplaced(refusal) from refusal
        if isinstance(value, (np.ndarray, Tensor)):
            return value
        identity = id(value)
        done = self._done.get(identity, self)
        if done is _OPEN:
            raise _Misplaced(Refusal(InvalidInputError, "is a container that it is itself a part of"))
        if done is not self:
            return done
        self._done[identity] = _OPEN
        self._alive.append(value)
        try:
            made = self._container(value, kind)
        except RecursionError as error:
            raise _Misplaced(Refusal(InvalidInputError, "is too deep")) from error
        self._done[identity] = made
        return made

    def _container(self, value: Any, kind: type) -> Any:
        entered = value if self._enter is None else self._enter(value)
        if entered is not value:
            self._alive.append(entered)
        token: Token
        children: Sequence[Any]
        labels: Sequence[str] | None = None
        if kind is dict and KEY_TYPES.issuperset(map(type, entered)):
            keys = tuple(entered)
            token, children = (KEYS, keys), list(entered.values())
            labels = _KeyLabels(keys)
        elif kind is dict:
            token, children, labels = dict_spec(entered)
        elif kind is list or kind is tuple:
            token, children = ((LIST,) if kind is list else (TUPLE,)), entered
        else:
            try:
                parts = rule_of(kind)(entered)
            except Refusal as refusal:
                raise _Misplaced(refusal) from refusal
            if parts is None:
                return entered
            token, children, labels = parts
            # What a rule made has to outlive the walk, or its identity would be another object's.
            self._alive.append(children)
        made = self._all(children, labels)
        if all(map(_is, made, children)):
            return entered
        return made[0] if token[0] == HOST else build(token, made)

    def _all(self, children: Sequence[Any], labels: Sequence[str] | None) -> list[Any]:
        made: list[Any] = []
        # Where all are to be replaced nothing else has to be asked of them.
        each = self._function if self._exact.issuperset(map(type, children)) else self.of
        try:
            for child in children:
                made.append(each(child))  # noqa: PERF401 (how far it came is the label's number)
        except Refusal as refusal:
            raise _Misplaced(refusal, _label(labels, len(made))) from refusal
        except _Misplaced as misplaced:
            misplaced.path.append(_label(labels, len(made)))
            raise
        return made


def _label(labels: Sequence[str] | None, at: int) -> str:
    return f"[{at}]" if labels is None else labels[at]


class _KeyLabels(Sequence[str]):
    """Labels of a dict's values, made when one is asked for."""

    def __init__(self, keys: Sequence[Any]) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, at: Any) -> Any:
        return f"[{key_text(self._keys[at])}]"


def _is(one: Any, other: Any) -> bool:
    return one is other


def find_all(kinds: type | tuple[type, ...], obj: Any) -> list[Any]:
    """All parts of `obj` of these `kinds`, in the order in which they are met, each as often as it is named."""
    found: list[Any] = []

    def note(part: Any) -> Any:
        found.append(part)
        return part

    map_only(kinds, note, obj)
    return found
