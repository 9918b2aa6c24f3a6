"""Schemas of equal objects are equal and recognised; layouts say where tensors lie."""

from __future__ import annotations

import collections
import gc
import pickle
from array import array
from typing import Any

import pytest
import torch

import tundish as td
from tundish.tree import buffer_layout, schema
from tundish.tree.flattening import flatten_with_addresses


def batch(step: int = 0, length: int = 8) -> dict[str, Any]:
    return {
        "input_ids": torch.full((2, length), step),
        "images": [torch.full((3, n), float(step)) for n in (4, 5, 6, 7, 8)],
        "nested": collections.OrderedDict(a=(torch.zeros(1), None), b=[]),
        "task": "caption",
        "step": step,
    }


def count_pickles(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The values that the modules of schemas pickle from now on."""
    seen: list[Any] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(pickle, name)

        def dumps(self, value: Any, *args: Any) -> bytes:
            seen.append(value)
            return pickle.dumps(value, *args)

    for module in (buffer_layout, schema):
        monkeypatch.setattr(module, "pickle", Counting())
    return seen


def test_equal_schemas_are_recognised_and_not_pickled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = td.tree.flatten(batch())[1]
    encoded = first.encode()
    pickled = count_pickles(monkeypatch)
    for step in range(5):
        again = td.tree.flatten(batch(step))[1]
        assert again.structure is first.structure and again.layout is first.layout
        assert (again == first) == (step == 0)
        assert (again.encode() == encoded) == (step == 0)
    assert pickled == []
    # Other shapes: the structure is the same one, and only shapes are written.
    longer = td.tree.flatten(batch(length=9))[1]
    longer.encode()
    assert longer.structure is first.structure and longer != first
    assert len(pickled) == 1
    other = td.tree.flatten({**batch(), "more": 1})[1]
    assert other.structure is not first.structure and other.layout is first.layout
    assert len(pickled) == 2


def test_both_ends_hold_on_to_what_they_read() -> None:
    encoded = td.tree.flatten(batch())[1].encode()
    one, other = schema.Schema.decode(encoded), schema.Schema.decode(memoryview(bytearray(encoded)))
    assert one.structure is other.structure and one.layout is other.layout and one == other


def test_schemas_of_different_objects_differ() -> None:
    one = torch.ones(2)
    objects: list[Any] = [
        [1],
        [True],
        [1.0],
        (1,),
        [0.0],
        [-0.0],
        ["1"],
        [b"1"],
        [None],
        {1: 1},
        {True: 1},
        {"1": 1},
        [one],
        [one.double()],
        [torch.ones(2, 1)],
        [one, one],
        [one, one.clone()],
        [one.clone().requires_grad_()],
        [torch.nn.Parameter(one)],
        [torch._neg_view(one)],
        [one.numpy()],
        [list(range(20))],
        [tuple(range(20))],
        [[float(n) for n in range(20)]],
        collections.OrderedDict(a=1),
        {"a": 1},
        {"a": 1, "b": 2},
        {"b": 2, "a": 1},
    ]
    schemas = [td.tree.flatten(obj)[1] for obj in objects]
    assert len(set(schemas)) == len(schemas) == len({one.encode() for one in schemas})
    again = [td.tree.flatten(obj)[1] for obj in objects]
    assert again == schemas and [hash(one) for one in again] == [hash(one) for one in schemas]
    for one_schema in schemas:
        assert [other == one_schema for other in again].count(True) == 1
    assert schemas[0] != "a schema"


def test_tensors_that_only_look_alike_are_not_taken_for_each_other() -> None:
    plain = [torch.ones(2, 3) for _ in range(5)]

    def last(tensor: torch.Tensor) -> Any:
        return td.tree.unflatten(*reversed(td.tree.flatten([*plain[:4], tensor])))[4]

    # Often enough for it to be recognised.
    for _ in range(4):
        td.tree.flatten(plain)
    others = {
        "gradient": torch.ones(2, 3, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(2, 3)),
        "negative": torch._neg_view(torch.ones(2, 3)),
        "strides": torch.arange(6.0).view(3, 2).t(),
        "dtype": torch.ones(2, 3, dtype=torch.int32),
        "shape": torch.ones(3, 2),
        "sparse": torch.ones(2, 3).to_sparse(),
        "shared": plain[0],
        "overlapping": torch.empty(0).set_(plain[1].untyped_storage(), 0, (2, 3), (1, 1)),
    }
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            for name, other in others.items():
                back = last(other)
                assert (
                    type(back) is type(other) and back.dtype == other.dtype and back.shape == other.shape
                ), name
                assert back.requires_grad == other.requires_grad and back.is_neg() == other.is_neg(), name
                assert torch.equal(back.to_dense(), other.to_dense()), name
                assert torch.equal(last(plain[4]), plain[4])


def test_equal_batches_have_one_structure_and_one_layout() -> None:
    first = {length: td.tree.flatten(batch(length=length))[1] for length in (5, 6, 7)}
    for step in range(3):
        for length in (7, 5, 6):
            again = td.tree.flatten(batch(step, length=length))[1]
            assert again.structure is first[length].structure and again.layout is first[length].layout


def test_caches_are_bounded_and_keep_recent_schemas() -> None:
    def held() -> int:
        gc.collect()
        return sum(isinstance(one, schema.Structure | buffer_layout.BufferLayout) for one in gc.get_objects())

    first = td.tree.flatten(batch())[1]
    for number in range(1000):
        td.tree.flatten({f"key{number}": torch.zeros(number)})
        if number % 50 == 0:
            again = td.tree.flatten(batch(number))[1]
            assert again.structure is first.structure and again.layout is first.layout
    before = held()
    for number in range(1000, 2000):
        td.tree.flatten({f"key{number}": torch.zeros(number)})
    assert held() <= before + 512


def test_a_layout_says_where_tensors_lie() -> None:
    tensors, one, addresses = flatten_with_addresses(
        [torch.ones(3, 5), torch.ones(2, dtype=torch.int8), torch.ones(0), torch.tensor(2.0)]
    )
    assert one.layout.sizes == [60, 2, 0, 4]
    assert one.layout.offsets == [0, 64, 128, 128] and one.layout.total == 192
    assert list(array("Q", addresses)) == [tensor.data_ptr() for tensor in tensors]
    buffer = torch.zeros(one.layout.total + 64, dtype=torch.uint8)[64:]
    there = one.layout.tensors_in(buffer)
    for place, tensor in zip(there, tensors, strict=True):
        place.copy_(tensor)
    assert buffer[:60].view(torch.float32).tolist() == [1.0] * 15 and buffer[64:66].tolist() == [1, 1]
    assert [tensor.tolist() for tensor in td.tree.unflatten(one, there)] == [one.tolist() for one in tensors]
    # A tensor with gaps has no address.
    gaps = torch.arange(10)[::2]
    tensors, one, addresses = flatten_with_addresses([gaps])
    assert addresses == b"" and one.layout.sizes == [40]


def test_messages_may_name_the_object_otherwise() -> None:
    with pytest.raises(TypeError, match=r"^batches\[3\]\[0\] cannot"):
        flatten_with_addresses([lambda: None], "batches[3]")


def test_a_schema_shows_what_it_is_one_of() -> None:
    assert repr(td.tree.flatten([torch.ones(3), "a"])[1]) == "<Schema of 1 tensors, 12 bytes>"
