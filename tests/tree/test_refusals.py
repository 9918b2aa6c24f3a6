"""Objects that cannot be carried are refused by their path, and tensors that are not the schema's."""

from __future__ import annotations

import dataclasses
import threading
import types
from collections import UserDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError, NotPicklableError, TundishError


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Sample:
    mask: Any
    name: str = "s"


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    name: Any
    mask: Any


class OneWay:
    """An object that pickles and does not unpickle."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


class Unknown:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Cannot:
    def __reduce__(self) -> Any:
        raise ValueError("I stay here")


class NoParts(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


def local_class() -> Any:
    class Local(dict[str, Any]):
        pass

    return Local(a=torch.ones(2))


def freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def deep_unknown() -> Any:
    deep: Any = None
    for _ in range(100_000):
        deep = Unknown(deep=deep)
    return deep


LOCK = threading.Lock()

REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a lock": (lambda: LOCK, NotPicklableError, r"^batch cannot be sent between processes: .*lock"),
    "a function of a function": (
        lambda: {"pixel": [0, 1, 2, Sample(lambda: None)]},
        NotPicklableError,
        r'^batch\["pixel"\]\[3\]\.mask cannot be sent',
    ),
    "in a namedtuple": (lambda: [Pair(1, LOCK)], NotPicklableError, r"^batch\[0\]\.second cannot"),
    "in a namespace": (lambda: types.SimpleNamespace(a=LOCK), NotPicklableError, r"^batch\.a cannot"),
    "in a frozen dataclass with slots": (
        lambda: [Fixed(1, [LOCK])],
        NotPicklableError,
        r"^batch\[0\]\.mask\[0\] cannot",
    ),
    "in a userdict": (lambda: UserDict(a=[LOCK]), NotPicklableError, r'^batch\.data\["a"\]\[0\] cannot'),
    "in an unknown object": (
        lambda: {"x": [torch.ones(1), Unknown(a=1, b=Unknown(c=LOCK))]},
        NotPicklableError,
        r'^batch\["x"\]\[1\]\.b\.c cannot .*lock',
    ),
    "after other values": (
        lambda: {"x": [1, "a", 2.5, Unknown(), [3]], "y": (4, {5: LOCK})},
        NotPicklableError,
        r'^batch\["y"\]\[1\]\[5\] cannot',
    ),
    "a key": (lambda: {LOCK: 1}, NotPicklableError, r"^batch \(key lock\) cannot"),
    "a factory": (
        lambda: {"d": defaultdict(lambda: 1)},
        NotPicklableError,
        r'^batch\["d"\] cannot .*lambda',
    ),
    "what refuses itself": (lambda: [Cannot()], NotPicklableError, r"^batch\[0\] cannot .*I stay here"),
    "a generator": (lambda: [(one for one in [1])], NotPicklableError, r"^batch\[0\] cannot .*generator"),
    "a class that nobody finds": (
        lambda: {"rows": [torch.ones(2), [torch.ones(1)] * 5, local_class()]},
        NotPicklableError,
        r'^batch\["rows"\]\[2\] cannot .*Local',
    ),
    "a deep unknown object": (
        deep_unknown,
        NotPicklableError,
        r"^batch.* cannot be sent .*too deep to be pickled",
    ),
    "freed": (lambda: {"a": [torch.ones(1), freed()]}, InvalidTypeError, r'^batch\["a"\]\[1\] has no memory'),
    "strided nested": (
        lambda: [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])],
        InvalidTypeError,
        r"^batch\[0\] is a nested tensor of the strided layout: .*jagged",
    ),
    "quantized": (
        lambda: {"q": torch.quantize_per_tensor(torch.ones(2), 0.1, 3, torch.qint8)},
        InvalidTypeError,
        r'^batch\["q"\] is a quantized tensor: send its int_repr',
    ),
    "mkldnn": (
        lambda: {"m": torch.ones(2, 2).to_mkldnn()},
        InvalidTypeError,
        r'^batch\["m"\] is a tensor of .*mkldnn',
    ),
    "lazy": (
        lambda: (torch.nn.UninitializedParameter(),),
        InvalidTypeError,
        r"^batch\[0\] has no values yet",
    ),
    "a subclass that says nothing": (
        lambda: [NoParts(torch.ones(2))],
        InvalidTypeError,
        r"^batch\[0\] is a NoParts, whose parts no",
    ),
    "inside an unknown object": (
        lambda: {"u": Unknown(t=Unknown(m=torch.ones(2, 2).to_mkldnn()))},
        InvalidTypeError,
        r'^batch\["u"\]\.t\.m is a tensor of .*mkldnn',
    ),
    "under vmap": (
        lambda: torch.func.vmap(lambda one: td.tree.flatten({"v": one})[0][0])(torch.ones(2, 3)),
        InvalidTypeError,
        r'^batch\["v"\] is a tensor inside a transformation of torch\.func',
    ),
}


@pytest.mark.filterwarnings("ignore:.*(prototype|nested|quantized).*")
@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_path(case: str) -> None:
    make, kind, says = REFUSED[case]
    with pytest.raises(kind, match=says) as caught:
        td.tree.flatten(make())
    assert isinstance(caught.value, TundishError)


def test_a_dtensor_is_refused(tmp_path: Any) -> None:
    from torch.distributed.tensor import distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/join", rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        one = distribute_tensor(torch.ones(4), mesh)
        with pytest.raises(InvalidTypeError, match=r'^batch\["d"\] is a DTensor.*to_local'):
            td.tree.flatten({"d": one})
    finally:
        torch.distributed.destroy_process_group()


def test_the_tensors_have_to_be_those_of_the_schema() -> None:
    tensors, schema = td.tree.flatten({"a": torch.ones(2, 3), "b": torch.arange(4)})
    with pytest.raises(InvalidInputError, match="the schema is of 2 tensors, and tensors has 1: give"):
        td.tree.unflatten(schema, tensors[:1])
    with pytest.raises(
        InvalidInputError,
        match=r"tensors\[1\] is torch.float32 of shape \(4,\); the schema has torch.int64 of shape \(4,\)",
    ):
        td.tree.unflatten(schema, [tensors[0], tensors[1].float()])
    with pytest.raises(InvalidInputError, match=r"tensors\[0\] is torch.float32 of shape \(3, 2\)"):
        td.tree.unflatten(schema, [tensors[0].t(), tensors[1]])
    with pytest.raises(InvalidTypeError, match=r"tensors\[1\] is an int: give a tensor"):
        td.tree.unflatten(schema, [tensors[0], 4])  # type: ignore[list-item]
    with pytest.raises(InvalidTypeError, match="takes the schema that flatten returned, not a dict"):
        td.tree.unflatten({}, tensors)  # type: ignore[arg-type]


def test_an_object_that_cannot_be_made_again_is_an_error_of_the_library() -> None:
    tensors, schema = td.tree.flatten([torch.ones(2), OneWay()])
    with pytest.raises(
        NotPicklableError, match=r"cannot be unpickled in this process: ValueError: .*'no number'"
    ):
        td.tree.unflatten(schema, tensors)
