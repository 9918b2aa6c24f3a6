"""Every kind of tensor comes back: dtypes, geometries, layouts, gradients, subclasses; and arrays."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tree.comparison import assert_same
from support.tree.echo_process import EchoProcess
from support.tree.sample_tensors import (
    DTYPES,
    QUANTIZED,
    QUIET,
    TENSORS,
    Image,
    Scaled,
    base,
    tensor_of,
)

import tundish as td


@QUIET
@pytest.mark.parametrize("dtype", [one for one in DTYPES if one not in QUANTIZED], ids=str)
def test_every_dtype(dtype: torch.dtype, echo: EchoProcess) -> None:
    obj = {
        "plain": tensor_of(dtype, (2, 3)),
        "inside": tensor_of(dtype, (2, 2), first=1),
        "scalar": tensor_of(dtype, ()),
        "empty": tensor_of(dtype, (0, 3)),
        "many": [tensor_of(dtype, (2,)) for _ in range(5)],
        "across": tensor_of(dtype, (2, 3)).t(),
        "repeated": tensor_of(dtype, (1, 3)).expand(4, 3),
    }
    tensors, schema = td.tree.flatten(obj)
    assert_same(obj, td.tree.unflatten(schema, tensors))
    assert_same(obj, echo.round_trip(obj))


@QUIET
@pytest.mark.parametrize("name", TENSORS)
def test_every_kind(name: str, echo: EchoProcess) -> None:
    tensor = TENSORS[name]()
    obj = {"tensor": tensor, "again": [tensor], "beside": base(2)}
    tensors, schema = td.tree.flatten(obj)
    for one in tensors:
        assert type(one) is torch.Tensor and one.layout is torch.strided and not one.requires_grad
        assert not one.is_conj() and not one.is_neg() and not one.is_quantized
    expected = {**obj, "tensor": leaf(tensor), "again": []}
    expected["again"].append(expected["tensor"])
    assert_same(expected, td.tree.unflatten(schema, tensors))
    assert_same(expected, echo.round_trip(obj))


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Without the graph that it came of, which stays where it is."""
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_()


class Silent(torch.Tensor):
    """A subclass that answers none of torch's functions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("do not ask me")


@pytest.mark.parametrize("wants_gradient", [False, True])
def test_overridden_functions_of_a_subclass_are_not_called(wants_gradient: bool, echo: EchoProcess) -> None:
    (back,) = echo.round_trip([base(2, 3).requires_grad_(wants_gradient).as_subclass(Silent)])
    assert type(back) is Silent
    with torch._C.DisableTorchFunctionSubclass():
        assert back.requires_grad == wants_gradient
        assert torch.equal(back.detach().as_subclass(torch.Tensor), base(2, 3))


class Boxes(torch.Tensor):
    """A subclass with attributes in slots, one of them a tensor."""

    __slots__ = ("anchors", "form")
    anchors: torch.Tensor
    form: str


class NamedWeight(torch.nn.Parameter):
    __slots__ = ("form",)
    form: str


def test_slots_of_a_subclass_come_back(echo: EchoProcess) -> None:
    boxes, weight = base(2, 4).as_subclass(Boxes), NamedWeight(base(2))
    boxes.anchors, boxes.form, weight.form = base(3), "xyxy", "weight"
    vars(boxes)["note"] = "n"
    tensors, _ = td.tree.flatten([boxes])
    assert len(tensors) == 2
    back, back_weight = echo.round_trip([boxes, weight])
    assert type(back) is Boxes and back.form == "xyxy" and vars(back) == {"note": "n"}
    assert torch.equal(back.anchors, base(3)) and back_weight.form == "weight"


def test_a_wrapper_comes_back_in_its_parts(echo: EchoProcess) -> None:
    obj = [Scaled(base(2, 3).to(torch.int8), torch.tensor(0.5))]
    back = echo.round_trip(obj)
    assert type(back[0]) is Scaled and back[0].values.dtype is torch.int8 and back[0].scale.item() == 0.5
    assert torch.equal(back[0].values, obj[0].values)


def test_strides_come_back_where_they_mean_something(echo: EchoProcess) -> None:
    for name in ("channels last", "transposed", "permuted", "expanded", "windows"):
        tensor = TENSORS[name]()
        tensors, _ = td.tree.flatten(tensor)
        assert tensors[0].numel() <= tensor.numel() and tensors[0].is_contiguous(), name
        assert tensors[0].untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr(), name
        assert echo.round_trip([tensor])[0].stride() == tensor.stride(), name
    (carried,), _ = td.tree.flatten(torch.zeros(1, 3).expand(1000, 3))
    assert carried.numel() == 3


def test_nothing_is_copied_that_can_be_read_where_it_is() -> None:
    one, part = base(2, 3), base(4, 3)[2:]
    tensors, schema = td.tree.flatten({"a": one, "b": [part]})
    assert tensors[0] is one and tensors[1] is part
    back = td.tree.unflatten(schema, tensors)
    assert back["a"] is one and back["b"][0] is part


def records() -> Any:
    return np.array([(1, 2.5, b"ab"), (3, 4.5, b"c")], dtype=[("a", "<i4"), ("b", "<f8"), ("c", "S3")])


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


def mapped(mode: Any) -> Any:
    """A part of a file, as of the tokens that a job trains on."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokens")
        np.arange(10_000, dtype=np.uint16).tofile(path)
        return np.memmap(path, np.uint16, mode)[100:5100]


SAME_CODES = "?bhilqBHILQefdgFDG"

ARRAYS: dict[str, Callable[[], Any]] = {
    **{code: lambda code=code: np.arange(6).astype(code).reshape(2, 3) for code in SAME_CODES},  # type: ignore[misc]
    "big-endian": lambda: np.arange(6, dtype=">i4").reshape(2, 3),
    "texts": lambda: np.array([["a", "bcd"], ["", "é"]]),
    "bytes": lambda: np.array([b"a", b"bcd"]),
    "dates": lambda: np.array(["2026-01-02", "NaT"], dtype="datetime64[D]"),
    "spans": lambda: np.array([1, 2], dtype="timedelta64[ns]"),
    "records": records,
    "a column of records": lambda: records()["b"],
    "packed column": lambda: np.zeros(3, dtype=[("x", "i1"), ("y", "<i8")])["y"],
    "objects": lambda: np.array([1, "two", None], dtype=object),
    "no dimension": lambda: np.array(3.5),
    "no dimension, text": lambda: np.array("abc"),
    "empty": lambda: np.zeros((0, 3), dtype=np.int16),
    "empty texts": lambda: np.zeros((0,), dtype="U4"),
    "no bytes": lambda: np.zeros(2, dtype="V0"),
    "Fortran order": lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "backwards": lambda: np.arange(6)[::-1],
    "every second": lambda: np.arange(6)[::2],
    "broadcast": lambda: np.broadcast_to(np.arange(3), (2, 3)),
    "a part of a file": lambda: mapped("c"),
    "a part of a file that is read": lambda: mapped("r"),
    "matrix": lambda: np.arange(4).reshape(2, 2).view(np.matrix),
    "records as attributes": lambda: records().view(np.recarray),
    "masked": lambda: np.ma.masked_array([1, 2, 3], [True, False, True]),  # type: ignore[no-untyped-call]
    "read-only": lambda: read_only(np.arange(6)),
    "read-only dates": lambda: read_only(np.array(["2026-01-02"], dtype="datetime64[D]")),
    "strings": lambda: np.array(["a", "b" * 100], dtype=np.dtypes.StringDType()),
    "annotated": lambda: np.zeros(2, dtype=np.dtype("f4", metadata={"unit": "m"})),
    "scalar": lambda: np.float32(2.5),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_every_array(name: str, echo: EchoProcess) -> None:
    array = ARRAYS[name]()
    obj = {"array": array, "again": [array]} if isinstance(array, np.ndarray) else [array]
    before = array.copy()
    tensors, schema = td.tree.flatten(obj)
    assert_same(obj, td.tree.unflatten(schema, [tensor.clone() for tensor in tensors]))
    assert_same(obj, echo.round_trip(obj))
    assert_same(before, array.copy())


LONG = 100_000
LARGE: dict[str, Callable[[], Any]] = {
    "gradient": lambda: torch.ones(LONG).requires_grad_(),
    "parameter": lambda: torch.nn.Parameter(torch.ones(LONG)),
    "subclass": lambda: torch.ones(LONG).as_subclass(Image),
    "conjugate": lambda: torch.ones(LONG, dtype=torch.complex64).conj(),
    "wrapper": lambda: Scaled(torch.ones(LONG), torch.tensor(0.5)),
    "coo": lambda: torch.ones(LONG).to_sparse(),
    "csr": lambda: torch.ones(1, LONG).to_sparse_csr(),
    "jagged": lambda: torch.nested.nested_tensor([base(2, LONG), base(4, LONG)], layout=torch.jagged),
    "meta": lambda: torch.empty(LONG, device="meta"),
    "array": lambda: np.zeros(LONG),
    "backwards": lambda: np.zeros(LONG)[::-1],
    "big-endian": lambda: np.zeros(LONG, ">f4"),
    "records": lambda: np.zeros(LONG, dtype=[("a", "<i4"), ("b", "<f8")]),
    "texts": lambda: np.full(LONG, "abc"),
    "read-only": lambda: read_only(np.zeros(LONG)),
    "a part of a file": lambda: mapped("c"),
    "a part of a file that is read": lambda: mapped("r"),
    "module": lambda: torch.nn.Linear(LONG, 1),
}


@QUIET
@pytest.mark.parametrize("name", LARGE)
def test_no_bytes_of_a_tensor_are_in_the_schema(name: str) -> None:
    value = LARGE[name]()
    for obj in (value, {"list": [value]}, Unknown(value)):
        assert len(pickle.dumps(td.tree.flatten(obj)[1])) < 3000


def test_of_a_mapped_file_only_what_is_named_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    np.zeros(40_000_000, np.uint8).tofile(path)
    tokens = np.memmap(path, np.uint8, "c")
    tensors, schema = td.tree.flatten([tokens[1000:1015], tokens[1005:1020], tokens[-1:]])
    assert sum(tensor.nbytes for tensor in tensors) == 21 == sum(schema.layout.sizes)


class Unknown:
    def __init__(self, inside: Any) -> None:
        self.inside = inside


@QUIET
def test_the_default_device_is_not_where_tensors_come_back() -> None:
    made = {name: make() for name, make in TENSORS.items() if name not in ("meta", "in inference mode")}
    tensors, schema = td.tree.flatten(made)
    with torch.device("meta"):
        back = td.tree.unflatten(schema, tensors)
    for name, tensor in back.items():
        assert tensor.device.type == "cpu", name


def test_an_array_is_read_where_it_is() -> None:
    array = np.arange(10)
    tensors, schema = td.tree.flatten([array])
    assert tensors[0].data_ptr() == array.ctypes.data
    assert td.tree.unflatten(schema, tensors)[0].ctypes.data == array.ctypes.data
