"""The quick walk, through objects that need no rule: exact dicts, lists and tuples, namedtuples, tensors, plain values.

Owns what the words mean in which the compiled walk tells what it found. What always holds: it finds what a `Walk` that
is not careful finds, leaves, values and program, or nothing; and a structure is made of the words alone, so that what
is remembered of them is true whatever happens to the object.
"""

from __future__ import annotations

import marshal
from array import array
from functools import lru_cache
from typing import Any

from torch import Tensor

from tundish import _native
from tundish.tree.parts import AGAIN, KEYS, LIST, TUPLE, VALUE, WHOLE, Token
from tundish.tree.rules import PLAIN_TUPLES
from tundish.tree.schema import MARSHALLED, Structure, structure_of

__all__ = ["QuickWalk", "quick_walk"]

# As rust/python/src/tree/walk.rs has them.
_LEAF, _ROW, _VALUE, _NONE, _WHOLE, _AGAIN, _LIST, _TUPLE, _KEYS, _TUPLE_OF = range(10)
_SHIFT = 4
_WHAT = (1 << _SHIFT) - 1
# Named often, and pickled once.
_TOKENS: dict[int, Token] = {_LIST: (LIST,), _TUPLE: (TUPLE,), _WHOLE: (WHOLE,)}


class QuickWalk:
    """What the quick walk found; as `Walk` has it.

    Attributes:
        leaves: plain tensors, if they all are and none is there twice.
        structure: how they and the values are put together.
        values: in bytes.
        pickled: False, as there are no values that are not Python's own.
    """

    __slots__ = ("leaves", "structure", "values")
    pickled = False

    def __init__(self, leaves: list[Tensor], structure: Structure, values: list[Any]) -> None:
        self.leaves = leaves
        self.structure = structure
        self.values = marshal.dumps(values, MARSHALLED)


def quick_walk(root: Any) -> QuickWalk | None:
    """Walk through `root`; None if it is not for the quick walk."""
    found = _native.quick_walk(root, Tensor, PLAIN_TUPLES)
    if found is None:
        return None
    words, keys, leaves, values = found
    try:
        structure = _structure_of_words(words, keys)
    except Exception:  # noqa: BLE001 (a class that is not found by its name: the other walk knows where it is)
        return None
    try:
        return QuickWalk(leaves, structure, values)
    except ValueError:
        # A value is too long for these bytes: the other walk has others.
        return None


@lru_cache(256)
def _structure_of_words(words: bytes, keys: tuple[Any, ...]) -> Structure:
    return structure_of(program_of(words, keys))


def program_of(words: bytes, keys: tuple[Any, ...]) -> tuple[Any, ...]:
    """The program that a `Walk` makes where the quick walk tells these words."""
    program: list[Any] = []
    add = program.append
    leaf = 0
    told = iter(array("I", words))
    for word in told:
        what, number = word & _WHAT, word >> _SHIFT
        if what == _LEAF:
            add(leaf)
            leaf += 1
        elif what == _ROW:
            add(range(leaf, leaf + number))
            leaf += number
        elif what == _VALUE:
            add(VALUE)
        elif what == _NONE:
            add(None)
        elif what == _WHOLE:
            add((1, _TOKENS[what]))
        elif what == _AGAIN:
            add((0, (AGAIN, number)))
        elif what in _TOKENS:
            add((number, _TOKENS[what]))
        elif what == _KEYS:
            first = next(told)
            add((number, (KEYS, keys[first : first + number])))
        else:
            add((number, ("tuple", keys[next(told)], False)))
    return tuple(program)
