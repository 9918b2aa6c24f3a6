"""Containers come back with their types, attributes, factories and order, here and in another process."""

from __future__ import annotations

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
from torch.utils import _pytree

import tundish as td
from tundish.errors import InvalidTypeError


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


class Attributes(dict[str, Any]):
    """A dict whose items are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


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


class Addict(dict[str, Any]):
    """Pickles as the dicts of addict and the configurations of mmengine do."""

    def __init__(self, *args: Any, **items: Any) -> None:
        super().__init__(*args, **items)
        object.__setattr__(self, "__parent", None)

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):
            raise AttributeError(name)
        self[name] = value

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self.items())

    def __getstate__(self) -> Any:
        return self

    def __setstate__(self, state: Any) -> None:
        self.update(state)


class Counted(dict[str, Any]):
    """A dict that gives itself for its state, and counts the items that it takes back."""

    count = 0

    def __getstate__(self) -> Any:
        return self

    def __setstate__(self, state: Any) -> None:
        self.count = len(state)


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


class Registered:
    def __init__(self, tensors: list[torch.Tensor], note: Any) -> None:
        self.tensors = tensors
        self.note = note


class Setting:
    """A constant of torch's pytree."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Setting) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


class Node:
    def __init__(self, left: Any, right: Any, name: str) -> None:
        self.left, self.right, self.name = left, right, name


td.tree.register(
    Registered,
    lambda one: (one.tensors, {"note": one.note}),
    lambda parts, context: Registered(parts, context["note"]),
)
_pytree.register_constant(Setting)
_pytree.register_pytree_node(
    Node, lambda node: ([node.left, node.right], node.name), lambda parts, name: Node(*parts, name)
)


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
    "registered": lambda: Registered([numbers(), numbers(2)], {"k": [1, numbers(1)]}),
    "constant of torch's": lambda: {"x": numbers(), "setting": Setting("s")},
    "registered with torch": lambda: Node(numbers(), [Node(1, None, "b")], "a"),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_come_back(name: str, echo: EchoProcess) -> None:
    obj = OBJECTS[name]()
    tensors, schema = td.tree.flatten(obj)
    assert all(type(tensor) is torch.Tensor for tensor in tensors)
    assert_same(obj, td.tree.unflatten(schema, tensors))
    again = pickle.loads(pickle.dumps(schema))
    assert again == schema and hash(again) == hash(schema)
    back = td.tree.unflatten(again, [tensor.clone() for tensor in tensors])
    assert_same(obj, back)
    # And it can be taken apart again.
    assert td.tree.flatten(back)[1] == schema or schema.pickles
    assert_same(obj, echo.round_trip(obj))


def test_a_type_chooses_its_state(echo: EchoProcess) -> None:
    back = echo.round_trip({"guarded": Guarded({"a": numbers()})})["guarded"]
    assert type(back) is Guarded and back.name == "guarded" and torch.equal(back["a"], numbers())
    assert back.lock.acquire(blocking=False)


@pytest.mark.parametrize(
    "name", [name for name in OBJECTS if name.startswith(("userdict", "unknown", "registered"))]
)
def test_no_tensor_is_in_the_schema(name: str) -> None:
    def size(count: int) -> int:
        obj = {
            "x": OBJECTS[name](),
            "more": Unknown(t=torch.zeros(count)),
            "wrapped": Wrapped(t=torch.ones(count)),
        }
        return len(pickle.dumps(td.tree.flatten(obj)[1]))

    assert size(100_000) - size(10) < 100


def test_arrays_stay_in_host_memory() -> None:
    dates = np.zeros(2, dtype="M8[D]")
    tensors, schema = td.tree.flatten({"a": numbers(), "array": numbers().numpy(), "dates": dates})
    assert schema.host_only_tensors == {1, 2}
    # A device without memory shows which tensors are read.
    moved = [t if n in schema.host_only_tensors else t.to("meta") for n, t in enumerate(tensors)]
    back = td.tree.unflatten(schema, moved)
    assert back["a"].is_meta and back["array"].tolist() == numbers().tolist()


def test_a_tensor_goes_to_a_device_though_an_array_has_its_memory() -> None:
    one = numbers(4)
    for obj in (
        {"tensor": one, "array": one.numpy()},
        {"tensor": one[1:], "array": one.numpy()[:3]},
        {"array": one.numpy(), "rows": [*numbers(8).unbind(), one]},
    ):
        assert not td.tree.flatten(obj)[1].host_only_tensors


def test_deep_objects_need_no_stack(echo: EchoProcess) -> None:
    deep: Any = numbers()
    for level in range(20_000):
        deep = ({"in": deep}, [deep], (deep,), Single(deep))[level % 4]
    tensors, schema = td.tree.flatten(deep)
    assert len(tensors) == 1
    back = td.tree.unflatten(pickle.loads(pickle.dumps(schema)), tensors)
    for level in reversed(range(20_000)):
        assert type(back) is (dict, list, tuple, Single)[level % 4]
        back = back["in"] if level % 4 == 0 else back[0]
    assert back is tensors[0]


def test_a_dict_whose_items_are_its_attributes(echo: EchoProcess) -> None:
    back = echo.round_trip([Attributes(ids=numbers(), inner=Attributes(name="n"))])[0]
    assert type(back) is type(back.inner) is Attributes
    assert torch.equal(back.ids, numbers()) and back.inner.name == "n"
    back.more = 1
    assert back["more"] == 1


def test_a_dict_that_gives_itself_for_its_state_takes_itself_back(echo: EchoProcess) -> None:
    back = echo.round_trip([Counted(a=numbers(), b=None)])[0]
    assert type(back) is Counted and back.count == 2 and vars(back) is not back
    back = echo.round_trip({"addict": Addict(a=numbers(), inner=[Addict(n="n")])})["addict"]
    assert type(back) is type(back.inner[0]) is Addict and "__parent" not in vars(back)
    assert torch.equal(back.a, numbers()) and back.inner[0].n == "n"


def test_mutable_containers_are_new_objects() -> None:
    tensors, schema = td.tree.flatten({"list": [1, 2], "long": list(range(100)), "t": numbers()})
    first, second = td.tree.unflatten(schema, tensors), td.tree.unflatten(schema, tensors)
    first["list"].append(3)
    first["long"].append(3)
    assert second == {"list": [1, 2], "long": list(range(100)), "t": second["t"]}
    assert second["t"] is tensors[0]


def test_a_type_registered_later_is_known_from_then_on() -> None:
    class Late:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    with pytest.raises(TypeError, match="Late"):
        td.tree.flatten(Late(numbers()))
    td.tree.register(Late, lambda late: ([late.tensor], None), lambda parts, _: Late(*parts))
    with pytest.raises(TypeError, match=r"batch.*Late"):
        # Another process does not find a class that is local to a function.
        td.tree.flatten([Late(numbers())])


@pytest.mark.parametrize("kind", [dict, list, tuple, int, type(None), torch.Tensor, torch.nn.Parameter])
def test_builtin_types_cannot_be_registered(kind: type) -> None:
    with pytest.raises(InvalidTypeError, match="cannot be registered"):
        td.tree.register(kind, lambda one: ([], one), lambda parts, one: one)


def test_register_takes_a_class_and_two_functions() -> None:
    with pytest.raises(InvalidTypeError, match="takes a class, not 'Node'"):
        td.tree.register("Node", repr, repr)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="two functions"):
        td.tree.register(Unknown, None, repr)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(("kind", "pickled"), [(Unknown, False), (Task, True), (OfCompared, True)])
def test_a_class_is_a_name_whatever_its_metaclass(kind: type, pickled: bool, echo: EchoProcess) -> None:
    obj = {"kind": kind, "again": [kind, torch.ones(2)]}
    _, schema = td.tree.flatten(obj)
    assert bool(schema.pickles) is pickled
    back = echo.round_trip(obj)
    assert back["kind"] is kind and back["again"][0] is kind
