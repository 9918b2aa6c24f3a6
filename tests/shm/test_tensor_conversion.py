"""Shared arrays as tensors of torch, and tensors that are shared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tundish as td
from tundish.errors import InvalidTypeError
from tundish.shm import SharedArray

# Dtypes for which torch warns are left out.
DTYPES = {
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
    and not str(dtype).startswith(("torch.q", "torch.complex32", "torch.bcomplex32"))
}
ONLY_TORCH = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy()) if tensor.numel() else b""


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    values = torch.arange(tensor.nbytes) % 100
    return values.to(torch.uint8).view(dtype).reshape(shape) if tensor.nbytes else tensor


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
@pytest.mark.parametrize("shape", [(4, 6), (), (0,), (3, 0, 2)], ids=str)
def test_a_tensor_comes_back_in_dtype_shape_and_every_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = filled(shape, dtype)
    shared = SharedArray.from_array(tensor)
    with shared, SharedArray.attach(shared.handle) as attached:
        for one in (shared, attached):
            copy = one.tensor()
            assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
            assert bits(copy) == bits(tensor)


@pytest.mark.parametrize("dtype", ONLY_TORCH, ids=str)
def test_dtypes_that_numpy_lacks_come_back_through_tensor(dtype: torch.dtype) -> None:
    with SharedArray.from_array(filled((4, 2), dtype)) as shared:
        with pytest.raises(TypeError, match=r"ask for tensor\(\) instead of array") as caught:
            _ = shared.array
        assert isinstance(caught.value, td.TundishError)
        assert str(dtype).removeprefix("torch.") in repr(shared)
    with SharedArray.create((4, 2), dtype) as shared, SharedArray.attach(shared.handle) as attached:
        values = filled((4, 2), dtype)
        assert not any(bits(shared.tensor()))
        shared.tensor().copy_(values)
        assert bits(attached.tensor()) == bits(values)


def test_dtypes_that_torch_lacks_come_back_through_array() -> None:
    for dtype in ([("a", "i4")], "U3", ">f4", "longdouble"):
        with (
            SharedArray.create(3, dtype) as shared,
            pytest.raises(TypeError, match=r"ask for array instead of tensor\(\)") as caught,
        ):
            shared.tensor()
        assert isinstance(caught.value, td.TundishError)


def test_a_tensor_of_a_reader_is_its_own() -> None:
    with SharedArray.from_array(torch.arange(10)) as shared, SharedArray.attach(shared.handle) as attached:
        one, other = shared.tensor(), attached.tensor()
        one[0] = 5
        other[1] = 6
        assert shared.array.tolist() == list(range(10))
        assert (one.tolist()[:2], other.tolist()[:2]) == ([5, 1], [0, 6])


def test_the_default_device_of_a_script_changes_nothing() -> None:
    tensor = torch.arange(3.0)
    # A script sets it to "cuda"; any device but the host's will do.
    with torch.device("meta"), SharedArray.from_array(tensor) as shared:
        assert shared.array.dtype == np.float32
        assert shared.array.tolist() == [0, 1, 2]


def test_the_tensor_of_the_owner_is_the_shared_memory() -> None:
    with SharedArray.create((2, 3), torch.float32, order="F") as shared:
        tensor = shared.tensor()
        tensor[1, 2] = 4.5
        assert tensor.stride() == (1, 2)
        assert shared.array[1, 2] == 4.5
        assert SharedArray.attach(shared.handle).array[1, 2] == 4.5
    # It keeps the memory.
    assert tensor.sum() == 4.5


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(4, 6).t(),
        torch.arange(24.0).reshape(4, 6)[::2, 1::2],
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(3, requires_grad=True) * 2,
        torch.tensor([1 + 2j, 3j]).conj(),
        torch.tensor([1 + 2j, 3j]).conj().imag,
        torch.ones(()).expand(5, 2),
        torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).t(),
    ],
    ids=[
        "transposed",
        "cut",
        "parameter",
        "graph",
        "conjugated",
        "negated",
        "expanded",
        "transposed bfloat16",
    ],
)
def test_values_are_shared_however_the_tensor_has_them(tensor: torch.Tensor) -> None:
    with SharedArray.from_array(tensor) as shared:
        assert torch.equal(shared.tensor(), tensor.detach())


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.empty(2, device="meta"), "on meta cannot be shared: move it to the CPU"),
        (torch.eye(3).to_sparse(), "make it dense first"),
    ],
    ids=["meta", "sparse"],
)
def test_tensors_that_lie_elsewhere_are_refused(tensor: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says) as caught:
        SharedArray.from_array(tensor)
    assert isinstance(caught.value, td.TundishError)


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
def test_a_quantized_tensor_is_refused() -> None:
    tensor = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.qint8)
    with pytest.raises(InvalidTypeError, match=r"share tensor.int_repr\(\)"):
        SharedArray.from_array(tensor)


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4])
def test_memory_of_a_quantized_dtype_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(InvalidTypeError, match="with their scales"):
        SharedArray.create((4,), dtype)


def test_arrays_are_had_as_tensors_in_their_order() -> None:
    array = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    with SharedArray.from_array(array) as shared:
        tensor = shared.tensor()
        assert tensor.stride() == (1, 3)
        assert np.array_equal(tensor.numpy(), array)
