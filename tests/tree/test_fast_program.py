"""A compiled program rebuilds what was flattened, or is refused, or left to the other builder."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from support.tree.structures import BUILTIN_STRUCTURES, Pair, filled, parts_of

from tundish._native import QuickProgram
from tundish.tree.schema import values_of
from tundish.tree.traversal import Traversal


@settings(max_examples=300)
@given(BUILTIN_STRUCTURES)
def test_the_compiled_program_rebuilds_what_was_flattened(structure: Any) -> None:
    obj = filled(structure)
    walk = Traversal(obj, "batch", careful=False)
    program = QuickProgram.of(walk.program)
    if program is None or walk.pickled:
        # An array, or a tensor that is more than its values.
        assert any(part.kind in ("array", "parameter") for part in parts_of(structure, set()))
        return
    made = program.build(list(walk.leaves), values_of(walk.values))
    # Taken apart once more it is the same, down to which containers are one and the same.
    again = Traversal(made, "batch", careful=False)
    assert [id(one) for one in again.leaves] == [id(one) for one in walk.leaves]
    assert (again.program, again.values) == (walk.program, walk.values)
    assert ids_of(made).isdisjoint(ids_of(obj))


def ids_of(obj: Any) -> set[int]:
    """Of all containers that can be changed."""
    items = list(obj.values()) if isinstance(obj, dict) else obj if isinstance(obj, (list, tuple)) else []
    own = {id(obj)} if isinstance(obj, (dict, list)) else set()
    return own.union(*map(ids_of, items))


ONE = 1, ("items of a list",)


@pytest.mark.parametrize(
    "program",
    [
        (),
        (0, 1),
        (None, (2, ("items of a list",))),
        ((1, ("keys", ("a",))),),
        (0, (1, ("keys", ()))),
        (0, (1, ("keys", ("a", "b")))),
        (0, ONE, (0, ("again", 1)), (2, ("items of a list",))),
        ((0, ("again", 0)),),
        (range(3),),
        (range(-2, 0), (2, ("items of a list",))),
        (-1,),
        (2**70,),
        (range(2**70),),
        ((0, ()),),
        ((0, (1,)),),
        ((-1, ("items of a list",)),),
        ((0, ("again", -1)),),
    ],
    ids=repr,
)
def test_a_program_that_is_none_is_refused_before_anything_is_made(program: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="no program of a structure"):
        QuickProgram.of(program)


def test_a_program_gets_as_much_as_it_takes_or_makes_nothing() -> None:
    program = QuickProgram.of((4, "value", range(1, 3), (4, ("items of a tuple",))))
    assert program is not None
    assert program.build([*range(5)], ["x"]) == (4, "x", 1, 2)
    for leaves, values in (([*range(4)], ["x"]), ([*range(5)], [])):
        with pytest.raises(ValueError, match="takes 5 leaves and 1 values"):
            program.build(leaves, values)


@pytest.mark.parametrize(
    "step",
    [
        (0, ("host",)),
        (1, ("tuple", Pair, True)),
        (2, ("dict", dict, ("a",), True, None)),
        True,
        1.5,
        [0],
    ],
    ids=repr,
)
def test_a_program_that_makes_more_than_containers_is_left_to_the_other_builder(step: Any) -> None:
    assert QuickProgram.of((0, step)) is None


def test_a_class_that_has_a_program_of_its_own_is_garbage_when_nobody_has_it() -> None:
    class Local(tuple[Any, ...]):
        program: Any

    Local.program = QuickProgram.of((0, (1, ("tuple", Local, False)), (1, ("keys", (Local,)))))
    assert Local.program.build([1], []) == {Local: Local((1,))}
    local = weakref.ref(Local)
    del Local
    gc.collect()
    assert local() is None


def test_garbage_is_collected_while_an_object_is_made() -> None:
    obj = [{"a": [torch.ones(1), (number, [None])]} for number in range(500)]
    walk = Traversal(obj, "batch", careful=False)
    program = QuickProgram.of(walk.program)
    assert program is not None
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        made = program.build(list(walk.leaves), values_of(walk.values))
    finally:
        gc.set_threshold(*before)
    assert [(one["a"][0] is leaf, one["a"][1]) for one, leaf in zip(made, walk.leaves, strict=True)] == [
        (True, (number, [None])) for number in range(500)
    ]
