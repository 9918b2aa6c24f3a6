"""The tensors that travel: layouts read through DLPack equal those of torch, and say where tensors lie."""

from __future__ import annotations

import contextlib
import gc
import itertools
import pickle
import sys
import weakref
from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.tree.sample_tensors import DTYPES, QUANTIZED, QUIET, TENSORS, tensor_of

import tundish as td
from tundish.tree import flatten_with_addresses, layout


def both_ways(obj: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same comes of it where torch has no exchange API."""
    tensors, schema, addresses = flatten_with_addresses(obj)
    with monkeypatch.context() as patch:
        patch.setattr(layout, "DLPACK_EXCHANGE", None)
        there, other, expected = flatten_with_addresses(obj)
    assert schema == other and pickle.dumps(schema) == pickle.dumps(other)
    assert schema.layout.dtypes == other.layout.dtypes
    assert [one.dtype for one in tensors] == [one.dtype for one in there] == list(schema.layout.dtypes)
    for one, same in zip(tensors, there, strict=True):
        assert one.shape == same.shape and one.stride() == same.stride()
    # Copies have other addresses each time.
    assert len(addresses) == len(expected)


@QUIET
@pytest.mark.parametrize("name", TENSORS)
def test_no_unusual_tensor_is_taken_for_a_plain_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert layout.DLPACK_EXCHANGE is not None
    plain = [torch.ones(2, 3) for _ in range(5)]
    for place in (0, 3):
        tensor = TENSORS[name]()
        obj = [*plain[:place], tensor, *plain[place:]]
        both_ways(obj, monkeypatch)
        both_ways({"a": {"b": obj}}, monkeypatch)
        is_plain = (
            type(tensor) is torch.Tensor
            and tensor.layout is torch.strided
            and tensor.device.type == "cpu"
            and not (tensor.requires_grad or tensor.is_quantized or tensor.is_complex() or tensor.is_neg())
            and tensor.is_contiguous()
            and tensor.numel() > 0
        )
        assert (type(tensor) is torch.Tensor and layout.layout_as_is(obj) is not None) == is_plain


@QUIET
@pytest.mark.parametrize("dtype", [one for one in DTYPES if one not in QUANTIZED], ids=str)
def test_dtypes_are_not_taken_for_each_other(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for plain in (torch.uint8, torch.int8, torch.int16, torch.float32):
        # Layouts of plain tensors are cached.
        flatten_with_addresses([tensor_of(plain, (2, 3)) for _ in range(5)])
    both_ways([tensor_of(dtype, (2, 3)) for _ in range(5)], monkeypatch)
    both_ways([*(tensor_of(torch.uint8, (2, 3)) for _ in range(5)), tensor_of(dtype, (2, 3))], monkeypatch)


@pytest.mark.parametrize(
    "shared",
    [
        lambda base: [base, base],
        lambda base: [base, base[:2]],
        lambda base: [base[2:], base[:3]],
        lambda base: [base[:2], base[2:]],
        lambda base: [base[:0], base],
        lambda base: [base, base.view(torch.uint8)],
    ],
)
@pytest.mark.parametrize("beside", [0, 1, 600])
def test_memory_that_is_there_twice_is_seen(
    shared: Callable[[torch.Tensor], list[torch.Tensor]], beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = shared(torch.arange(4.0))
    obj = [parts[0], *(torch.ones(2) for _ in range(beside)), *parts[1:]]
    both_ways(obj, monkeypatch)
    tensors, schema, _ = flatten_with_addresses(obj)
    spans = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors if tensor.numel())
    assert all(one + size <= other for (one, size), (other, _) in itertools.pairwise(spans))
    assert all(torch.equal(*pair) for pair in zip(obj, td.tree.unflatten(schema, tensors), strict=True))


def test_a_layout_says_where_tensors_lie() -> None:
    tensors, schema, addresses = flatten_with_addresses(
        [torch.ones(3, 5), torch.ones(2, dtype=torch.int8), torch.ones(0), torch.tensor(2.0)]
    )
    assert schema.layout.sizes == [60, 2, 0, 4]
    assert schema.layout.offsets == [0, 64, 128, 128] and schema.layout.total == 192
    assert list(array("Q", addresses)) == [tensor.data_ptr() for tensor in tensors]
    buffer = torch.zeros(schema.layout.total + 64, dtype=torch.uint8)[64:]
    there = schema.layout.tensors_in(buffer)
    for place, tensor in zip(there, tensors, strict=True):
        place.copy_(tensor)
    assert buffer[:60].view(torch.float32).tolist() == [1.0] * 15 and buffer[64:66].tolist() == [1, 1]
    assert [one.tolist() for one in td.tree.unflatten(schema, there)] == [one.tolist() for one in tensors]
    # A tensor with gaps has no address.
    tensors, schema, addresses = flatten_with_addresses([torch.arange(10)[::2]])
    assert addresses == b"" and schema.layout.sizes == [40]


def batch(step: int, length: int = 8) -> dict[str, Any]:
    return {
        "input_ids": torch.full((2, length), step),
        "images": [torch.zeros(3, n) for n in (4, 5)],
        "task": "caption",
    }


def test_batches_that_are_made_alike_have_one_layout_and_equal_schemas() -> None:
    first = {length: td.tree.flatten(batch(0, length))[1] for length in (5, 6, 7)}
    assert len(set(first.values())) == 3
    for step in range(3):
        for length in (7, 5, 6):
            again = td.tree.flatten(batch(step, length))[1]
            assert again == first[length] and again.layout is first[length].layout
    assert repr(td.tree.flatten([torch.ones(3), "a"])[1]) == "<Schema of 1 tensors, 12 bytes>"


def test_layouts_that_nobody_uses_are_not_kept() -> None:
    def held() -> int:
        gc.collect()
        return sum(isinstance(one, layout.BufferLayout) for one in gc.get_objects())

    for number in range(1000):
        td.tree.flatten({f"key{number}": torch.zeros(number)})
    before = held()
    for number in range(1000, 2000):
        td.tree.flatten({f"key{number}": torch.zeros(number)})
    assert held() <= before + 512


def test_nothing_is_held_on_to() -> None:
    def batch() -> Any:
        return {
            "tensors": [torch.ones(3) for _ in range(6)],
            "values": [12345.5, "text" * 3, [2.5] * 30],
            "inner": ({"a": torch.zeros(2)}, [], ()),
        }

    made = batch()
    alive = [weakref.ref(one) for one in made["tensors"]]
    counted = [made, made["tensors"], made["tensors"][0], made["inner"], made["values"][0], made["values"][2]]
    counts = [sys.getrefcount(one) for one in counted]
    for obj in (made, [made, made["tensors"][0]], [made, lambda: None]):
        for _ in range(20):
            with contextlib.suppress(td.errors.NotPicklableError):
                td.tree.flatten(obj)
    del obj
    gc.collect()
    assert [sys.getrefcount(one) for one in counted] == counts
    del made, counted
    gc.collect()
    assert not any(ref() is not None for ref in alive)
