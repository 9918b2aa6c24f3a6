"""Tensors as items and results of a pool: their type and memory on arrival."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import support.shm.pool_tasks as tasks
import torch
from support.shm.leftovers import mapped

import tundish as td

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def lies_in_shared_memory(tensor: torch.Tensor) -> bool:
    ranges = (line.split()[0].split("-") for line in mapped())
    return any(int(start, 16) <= tensor.data_ptr() < int(end, 16) for start, end in ranges)


@pytest.fixture(scope="module")
def various() -> dict[str, Any]:
    base = torch.arange(120_000)
    tensors: dict[str, Any] = {str(dtype): (base % 2 + 1).to(dtype).reshape(300, 400) for dtype in DTYPES}
    tensors |= {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4, dtype=torch.int16),
        "slice": base[5:17],
        "transposed": base.reshape(300, 400).T,
        "channels last": torch.ones(2, 3, 100, 100).contiguous(memory_format=torch.channels_last),
        "broadcast": torch.ones(1).expand(100_000),
        "conjugated": torch.full((20_000,), 1 + 2j).conj(),
        "leaf": torch.ones(50_000, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(50_000)),
        "sparse": torch.eye(3).to_sparse(),
    }
    return tensors


# Each worker that is not forked imports torch anew.
@pytest.mark.parametrize(
    ("method", "way"), [("fork", "submit"), ("fork", "map"), ("fork", "chunks"), ("spawn", "submit")]
)
def test_tensors_arrive_as_they_were(method: str, way: str, various: dict[str, Any]) -> None:
    with td.shm.SharedPool(tasks.echo, max_workers=1, mp_context=method) as pool:
        if way == "submit":
            came = pool.submit(various).result(60)
        else:
            items = list(various.items())
            came = dict(pool.map(items, chunksize=1 if way == "map" else 4))
    assert came.keys() == various.keys()
    for name, tensor in various.items():
        again = came[name]
        assert (type(again), again.dtype, again.shape) == (type(tensor), tensor.dtype, tensor.shape), name
        assert again.requires_grad == tensor.requires_grad and again.layout == tensor.layout, name
        if tensor.layout is torch.strided:
            assert again.stride() == tensor.stride(), name
            assert bits(again.detach().resolve_conj()) == bits(tensor.detach().resolve_conj()), name


def test_attributes_of_a_tensor_come_along() -> None:
    tensor = torch.ones(50_000)
    tensor.origin = "here"  # type: ignore[attr-defined]
    with td.shm.SharedPool(tasks.echo, max_workers=1) as pool:
        assert pool.submit(tensor).result(20).origin == "here"


def test_large_tensors_lie_in_shared_memory_and_are_their_receivers_to_write() -> None:
    with td.shm.SharedPool(tasks.echo, max_workers=1) as pool:
        for dtype in (torch.float32, torch.bfloat16):
            given = torch.ones(100_000, dtype=dtype)
            came = pool.submit({"a": [given]}).result(20)["a"][0]
            assert lies_in_shared_memory(came) and not lies_in_shared_memory(given)
            came += 1
            assert came.sum() == 2 * given.sum()
        assert np.array_equal(pool.submit(np.ones(3)).result(20), np.ones(3))


class Marked(torch.Tensor):
    mark: str


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_gradients_and_attributes_of_a_bound_tensor_are_kept(method: str) -> None:
    quantized = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.qint8)
    marked = torch.ones(3).as_subclass(Marked)
    marked.mark = "m"
    shared = {"quantized": quantized, "marked": marked}
    with td.shm.SharedPool(tasks.more_than_values, shared, max_workers=1, mp_context=method) as pool:
        assert pool.submit(None).result() == (0.5, 1, [0.0, 1.0, 2.0, 3.0], "Marked", "m")
