"""Takes an object apart into its tensors and a schema.

The compiled traversal calls a rule for each object that is not of Python's own types. The first traversal assumes that
every tensor is plain and occurs once. If a check of all tensors together refutes that, a second traversal examines each
tensor, which takes ten times as long.
"""

from __future__ import annotations

import pickle
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from tundish import _native
from tundish.errors import InvalidInputError, NotPicklableError
from tundish.tree.container_rules import PLAIN_TUPLES, rule_of
from tundish.tree.memory_regions import layout_as_is, tensors_to_send
from tundish.tree.object_parts import ObjectParts, Refusal, part_label
from tundish.tree.pickled_values import ValuePickler
from tundish.tree.schema import Schema, Structure, encode_values, structure_of
from tundish.tree.tensor_rules import tensor_parts

__all__ = ["flatten", "flatten_with_addresses"]

# Bounds the memory for types in a program that creates new ones without end.
_MAX_KNOWN_TYPES = 4096


def flatten(obj: Any) -> tuple[list[Tensor], Schema]:
    """Flatten a nested object into its tensors and a schema of the rest.

    Args:
        obj: nested containers of tensors, arrays and other values. It is not changed, and must not change meanwhile.

    Returns:
        The tensors and the schema. The tensors are the object's own, or views of them, in the order in which they are
        met: dense, without gradients or lazy conjugation, on their device. No two overlap: a tensor that is named twice
        is there once, and so is memory that several tensors are views of. Read-only arrays, and arrays that torch
        cannot view, are copied. The schema can be pickled, and is equal for equal objects unless they hold something
        that pickles differently each time.

    Raises:
        InvalidTypeError: a tensor has no memory of its own, or is a part of something distributed.
        NotPicklableError: an object of an unknown type cannot be pickled, or its type is not found again.
        InvalidInputError: a container contains itself.
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
        InvalidTypeError, NotPicklableError, InvalidInputError: as for `flatten`.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> tensors, schema, addresses = td.tree.flatten_with_addresses({"ids": torch.arange(3)})
        >>> len(addresses)
        8
    """
    traversal = Traversal(obj, name, careful=False)
    tensors, known = traversal.leaves, layout_as_is(traversal.leaves)
    if known is not None:
        layout, addresses = known
    else:
        traversal = Traversal(obj, name, careful=True)
        tensors, layout, addresses = tensors_to_send(traversal.leaves)
    return tensors, Schema(traversal.structure, layout, traversal.values, traversal.pickles), addresses


class Traversal:
    """Traverses `root`, which messages call `name`.

    Unless `careful`, it assumes that every `torch.Tensor` is plain and occurs once.

    Attributes:
        leaves: the plain tensors.
        structure: how they and the values are combined.
        values, pickles: the encoded values of built-in types, and the pickles of other objects.
    """

    def __init__(self, root: Any, name: str, *, careful: bool) -> None:
        self.leaves: list[Tensor] = []
        self._careful = careful
        # The number or the parts of each tensor and array that a rule was asked for, by identity.
        self._found: dict[int, int | ObjectParts | None] = {}
        # Kept alive, because a new object may get the `id` of a freed one.
        self._alive: list[Any] = []
        self._pickler: ValuePickler | None = None
        path: list[tuple[Any, Any]] = []
        try:
            found = _native.traverse(root, Tensor, PLAIN_TUPLES, self._rule, self.leaves, path, careful)
            if found is None:
                raise Refusal(
                    InvalidInputError, "contains itself: send something else in place of the inner one"
                )
        except Refusal as refusal:
            raise refusal.kind(f"{_format_path(name, path)} {refusal.reason}") from refusal.__cause__
        except Exception as error:
            error.add_note(f"while {_format_path(name, path)} was flattened")
            raise
        words, tokens, values = found
        try:
            self.structure: Structure = structure_of(words, tokens)
            self.values = encode_values(values)
        except Exception as error:
            raise NotPicklableError(f"{name} cannot be sent between processes: {error}") from error
        self.pickles = b"" if self._pickler is None else self._pickler.getvalue()

    def _rule(self, value: Any) -> int | ObjectParts | None:
        """The number of a leaf, the parts of an object, or None after pickling it."""
        found = (
            self._leaf_or_parts(value) if isinstance(value, (Tensor, np.ndarray)) else self._parts_of(value)
        )
        if found is None:
            self._pickle(value)
        return found

    def _parts_of(self, value: Any) -> ObjectParts | None:
        kind: Any = type(value)
        parts = rule_of(kind)(value)
        if parts is not None:
            _check_importable(value if kind is type else kind)
            if parts.token[0] == "tuple subclass" and len(PLAIN_TUPLES) < _MAX_KNOWN_TYPES:
                PLAIN_TUPLES.add(kind)
        return parts

    def _leaf_or_parts(self, value: Any) -> int | ObjectParts | None:
        """The number of a plain tensor, the parts of other tensors and arrays; None for an array to pickle."""
        identity = id(value)
        if identity not in self._found:
            self._alive.append(value)
            if type(value) is not Tensor:
                found: int | ObjectParts | None = self._parts_of(value)
            else:
                found = tensor_parts(value) if self._careful else None
            if found is None and isinstance(value, Tensor):
                found = len(self.leaves)
                self.leaves.append(value)
            self._found[identity] = found
        return self._found[identity]

    def _pickle(self, value: Any) -> None:
        if self._pickler is None:
            self._pickler = ValuePickler(self._leaf_or_parts)
        try:
            self._pickler.dump(value)
        except Refusal as refusal:
            raise Refusal(refusal.kind, f"has a part that {refusal.reason}") from refusal.__cause__
        except RecursionError as error:
            raise _cannot_send("it is nested too deep to be pickled") from error
        except Exception as error:
            raise _cannot_send(error) from error


def _format_path(name: str, entries: list[tuple[Any, Any]]) -> str:
    return name + "".join(part_label(parts, key) for parts, key in entries)


@lru_cache(_MAX_KNOWN_TYPES)
def _check_importable(kind: type) -> None:
    """Refuse a class that another process does not find by its name."""
    try:
        pickle.dumps(kind, 5)
    except Exception as error:
        raise _cannot_send(error) from error


def _cannot_send(reason: object) -> Refusal:
    return Refusal(NotPicklableError, f"cannot be sent between processes: {reason}")
