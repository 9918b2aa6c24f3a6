"""Traverses an object and writes the program that rebuilds it.

Invariants:

1. A deep object needs no more of the interpreter's stack than a flat one.
2. Parts come before the objects that they are parts of, and an object that is named twice is described once.
3. A container that contains itself is refused.
"""

from __future__ import annotations

import copyreg
import marshal
import operator
import pickle
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tundish.errors import InvalidInputError, NotPicklableError
from tundish.tree.containers import KEY_TYPES, dict_spec, key_text, rule_of
from tundish.tree.node_spec import AGAIN, CONSTANT, KEYS, LIST, TUPLE, VALUE, WHOLE, NodeSpec, Refusal, Token
from tundish.tree.pickled_values import dumps_values, why_not
from tundish.tree.schema import MARSHALLED, Structure, structure_of
from tundish.tree.tensors_and_arrays import tensor_spec

__all__ = ["Traversal"]

_PRIMITIVES = frozenset({bool, int, float, str, bytes, complex})
# Singletons, and classes: pickled as a name. They stand in the structure.
_CONSTANTS: frozenset[type] = frozenset({torch.dtype, torch.layout, torch.memory_format, torch.qscheme, type})
# A list of so many values of Python's own is one value.
_LONG = 16
# From so many parts on it is worth a look whether they are tensors one and all.
_SEVERAL = 4
_TENSORS = frozenset({Tensor})
_OPEN = -1
_LIST: Token = (LIST,)
_TUPLE: Token = (TUPLE,)
_WHOLE: Token = (WHOLE,)


# A container whose parts are being walked through: the parts, those to come, its token, the labels of the parts, its
# identity. A plain tuple, since making one of another type takes longer than all else that is done for a container.
_Frame = tuple[Sequence[Any], Iterator[Any], Token, Sequence[str] | None, int]


def _is_a_name(metaclass: type[type]) -> bool:
    """Whether its classes are pickled as a name, as those of `type` are, and compared as they are."""
    is_compared_as_others = metaclass.__eq__ is type.__eq__ and metaclass.__hash__ is type.__hash__
    return is_compared_as_others and metaclass not in copyreg.dispatch_table


class _Found(Exception):
    """The traversal came to the entry that was looked for."""


class _StopAt(list[Any]):
    """A list that ends the traversal which appends `entry` as item `number`."""

    def __init__(self, number: int, entry: Any) -> None:
        self._number = number
        self._entry = entry

    def append(self, entry: Any) -> None:
        same = entry is self._entry or (type(entry) is tuple and entry == self._entry)
        if same and len(self) == self._number:
            raise _Found
        super().append(entry)


class Traversal:
    """Traverses `root`; `name` stands for it in messages.

    A traversal that is not `careful` takes every tensor for a plain one that was not named before. The caller checks
    that for all tensors together; where it is wrong, a careful traversal looks at each. That takes ten times as long.

    Attributes:
        leaves: plain tensors, none twice.
        program: how they and the values are combined; see `Structure`.
        values: encoded.
        pickled: whether there are values of other than built-in types.

    Raises:
        What `flatten` raises.
    """

    def __init__(self, root: Any, name: str, careful: bool) -> None:
        self._root = root
        self._name = name
        self._careful = careful
        self._begin()
        self._run()
        self.values = self._pickle() if self.pickled else self._marshal()
        self.program = tuple(self._program)

    @property
    def structure(self) -> Structure:
        """The structure of this program. Raises `NotPicklableError`."""
        try:
            return structure_of(self.program)
        except Exception as error:
            raise self._cannot_encode(error) from error

    def _begin(self) -> None:
        self.leaves: list[Tensor] = []
        self._leaf_at: dict[int, int] = {}
        self._built_at: dict[int, int] = {}
        self._program: list[Any] = []
        self._values: list[Any] = []
        self._frames: list[_Frame] = []
        self.pickled = False
        # What a rule made has to outlive the walk, or its identity would be another object's.
        self._alive: list[Any] = []
        # Of arrays, and of tensors that are more than a leaf, by identity.
        self._specs: dict[int, NodeSpec] = {}

    def _run(self) -> None:
        try:
            self._traverse()
        except Refusal as refusal:
            raise refusal.kind(f"{self._path()} {refusal.reason}") from refusal.__cause__
        except _Found:
            raise
        except RecursionError as error:
            raise NotPicklableError(f"{self._path()} is too deep for the type that it is of") from error
        except Exception as error:
            error.add_note(f"while {self._path()} was flattened")
            raise

    def _traverse(self) -> None:
        careful, frames = self._careful, self._frames
        leaves, leaf_at, built_at = self.leaves, self._leaf_at, self._built_at
        add, add_value = self._program.append, self._values.append
        children: Sequence[Any] = (self._root,)
        frame: _Frame = (children, iter(children), (), None, 0)
        built = 0
        try:
            while True:
                for child in frame[1]:
                    kind = type(child)
                    if kind is Tensor and not careful:
                        add(len(leaves))
                        leaves.append(child)
                        continue
                    if kind in _PRIMITIVES:
                        add_value(child)
                        add(VALUE)
                        continue
                    if child is None:
                        add(None)
                        continue
                    identity = id(child)
                    before = built_at.get(identity)
                    if before is not None:
                        if before == _OPEN:
                            frames.append(frame)
                            raise Refusal(InvalidInputError, "is a container that it is itself a part of")
                        add((0, (AGAIN, before)))
                        continue
                    labels: Sequence[str] | None = None
                    if kind is dict:
                        keys = tuple(child)
                        if KEY_TYPES.issuperset(map(type, keys)):
                            token: Token = (KEYS, keys)
                            children = list(child.values())
                        else:
                            token, children, labels = dict_spec(child)
                    elif kind is list or kind is tuple:
                        if len(child) >= _LONG and _PRIMITIVES.issuperset(map(type, child)):
                            add_value(child)
                            add(VALUE)
                            add((1, _WHOLE))
                            built_at[identity] = built
                            built += 1
                            continue
                        token, children = (_LIST if kind is list else _TUPLE), child
                    elif kind in _CONSTANTS:
                        add((0, (CONSTANT, child)))
                        continue
                    else:
                        if kind is Tensor:
                            leaf = leaf_at.get(identity)
                            if leaf is not None:
                                add(leaf)
                                continue
                        frames.append(frame)
                        parts = tensor_spec(child) if kind is Tensor else rule_of(kind)(child)
                        frames.pop()
                        if parts is None:
                            if kind is Tensor:
                                leaf_at[identity] = leaf = len(leaves)
                                leaves.append(child)
                                add(leaf)
                            elif issubclass(kind, type) and _is_a_name(kind):
                                add((0, (CONSTANT, child)))
                            else:
                                self.pickled = True
                                add_value(child)
                                add(VALUE)
                            continue
                        token, children, labels = parts
                        self._alive.append((child, children))
                        if isinstance(child, (Tensor, np.ndarray)):
                            self._specs[identity] = parts
                    if not careful and len(children) >= _SEVERAL and _TENSORS.issuperset(map(type, children)):
                        # A row of tensors, as most containers with many parts are.
                        add(range(len(leaves), len(leaves) + len(children)))
                        leaves += children
                        add((len(children), token))
                        built_at[identity] = built
                        built += 1
                        continue
                    built_at[identity] = _OPEN
                    frames.append(frame)
                    frame = (children, iter(children), token, labels, identity)
                    break
                else:
                    if not frames:
                        return
                    done, frame = frame, frames.pop()
                    children, _, token, _, identity = done
                    if careful:
                        self._merge_row(len(children))
                    add((len(children), token))
                    built_at[identity] = built
                    built += 1
        except _Found:
            frames.append(frame)
            raise

    def _merge_row(self, count: int) -> None:
        """Write a row of leaves as a range, as a traversal that is not careful does, so that programs are equal."""
        if count < _SEVERAL:
            return
        row = self._program[-count:]
        first = row[0]
        if type(first) is int and row == list(range(first, first + count)):
            self._program[-count:] = [range(first, first + count)]

    def _marshal(self) -> bytes:
        try:
            return marshal.dumps(self._values, MARSHALLED)
        except ValueError:
            # Of texts and bytes it writes less than 2 GiB.
            self.pickled = True
            return self._pickle()

    def _pickle(self) -> bytes:
        try:
            return dumps_values(self._values, self._leaf_of, self._careful, self._specs)
        except Exception as error:
            raise self._cannot_pickle(error) from error

    def _leaf_of(self, tensor: Tensor) -> int:
        """The number of a tensor that is met inside a pickled value."""
        leaf = self._leaf_at.get(id(tensor))
        if leaf is None:
            leaf = self._leaf_at[id(tensor)] = len(self.leaves)
            self.leaves.append(tensor)
        return leaf

    def _cannot_pickle(self, error: Exception) -> Exception:
        for number, value in enumerate(self._values[:]):
            reason = why_not(value, self._careful)
            if reason is not None:
                where, error = reason
                path = self._find_path("_values", number, value) + where
                if isinstance(error, Refusal):
                    return error.kind(f"{path} {error.reason}")
                return NotPicklableError(f"{path} cannot be sent between processes: {error}")
        return NotPicklableError(f"{self._name} cannot be sent between processes: {error}")

    def _cannot_encode(self, error: Exception) -> Exception:
        for number, token in enumerate(self.program):
            try:
                pickle.dumps(token, 5)
            except Exception as reason:  # noqa: BLE001 (code of users)
                path = self._find_path("_program", number, token)
                return NotPicklableError(f"{path} cannot be sent between processes: {reason}")
        return NotPicklableError(f"{self._name} cannot be sent between processes: {error}")

    def _find_path(self, which: str, number: int, entry: Any) -> str:
        """The path of the object that made this entry of values or program, found by a second traversal."""
        self._begin()
        setattr(self, which, _StopAt(number, entry))
        with suppress(_Found):
            self._run()
        return self._path()

    def _path(self) -> str:
        path = self._name
        for children, to_come, token, labels, _ in self._frames:
            at = len(children) - operator.length_hint(to_come) - 1
            if labels is not None:
                path += labels[at]
            elif token and token[0] == KEYS:
                path += f"[{key_text(token[1][at])}]"
            elif token:
                path += f"[{at}]"
        return path
