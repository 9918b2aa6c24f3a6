"""`to_local()`: the tensor of a handle."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import tundish as td
from tundish.errors import ShardGoneError


def test_a_handle_keeps_no_tensor_that_it_fetched() -> None:
    td.rtensor.serve()
    handle = td.rtensor.remotize(torch.arange(3.0))
    tensor = handle.to_local()
    assert tensor.tolist() == [0, 1, 2] and handle.data.is_meta
    seen = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert seen() is None and handle.to_local().tolist() == [0, 1, 2]
    td.rtensor.clear_node()
    with pytest.raises(ShardGoneError):
        handle.to_local()


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (100_000,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_fetched_in_inference_mode_can_be_trained_with(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    handle = td.rtensor.remotize(torch.ones(shape, dtype=dtype))
    with torch.inference_mode():
        tensor = handle.to_local()
        assert tensor.sum().is_inference()
    weight = torch.ones(shape, dtype=dtype, requires_grad=True)
    (tensor * weight).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, tensor)
