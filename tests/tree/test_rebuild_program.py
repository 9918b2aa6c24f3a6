"""A compiled program rebuilds the flattened object; damaged ones are refused before anything is built."""

from __future__ import annotations

import gc
import struct
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from support.tree.structures import BUILTIN_STRUCTURES, with_tensors

import tundish as td
from tundish._native import RebuildProgram

# The words of rust/python/src/tree/traversal.rs.
LEAF, VALUE, NONE, WHOLE, PICKLED, AGAIN, LIST, TUPLE, DICT, TUPLE_OF, NODE = range(11)


def words(*numbers: tuple[int, int] | int) -> bytes:
    """Words, each of a kind and its number; an integer is the second word of a container."""
    encoded = [one if isinstance(one, int) else one[0] | one[1] << 4 for one in numbers]
    return struct.pack(f"={len(encoded)}I", *encoded)


def no_builder(token: Any, parts: Any) -> Any:
    raise AssertionError("no rule was called")


@settings(max_examples=300)
@given(BUILTIN_STRUCTURES)
def test_a_rebuilt_object_is_flattened_to_the_same_schema(structure: Any) -> None:
    obj = with_tensors(structure)
    tensors, schema = td.tree.flatten(obj)
    built = td.tree.unflatten(schema, tensors)
    again, same = td.tree.flatten(built)
    assert same == schema
    assert [one.data_ptr() for one in again] == [one.data_ptr() for one in tensors]
    assert mutable_ids(built).isdisjoint(mutable_ids(obj))


def mutable_ids(obj: Any) -> set[int]:
    items = list(obj.values()) if isinstance(obj, dict) else obj if isinstance(obj, (list, tuple)) else []
    own = {id(obj)} if isinstance(obj, (dict, list)) else set()
    return own.union(*map(mutable_ids, items))


@pytest.mark.parametrize(
    ("program", "tokens"),
    [
        (b"", ()),
        (b"abc", ()),
        (words((LEAF, 0), (LEAF, 1)), ()),
        (words((NONE, 0), (LIST, 2)), ()),
        (words((DICT, 1), 0), ("a",)),
        (words((LEAF, 0), (DICT, 1), 0), ()),
        (words((LEAF, 0), (DICT, 1), 7), ("a",)),
        (words((LEAF, 0), (DICT, 1)), ("a",)),
        (words((AGAIN, 0)), ()),
        (words((LEAF, 0), (LIST, 1), (AGAIN, 1), (LIST, 2)), ()),
        (words((LEAF, 0), (TUPLE_OF, 1), 0), ("no class",)),
        (words((LEAF, 0), (NODE, 1), 0), ("no token",)),
        (words((11, 0)), ()),
    ],
    ids=repr,
)
def test_a_damaged_program_is_refused_before_anything_is_built(program: bytes, tokens: Any) -> None:
    with pytest.raises(ValueError, match="program of a schema is damaged"):
        RebuildProgram(program, tokens)


def test_a_program_refuses_too_few_leaves_and_values() -> None:
    program = RebuildProgram(words((LEAF, 4), (VALUE, 0), (LEAF, 1), (TUPLE, 3)), ())
    assert program.build([*range(5)], ["x"], [], no_builder) == (4, "x", 1)
    for leaves, values in (([*range(4)], ["x"]), ([*range(5)], [])):
        with pytest.raises(ValueError, match="takes 5 leaves and 1 values"):
            program.build(leaves, values, [], no_builder)


def test_a_class_that_holds_its_own_program_is_collected() -> None:
    class Local(tuple[Any, ...]):
        program: Any

    Local.program = RebuildProgram(words((LEAF, 0), (TUPLE_OF, 1), 0, (DICT, 1), 1), (Local, 5))
    assert Local.program.build([1], [], [], no_builder) == {5: Local((1,))}
    local = weakref.ref(Local)
    del Local
    gc.collect()
    assert local() is None


def test_garbage_is_collected_while_an_object_is_built() -> None:
    obj = [{"a": [torch.ones(1), (number, [None])]} for number in range(500)]
    tensors, schema = td.tree.flatten(obj)
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        built = td.tree.unflatten(schema, tensors)
    finally:
        gc.set_threshold(*before)
    assert [(one["a"][0] is leaf, one["a"][1]) for one, leaf in zip(built, tensors, strict=True)] == [
        (True, (number, [None])) for number in range(500)
    ]
