"""Objects come back as pickle brings them back: with types, attributes, factories, order, here and elsewhere."""

from __future__ import annotations

import copyreg
import dataclasses
import datetime
import enum
import pickle
import threading
import types
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.tree.comparison import assert_same
from support.tree.echo_process import EchoProcess
from torch.nn.utils.rnn import pack_sequence

import tundish as td


def numbers(count: int = 3) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 0.5


class Pair(NamedTuple):
    first: Any
    second: Any


class Single(NamedTuple):
    only: Any


class NotedPair(Pair):
    """A namedtuple with attributes beside its fields."""


class Row(list[Any]):
    pass


class Marked(tuple[Any, ...]):
    """A tuple with attributes."""


class Batch(dict[str, Any]):
    pass


class Ordered(OrderedDict[str, Any]):
    pass


class Groups(defaultdict[str, Any]):
    pass


class StepCounts(Counter[str]):
    pass


class Wrapped(UserDict[str, Any]):
    pass


class Guarded(dict[str, Any]):
    """A dict whose state leaves out its lock."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lock = threading.Lock()
        self.name = "guarded"

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.lock = threading.Lock()
        self.name = state["name"]


@dataclasses.dataclass
class Sample:
    tokens: torch.Tensor
    name: str = ""
    length: int = dataclasses.field(default=0, init=False)


@dataclasses.dataclass(frozen=True)
class Frozen:
    tokens: torch.Tensor
    parts: tuple[Any, ...] = ()


@dataclasses.dataclass(slots=True)
class Slotted:
    tokens: torch.Tensor
    name: str = "s"


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    tokens: torch.Tensor
    name: str = "fs"


@dataclasses.dataclass
class Deeper(Sample):
    more: dict[str, Any] = dataclasses.field(default_factory=dict)


class Task(enum.Enum):
    CAPTION = "caption"


class Unknown:
    """Nothing that anybody registered."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Reduced:
    """A class that says by `__reduce__` how it is taken apart, and another by `copyreg`."""

    def __init__(self, tensors: list[torch.Tensor], note: Any) -> None:
        self.tensors, self.note, self.lock = tensors, note, threading.Lock()

    def __reduce__(self) -> Any:
        return type(self), (self.tensors, self.note)


class CopyRegistered:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.lock = tensor, threading.Lock()


copyreg.pickle(CopyRegistered, lambda one: (CopyRegistered, (one.tensor,)))


def with_attributes(obj: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(obj, name, value)
    return obj


def sample(kind: Callable[..., Any] = Sample) -> Any:
    made = kind(numbers(4), "one")
    made.length = 7
    return made


OBJECTS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "a tensor": numbers,
    "a number": lambda: 7,
    "nothing": dict,
    "dict": lambda: {"b": numbers(), "a": numbers(2), 3: numbers(1)},
    "dict of other keys": lambda: {(1, "a"): numbers(), True: 1, None: 2, 1.5: 3, Task.CAPTION: numbers(2)},
    "dict in an order": lambda: {"z": 1, "a": numbers(), "m": 2},
    "dict subclass": lambda: with_attributes(Batch(a=numbers()), note="n", extra=numbers()),
    "ordered": lambda: OrderedDict(z=numbers(), a=1),
    "ordered, attributes": lambda: with_attributes(Ordered(z=numbers(), a=1), note=numbers(2)),
    "defaultdict": lambda: defaultdict(list, {"a": [numbers()]}),
    "defaultdict without factory": lambda: defaultdict(None, {"a": numbers()}),
    "defaultdict subclass": lambda: Groups(dict, {"a": numbers()}),
    "counter": lambda: Counter("banana"),
    "counter subclass": lambda: StepCounts("banana"),
    "dict that chooses its state": lambda: {"guarded": [Guarded({"a": numbers()})]}["guarded"][0].name,
    "userdict": lambda: with_attributes(Wrapped(a=numbers(), b=[1]), note="n"),
    "userlist": lambda: UserList([numbers(), 1]),
    "list": lambda: [numbers(), [numbers(2), []], ()],
    "list subclass": lambda: Row([numbers(), 1]),
    "list subclass, attributes": lambda: with_attributes(Row([numbers()]), note=[numbers(2)]),
    "long list of numbers": lambda: {"ids": list(range(300)), "floats": [0.1, -0.0, float("inf")] * 20},
    "tuple": lambda: (numbers(), (), (1,)),
    "tuple subclass": lambda: with_attributes(Marked([numbers(), 1]), mark="here"),
    "namedtuple": lambda: Pair(numbers(), [1, numbers(2)]),
    "namedtuple of one": lambda: Single(numbers()),
    "namedtuple, attributes": lambda: with_attributes(NotedPair(numbers(), 2), note=numbers(2)),
    "torch's result": lambda: torch.max(torch.arange(6.0).view(2, 3), 1),
    "size": lambda: torch.Size([2, 3]),
    "deque": lambda: deque([numbers(), 1], maxlen=5),
    "dataclass": sample,
    "dataclass of a dataclass": lambda: with_attributes(sample(Deeper), more={"x": numbers(2)}),
    "frozen": lambda: Frozen(numbers(), (numbers(2), 1)),
    "slots": lambda: Slotted(numbers()),
    "frozen slots": lambda: FrozenSlotted(numbers()),
    "namespace": lambda: types.SimpleNamespace(a=numbers(), b=types.SimpleNamespace(c=None)),
    "packed sequence": lambda: pack_sequence([numbers(4), numbers(2)]),
    "values": lambda: [1, 2**70, True, 1.5, -0.0, float("inf"), 1j, "text\ud800", b"bytes", "", b""],
    "constants": lambda: [torch.float16, torch.strided, dict, Task.CAPTION, torch.device("cpu")],
    "unknown": lambda: Unknown(name="u", tensors=[numbers()], deeper=Unknown(t=numbers(2))),
    "unknown in containers": lambda: {
        "a": [Unknown(t=numbers())],
        "set": {1, "a"},
        "date": datetime.date(2026, 1, 2),
    },
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_come_back(name: str, echo: EchoProcess) -> None:
    obj = OBJECTS[name]()
    tensors, schema = td.tree.flatten(obj)
    assert all(type(tensor) is torch.Tensor for tensor in tensors)
    assert_same(obj, td.tree.unflatten(schema, tensors))
    again = pickle.loads(pickle.dumps(schema))
    assert again == schema and hash(again) == hash(schema)
    assert_same(obj, td.tree.unflatten(again, [tensor.clone() for tensor in tensors]))
    assert_same(obj, echo.round_trip(obj))


def test_a_class_says_how_it_is_taken_apart(echo: EchoProcess) -> None:
    obj = {
        "reduce": Reduced([numbers(), numbers(2)], {"k": [1, numbers(1)]}),
        "copyreg": CopyRegistered(numbers()),
    }
    assert len(td.tree.flatten(obj)[0]) == 4
    back = echo.round_trip(obj)
    assert type(back["reduce"]) is Reduced and type(back["copyreg"]) is CopyRegistered
    assert_same([obj["reduce"].tensors, obj["reduce"].note], [back["reduce"].tensors, back["reduce"].note])
    assert torch.equal(back["copyreg"].tensor, numbers())


def test_a_container_may_contain_itself(echo: EchoProcess) -> None:
    obj: dict[str, Any] = {"tensor": numbers(), "list": []}
    obj["list"].append({"again": obj})
    back = echo.round_trip(obj)
    assert back["list"][0]["again"] is back and torch.equal(back["tensor"], numbers())


def test_a_type_chooses_its_state(echo: EchoProcess) -> None:
    back = echo.round_trip({"guarded": Guarded({"a": numbers()})})["guarded"]
    assert type(back) is Guarded and back.name == "guarded" and torch.equal(back["a"], numbers())
    assert back.lock.acquire(blocking=False)


def test_arrays_stay_in_host_memory() -> None:
    dates = np.zeros(2, dtype="M8[D]")
    tensors, schema = td.tree.flatten({"a": numbers(), "array": numbers().numpy(), "dates": dates})
    assert schema.layout.host_only_tensors == {1, 2}
    # A device without memory shows which tensors are read.
    moved = [t if n in schema.layout.host_only_tensors else t.to("meta") for n, t in enumerate(tensors)]
    back = td.tree.unflatten(schema, moved)
    assert back["a"].is_meta and back["array"].tolist() == numbers().tolist()


def test_a_tensor_goes_to_a_device_though_an_array_has_its_memory() -> None:
    one = numbers(4)
    for obj in (
        {"tensor": one, "array": one.numpy()},
        {"tensor": one[1:], "array": one.numpy()[:3]},
        {"array": one.numpy(), "rows": [*numbers(8).unbind(), one]},
    ):
        assert not td.tree.flatten(obj)[1].layout.host_only_tensors


def test_mutable_containers_are_new_objects() -> None:
    tensors, schema = td.tree.flatten({"list": [1, 2], "long": list(range(100)), "t": numbers()})
    first, second = td.tree.unflatten(schema, tensors), td.tree.unflatten(schema, tensors)
    first["list"].append(3)
    first["long"].append(3)
    assert second == {"list": [1, 2], "long": list(range(100)), "t": second["t"]}
    assert second["t"] is tensors[0]


class Unshown:
    def __repr__(self) -> str:
        raise RuntimeError("it has no text")


# Of Python's numbers it shows none of so many digits.
@pytest.mark.parametrize("key", [(Unshown(), 1), 10**5000], ids=["object", "number"])
def test_keys_that_cannot_be_shown_are_carried(key: Any) -> None:
    tensors, schema = td.tree.flatten(OrderedDict({key: numbers(), "last": 1}))
    back = td.tree.unflatten(schema, tensors)
    (shown, value), last = back.items()
    assert type(shown) is type(key) and last == ("last", 1)
    assert torch.equal(value, numbers())


class Compared(type):
    def __eq__(cls, other: object) -> bool:
        return isinstance(other, Compared)

    __hash__ = type.__hash__


class OfCompared(metaclass=Compared):
    pass


@pytest.mark.parametrize("kind", [Unknown, Task, OfCompared])
def test_a_class_is_a_name_whatever_its_metaclass(kind: type, echo: EchoProcess) -> None:
    obj = {"kind": kind, "again": [kind, torch.ones(2)]}
    back = echo.round_trip(obj)
    assert back["kind"] is kind and back["again"][0] is kind
