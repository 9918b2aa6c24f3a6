"""Tensors of every dtype, geometry, layout and subclass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

# Those that torch can make a tensor of.
DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)
# Warnings of torch about such tensors.
QUIET = pytest.mark.filterwarnings(
    "ignore:.*(beta|prototype|invariant checks|deprecated|quantiz|experimental).*"
)
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
BYTES = torch.arange(256, dtype=torch.uint8)


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], first: int = 0) -> torch.Tensor:
    """A tensor of this dtype with bytes that say where they are, whatever they mean."""
    length = int(np.prod(shape)) * dtype.itemsize
    raw = BYTES.repeat(-(-(length + 64) // 256)).clone()
    if dtype is torch.bool:
        raw &= 1
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= size
    return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), first, shape, tuple(reversed(steps)))


def base(*shape: int) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).view(shape) + 0.5


def sparse() -> torch.Tensor:
    return torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, 4.0]])


def jagged() -> Any:
    return torch.nested.nested_tensor([base(2, 3), base(4, 3)], layout=torch.jagged)


class Image(torch.Tensor):
    """A subclass with an attribute, as torchvision's."""


class Scaled(torch.Tensor):
    """A subclass that is made of other tensors."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)  # type: ignore[attr-defined]

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values", "scale"], {"note": "n"}

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Scaled:
        assert context == {"note": "n"} and size == tuple(inner["values"].shape)
        return Scaled(inner["values"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].values, args[0].scale)
        return NotImplemented


def image() -> torch.Tensor:
    made = base(2, 3).as_subclass(Image)
    made.kind = "mask"
    return made


def parameter() -> torch.Tensor:
    made = torch.nn.Parameter(base(2, 3))
    made.sharded = True
    return made


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: base(2, 3),
    "part of a storage": lambda: base(4, 3)[1:3],
    "transposed": lambda: base(2, 3).t(),
    "permuted": lambda: base(2, 3, 4).permute(2, 0, 1),
    "channels last": lambda: base(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "with gaps": lambda: base(4, 6)[:, ::2],
    "with gaps, transposed": lambda: base(4, 6)[:, ::2].t(),
    "one column": lambda: base(4, 6)[:, 1],
    "expanded": lambda: base(1, 3).expand(5, 3),
    "expanded scalar": lambda: torch.tensor(2.0).expand(2, 3),
    "expanded with gaps": lambda: base(4, 6)[:, ::2].unsqueeze(1).expand(4, 7, 3),
    "windows": lambda: base(9).unfold(0, 3, 1),
    "empty with strides": lambda: base(4, 6)[:0, ::2],
    "no dimension": lambda: torch.tensor(3.0),
    "bool": lambda: torch.tensor([True, False]),
    "conjugate": lambda: torch.view_as_complex(base(3, 2)).conj(),
    "conjugate, transposed": lambda: torch.view_as_complex(base(3, 2, 2)).conj().t(),
    "negative": lambda: torch._neg_view(base(2, 3)),
    "negative integers": lambda: torch._neg_view(torch.arange(5)),
    "imaginary part of a conjugate": lambda: torch.view_as_complex(base(3, 2)).conj().imag,
    "gradient": lambda: base(2, 3).requires_grad_(),
    "gradient of a graph": lambda: base(2, 3).requires_grad_() * 2,
    "gradient, transposed": lambda: base(2, 3).t().requires_grad_(),
    "gradient, conjugate": lambda: torch.view_as_complex(base(3, 2)).conj().requires_grad_(),
    "parameter": parameter,
    "frozen parameter": lambda: torch.nn.Parameter(base(2), requires_grad=False),
    "integer parameter": lambda: torch.nn.Parameter(torch.arange(3), requires_grad=False),
    "buffer": lambda: torch.nn.Buffer(base(2)),
    "coo": lambda: sparse().to_sparse(),
    "coo, not coalesced": lambda: torch.sparse_coo_tensor(torch.tensor([[1, 1], [0, 0]]), base(2), (3, 2)),
    "coo, hybrid": lambda: torch.sparse_coo_tensor(torch.tensor([[1, 2]]), base(2, 3), (4, 3)),
    "coo, nothing": lambda: torch.sparse_coo_tensor(size=(2, 3)),
    "coo, gradient": lambda: sparse().to_sparse().requires_grad_(),
    "csr": lambda: sparse().to_sparse_csr(),
    "csc": lambda: sparse().to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "csr, int32, gradient": lambda: torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32), base(2), (2, 2)
    ).requires_grad_(),
    "meta": lambda: torch.empty(2, 3, device="meta").t(),
    "jagged": jagged,
    "jagged, gradient": lambda: jagged().detach().requires_grad_(),
    "subclass": image,
    "subclass, gradient": lambda: image().requires_grad_(),
    "in inference mode": lambda: torch.inference_mode()(lambda: base(2, 3))(),
}
