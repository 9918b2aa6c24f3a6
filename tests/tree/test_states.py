"""Objects with their own state and items are rebuilt as pickle does it, here and in another process."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest
from support.tree.echo_process import EchoProcess

import tundish as td


def with_attributes(obj: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(obj, name, value)
    return obj


class Relocked:
    """Makes a new lock from an empty state."""

    lock: Any

    def __getstate__(self) -> Any:
        return {}

    def __setstate__(self, state: Any) -> None:
        assert state == {}
        self.lock = threading.Lock()


class RelockedDict(Relocked, dict[str, Any]):
    pass


class RelockedList(Relocked, list[Any]):
    pass


class RelockedTuple(Relocked, tuple[Any, ...]):
    pass


class ArrayState(dict[str, Any]):
    """Its state is neither true nor false."""

    values: Any

    def __getstate__(self) -> Any:
        return self.values

    def __setstate__(self, state: Any) -> None:
        self.values = state


@dataclasses.dataclass
class Restored:
    def __setstate__(self, state: Any) -> None:
        vars(self).update(state)


@pytest.mark.parametrize(
    "obj",
    [RelockedDict(a=1), RelockedList([1]), RelockedTuple([1])],
    ids=["dict", "list", "tuple"],
)
def test_an_empty_state_is_given_back_as_any_other(obj: Any, echo: EchoProcess) -> None:
    back = echo.round_trip([with_attributes(obj, lock=threading.Lock())])[0]
    assert type(back) is type(obj) and back == obj
    assert back.lock.acquire(blocking=False)


def test_a_state_may_be_an_array(echo: EchoProcess) -> None:
    back = echo.round_trip([with_attributes(ArrayState(a=1), values=np.arange(3))])[0]
    assert back == {"a": 1} and back.values.tolist() == [0, 1, 2]


class Sealed(list[Any]):
    """It takes several at once alone, which is how pickle gives items back."""

    def append(self, _: Any) -> None:
        raise TypeError("it is sealed")

    def __reduce__(self) -> Any:
        return Sealed, (), None, iter(list(self))


class Appended:
    """It takes one after the other alone."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def append(self, item: Any) -> None:
        self.items.append(item)


class AppendedTuple(tuple[Any, ...]):
    """A container that comes back as something else."""

    def __reduce__(self) -> Any:
        return Appended, (), None, iter(self)


def test_items_are_given_back_as_pickle_gives_them(echo: EchoProcess) -> None:
    assert echo.round_trip([Sealed([1, 2])])[0] == [1, 2]
    tensors, schema = td.tree.flatten([AppendedTuple([1, 2])])
    assert td.tree.unflatten(schema, tensors)[0].items == [1, 2]


def test_an_object_without_state_gets_none(echo: EchoProcess) -> None:
    assert echo.round_trip([Restored(), with_attributes(Restored(), a=1)])[1].a == 1
