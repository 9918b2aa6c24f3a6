"""The compiled traversal calls rules only where it must, and layouts read through DLPack equal those of torch."""

from __future__ import annotations

import collections
import contextlib
import gc
import itertools
import sys
import threading
import weakref
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from support.tree.sample_tensors import DTYPES, QUANTIZED, QUIET, TENSORS, tensor_of
from support.tree.structures import Pair

import tundish as td
from tundish.errors import InvalidInputError
from tundish.tree import container_rules, flattening, memory_regions
from tundish.tree.flattening import flatten_with_addresses


class Text(str):
    """A key that is none of Python's own, and must not be asked."""

    __slots__ = ()
    asked = 0

    def __hash__(self) -> int:
        Text.asked += 1
        return hash(str(self))

    def __eq__(self, other: object) -> bool:
        Text.asked += 1
        return str(self) == other


class Number(int):
    pass


class Named(dict[str, Any]):
    pass


class Listed(list[Any]):
    pass


class Meta(type):
    asked = 0

    def __hash__(cls) -> int:
        Meta.asked += 1
        return 1

    def __eq__(cls, other: object) -> bool:
        Meta.asked += 1
        return True


class Crooked(tuple[Any, ...], metaclass=Meta):
    pass


@pytest.mark.parametrize(
    "obj",
    [
        {Text("a"): 1},
        [{Number(1): 1}],
        {True: 1},
        {None: 1},
        {(1,): 1},
        Named(a=1),
        [Listed([1])],
        (Crooked((1, 2)),),
        [Number(1)],
        [Text("a")],
        collections.OrderedDict(a=1),
        collections.defaultdict(list),
        torch.nn.Parameter(torch.ones(1)),
        torch.Size([1]),
        [torch.float32],
        [{1}],
        [range(3)],
        [[*[1] * 20, Number(2)]],
    ],
    ids=repr,
)
def test_objects_that_are_not_exactly_of_pythons_own_types_go_to_a_rule(obj: Any) -> None:
    asked = Text.asked, Meta.asked
    with pytest.raises(ByRule):
        traverse(obj)
    assert (Text.asked, Meta.asked) == asked


class ByRule(Exception):
    """A rule was called."""


def traverse(obj: Any) -> Any:
    """The result of the compiled traversal without any rule. Raises `ByRule`."""

    def rule(_: Any) -> Any:
        raise ByRule

    return td._native.traverse(obj, torch.Tensor, container_rules.PLAIN_TUPLES, rule, [], [], False)


def test_a_plain_namedtuple_can_be_registered_later() -> None:
    class Late(NamedTuple):
        a: Any
        b: Any

    globals()["Late"] = Late
    Late.__qualname__ = "Late"
    obj = [Late(torch.ones(2), 1)]
    for _ in range(3):
        td.tree.flatten(obj)
    assert traverse(obj) is not None
    td.tree.register(Late, lambda late: ([late.a], "b"), lambda parts, context: Late(parts[0], context))
    with pytest.raises(ByRule):
        traverse(obj)
    back = td.tree.unflatten(*reversed(td.tree.flatten(obj)))
    assert back[0].b == "b"


def test_containers_that_are_part_of_themselves() -> None:
    one: list[Any] = [1]
    one.append(one)
    two: dict[str, Any] = {"a": ([],)}
    two["a"][0].append({"b": two})
    three = ([],)
    three[0].append(three)
    for obj, path in (
        (one, r"^batch\[1\] "),
        (two, r'^batch\["a"\]\[0\]\[0\]\["b"\] '),
        (three, r"^batch\[0\]\[0\] "),
    ):
        with pytest.raises(InvalidInputError, match=path + "contains itself"):
            td.tree.flatten(obj)


def test_no_depth_is_too_deep() -> None:
    tensor = torch.ones(1)
    obj: Any = tensor
    for number in range(100_000):
        obj = [obj] if number % 3 else ({"a": obj},)
    (carried,), schema = td.tree.flatten(obj)
    assert carried is tensor
    back = td.tree.unflatten(schema, [carried])
    for number in reversed(range(100_000)):
        back = back[0] if number % 3 else back[0]["a"]
        obj = obj[0] if number % 3 else obj[0]["a"]
    assert back is tensor


def test_ordinary_batches_need_no_rule_and_one_traversal(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: Any) -> Any:
        raise AssertionError("each tensor was looked at")

    td.tree.flatten([Pair(1, 2)])
    monkeypatch.setattr(flattening, "tensors_to_send", slow)
    monkeypatch.setattr(flattening.Traversal, "_rule", slow)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn):
        batch = {
            "ids": tensor_of(dtype, (2, 3)),
            1: [tensor_of(dtype, (n,)) for n in range(1, 20)],
            "pairs": (
                Pair(tensor_of(dtype, ()), tensor_of(dtype, (1, 2, 1)).transpose(0, 1)),
                "text",
                1.5,
                None,
                [1] * 20,
            ),
        }
        tensors, schema, addresses = flatten_with_addresses(batch)
        assert len(tensors) == 22
        assert list(array("Q", addresses)) == [tensor.data_ptr() for tensor in tensors]
        assert schema.layout.dtypes == tuple(tensor.dtype for tensor in tensors)
        assert schema.layout.shapes == tuple(tensor.shape for tensor in tensors)


def both_ways(obj: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same comes of it where torch has no exchange API."""
    tensors, schema, addresses = flatten_with_addresses(obj)
    with monkeypatch.context() as patch:
        patch.setattr(memory_regions, "DLPACK_EXCHANGE", None)
        there, other, expected = flatten_with_addresses(obj)
    assert schema == other and schema.encode() == other.encode()
    assert schema.layout.dtypes == other.layout.dtypes
    assert [one.dtype for one in tensors] == [one.dtype for one in there] == list(schema.layout.dtypes)
    for one, same in zip(tensors, there, strict=True):
        assert one.shape == same.shape and one.stride() == same.stride()
    # Copies have other addresses each time.
    assert len(addresses) == len(expected)


@QUIET
@pytest.mark.parametrize("name", TENSORS)
def test_no_unusual_tensor_is_taken_for_a_plain_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_regions.DLPACK_EXCHANGE is not None
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
        assert (type(tensor) is torch.Tensor and memory_regions.layout_as_is(obj) is not None) == is_plain


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


def test_a_mode_of_torch_changes_nothing() -> None:
    from torch.overrides import TorchFunctionMode

    class Meddling(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # The object changes during the traversal.
            batch.clear()
            return func(*args, **(kwargs or {}))

    batch = [torch.full((3,), float(number)) for number in range(50)]
    kept = list(batch)
    with Meddling():
        tensors, schema = td.tree.flatten(batch)
    assert [id(one) for one in tensors] == [id(one) for one in kept]
    assert len(schema.layout.shapes) == 50


def test_the_garbage_collector_may_change_the_object() -> None:
    """It calls finalizers whenever an object is allocated."""

    class Clearing:
        def __init__(self, batch: Any) -> None:
            self.batch, self.itself = batch, self

        def __del__(self) -> None:
            for one in self.batch.values():
                one.clear()
            self.batch.clear()

    before = gc.get_threshold()
    cleared = whole = 0
    # Or each of thousands of rounds looks through all that the other tests imported.
    gc.freeze()
    try:
        for threshold in range(1, 60):
            batch = {f"key {n}": [{"a": torch.ones(2), "b": [n]} for _ in range(5)] for n in range(20)}
            gc.collect()
            Clearing(batch)
            gc.set_threshold(threshold, 1, 1)
            tensors, schema = td.tree.flatten(batch)
            gc.set_threshold(*before)
            cleared += not batch
            back = td.tree.unflatten(schema, tensors)
            if not back:
                # It was cleared before the traversal began.
                assert not tensors
                continue
            whole += 1
            assert len(tensors) == 100 and torch.equal(tensors[99], torch.ones(2))
            assert [len(one) for one in back.values()] == [5] * 20 and back["key 7"][0]["b"] == [7]
    finally:
        gc.set_threshold(*before)
    assert cleared and whole


def test_threads_may_change_the_object() -> None:
    """The compiled traversal finds one of the states that it had."""
    tensors = [torch.full((2,), float(number)) for number in range(200)]
    others = [torch.full((2,), float(number)) for number in range(200)]
    batch: dict[str, Any] = {}

    def fill(length: int) -> None:
        batch["list"] = [[one] for one in tensors[:length]]
        batch["length"] = length

    fill(100)
    over = threading.Event()

    def change() -> None:
        while not over.is_set():
            for length in range(100, 200):
                batch["list"].append({"b": tensors[length]})
                batch[f"more {length}"] = others[length]
            batch.clear()
            fill(100)

    thread = threading.Thread(target=change)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        for _ in range(1000):
            found, schema = td.tree.flatten(batch)
            assert len(schema.layout.shapes) == len(found)
            back = td.tree.unflatten(schema, found)
            assert all(torch.equal(one[0], tensors[at]) for at, one in enumerate(back.get("list", [])[:100]))
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)


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
