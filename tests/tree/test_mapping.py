"""`map`: something else in place of some parts, and everything else as it was."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Sample:
    pixels: Any
    name: Any


class Noted(list[Any]):
    mask: Any


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def test_types_and_everything_else_stay() -> None:
    array = np.zeros(3)
    obj = {
        "dict": {1: torch.zeros(1), ("key",): torch.zeros(2)},
        "ordered": OrderedDict(z=torch.zeros(3), a=4),
        "pair": Pair(torch.zeros(4), array),
        "sample": Sample([torch.zeros(5)], (None, 1.5, b"x")),
        "parameter": torch.nn.Parameter(torch.zeros(6)),
    }
    made = td.tree.map(shape_of, obj)
    assert made == {
        "dict": {1: (1,), ("key",): (2,)},
        "ordered": OrderedDict(z=(3,), a=4),
        "pair": Pair((4,), array),
        "sample": Sample([(5,)], (None, 1.5, b"x")),
        "parameter": (6,),
    }
    assert type(made["ordered"]) is OrderedDict and type(made["pair"]) is Pair
    assert made["pair"].right is array
    # The given object is unchanged.
    assert isinstance(obj["pair"].left, Tensor) and isinstance(obj["sample"].pixels[0], Tensor)  # type: ignore[attr-defined]


def test_an_object_without_such_a_part_is_returned_itself() -> None:
    obj = {"plain": {"numbers": [1, 2, 3]}, "opaque": object(), "tensor": torch.zeros(1)}
    made = td.tree.map(shape_of, obj)
    assert made["plain"] is obj["plain"] and made["opaque"] is obj["opaque"]
    assert td.tree.map(shape_of, obj["plain"]) is obj["plain"]


def test_everything_but_containers_and_tensors_passes_by() -> None:
    others = [
        lambda: 1,
        threading.Lock(),
        open,
        np.zeros(3),
        torch.nn.Linear(2, 2),
        {torch.ones(1)},
        bytearray(b"x"),
    ]
    obj = {"tensor": torch.zeros(2), "others": others, "factory": defaultdict(lambda: 1, a=torch.zeros(1))}
    made = td.tree.map(shape_of, obj)
    assert made["tensor"] == (2,) and made["factory"] == {"a": (1,)}
    assert all(one is other for one, other in zip(made["others"], others, strict=True))
    assert made["factory"].default_factory is obj["factory"].default_factory


def test_attributes_of_a_subclass_of_a_container_are_searched() -> None:
    noted = Noted([torch.zeros(1)])
    noted.mask = torch.zeros(2)
    made = td.tree.map(shape_of, noted)
    assert type(made) is Noted and made == [(1,)] and made.mask == (2,) and noted.mask.shape == (2,)


def test_an_output_of_transformers_has_each_tensor_once() -> None:
    output = pytest.importorskip("transformers.modeling_outputs").CausalLMOutput(logits=torch.zeros(2))
    assert len(td.tree.find_all(Tensor, output)) == 1
    made = td.tree.map(lambda tensor: tensor + 1, output)
    assert type(made) is type(output) and made.logits is made["logits"] and made.logits.tolist() == [1, 1]


def test_an_object_that_is_named_twice_stays_one() -> None:
    shared = [torch.zeros(1)]
    first, second = td.tree.map(shape_of, [shared, {"again": shared}])
    assert first == [(1,)] and second["again"] is first


def test_each_naming_of_a_part_is_seen_in_order() -> None:
    one, two = torch.zeros(1), torch.zeros(2)
    obj = [one, {"b": two, "a": one}, (two,)]
    assert [len(tensor) for tensor in td.tree.find_all(Tensor, obj)] == [1, 2, 1, 2]


def test_the_result_of_enter_is_traversed() -> None:
    def without_masks(container: Any) -> Any:
        return (
            {k: v for k, v in container.items() if k != "mask"} if isinstance(container, dict) else container
        )

    obj = [{"ids": torch.zeros(2), "mask": torch.zeros(3)}]
    assert td.tree.map(shape_of, obj, enter=without_masks) == [{"ids": (2,)}]
    assert "mask" in obj[0]


def test_a_refusal_names_the_path() -> None:
    def refuse(_: Tensor) -> None:
        raise td.tree.Refusal(InvalidTypeError, "is not wanted")

    for obj, path in (
        ({"a": [0, {"b": torch.zeros(1)}]}, 'obj["a"][1]["b"] is not wanted'),
        (Sample(1, Pair(torch.zeros(1), 2)), "obj.name.left is not wanted"),
    ):
        with pytest.raises(InvalidTypeError) as raised:
            td.tree.map(refuse, obj)
        assert str(raised.value) == path


@pytest.mark.parametrize("kinds", ["Tensor", (Tensor, "Tensor"), Tensor | int])
def test_only_classes_are_taken_for_kinds(kinds: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r"^kinds is .*: give a class, or a tuple of classes$"):
        td.tree.map(str, [1], kinds=kinds)


def test_containers_in_themselves_and_too_deep_ones_are_refused() -> None:
    own: list[Any] = [1]
    own.append(own)
    with pytest.raises(InvalidInputError, match=r'obj\["own"\]\[1\] contains itself'):
        td.tree.map(shape_of, {"own": own})
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InvalidInputError, match="is nested too deep"):
        td.tree.map(shape_of, deep)


def test_tensors_of_no_wanted_kind_are_left_as_they_are() -> None:
    tensors = [torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.ones(2).to_sparse()]
    found = td.tree.map(lambda number: number + 1, [*tensors, 3], kinds=int)
    assert all(one is other for one, other in zip(found, tensors, strict=False)) and found[-1] == 4
    parameters = td.tree.find_all(torch.nn.Parameter, tensors)
    assert len(parameters) == 1 and parameters[0] is tensors[1]
