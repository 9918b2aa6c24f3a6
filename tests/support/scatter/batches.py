"""Batches of every kind, the same on every rank, and a comparison of two batches.

The comparison shares no code with `tundish.tree`.
"""

from __future__ import annotations

import dataclasses
import types
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from transformers import BatchEncoding, BatchFeature
from transformers.modeling_outputs import CausalLMOutput

QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}

Pair = namedtuple("Pair", "left right")
One = namedtuple("One", "only")


class Named(OrderedDict[str, Any]):
    """A dict with an attribute."""


class Rows(list[Any]):
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    tokens: Tensor
    name: str


class Opaque:
    """A class that no library knows."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Span:
    """A class that says how it is pickled."""

    def __init__(self, tokens: Any, name: Any) -> None:
        self.tokens, self.name = tokens, name

    def __reduce__(self) -> Any:
        return Span, (self.tokens, self.name)


class EndsIteration:
    """Raises StopIteration where it is flattened, or else where it is rebuilt."""

    def __init__(self, *, when_flattened: bool) -> None:
        self.when_flattened = when_flattened

    def __reduce__(self) -> Any:
        return _first_of, (_first_of([]) if self.when_flattened else [],)


def _first_of(items: list[Any]) -> Any:
    return next(iter(items))


def _ramp(seed: int, *shape: int) -> Tensor:
    count = int(np.prod(shape))
    return (torch.arange(count, dtype=torch.float32) + seed).view(shape)


def text(seed: int) -> Any:
    return {
        name: torch.full((8, 512), seed, dtype=torch.int64) for name in ("input_ids", "labels", "mask", "ids")
    }


def vlm(seed: int) -> Any:
    return {
        "pixel": _ramp(seed, 3, 700, 700),
        **{f"small {i}": torch.full((i,), seed + i) for i in range(40)},
    }


def many(seed: int) -> Any:
    return [torch.full((256,), float(seed + i)) for i in range(500)]


def dtypes(seed: int) -> Any:
    names = (
        "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128 complex32"
    )
    wide = "uint16 uint32 uint64 float8_e4m3fn float8_e5m2"
    values = torch.arange(24) % 7 + seed % 5
    return {
        **{name: values.to(getattr(torch, name)).view(4, 6) for name in names.split()},
        **{name: values.to(getattr(torch, name)) for name in wide.split()},
    }


def containers(seed: int) -> Any:
    named = Named(a=_ramp(seed, 3))
    named.note = "kept"  # type: ignore[attr-defined]
    counts = defaultdict(list, x=[_ramp(seed, 2)])
    return {
        "named": named,
        "default": counts,
        "counter": Counter("tundish"),
        "output": CausalLMOutput(logits=_ramp(seed, 2, 3)),
        "encoding": BatchEncoding({"input_ids": torch.full((2, 3), seed)}),
        "feature": BatchFeature({"pixel_values": _ramp(seed, 2, 2)}),
        "user": UserDict(a=_ramp(seed, 1)),
        "pair": Pair(_ramp(seed, 2), One(_ramp(seed, 1))),
        "rows": Rows([_ramp(seed, 2), None]),
        "queue": deque([_ramp(seed, 2)], maxlen=4),
        "sample": Sample(_ramp(seed, 4), f"number {seed}"),
        "space": types.SimpleNamespace(x=_ramp(seed, 2), y=3),
        "packed": pack_padded_sequence(_ramp(seed, 3, 2, 4), [3, 1]),
        "opaque": Opaque(_ramp(seed, 3)),
        "arrays": [np.arange(6.0).reshape(2, 3) + seed, np.array(["a", "bc"]), np.float32(seed)],
        (1, "key"): (None, True, seed, "text", b"bytes", 2**80, float("inf")),
    }


def tensors(seed: int) -> Any:
    base = _ramp(seed, 6, 5)
    sparse = torch.sparse_coo_tensor([[0, 2], [1, 0]], [1.0, seed], (3, 3)).coalesce()
    return [
        torch.tensor(seed),
        torch.empty(0, 3),
        base.t(),
        base[::2, 1:3],
        torch.tensor([1.0 + seed]).expand(4, 4),
        torch.view_as_complex(_ramp(seed, 3, 2)).conj(),
        torch._neg_view(_ramp(seed, 3)),
        sparse,
        sparse.to_sparse_csr(),
        _ramp(seed, 3).requires_grad_(),
        torch.nn.Parameter(_ramp(seed, 2)),
    ]


def reduced(seed: int) -> Any:
    return [
        Span({"x": _ramp(seed, 3)}, f"number {seed}"),
        Opaque(_ramp(seed, 2)),
        [Span(_ramp(seed, 1), None)],
    ]


def sharing(seed: int) -> Any:
    rows = _ramp(seed, 4, 3)
    return {"all": rows, "again": rows, "first": rows[0]}


def one(seed: int) -> Any:
    """One value of a larger tensor, which torch calls contiguous."""
    return _ramp(seed, 1, 2)[:, 1]


def nothing(seed: int) -> Any:
    return {"no tensors": [], "at": seed}


def gaps(seed: int) -> Any:
    """Tensors with gaps between their values, of every dtype that has values."""
    found = {one for one in vars(torch).values() if isinstance(one, torch.dtype)} - QUANTIZED
    return {str(dtype): _with_gaps(dtype, seed) for dtype in sorted(found, key=str)}


def _with_gaps(dtype: torch.dtype, seed: int) -> Tensor:
    raw = torch.full((64 * dtype.itemsize,), seed % 2, dtype=torch.uint8)
    return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, (4, 4), (8, 2))


KINDS: dict[str, Callable[[int], Any]] = {
    kind.__name__: kind
    for kind in (text, vlm, many, dtypes, containers, tensors, gaps, reduced, sharing, one, nothing)
}


def same(one: Any, other: Any) -> bool:
    """Whether both have the same types and values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return _same_tensors(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, (dict, UserDict)):
        return (
            list(one) == list(other)
            and all(same(one[key], other[key]) for key in one)
            and getattr(one, "default_factory", None) == getattr(other, "default_factory", None)
            # Batches of transformers pickle some of their attributes only.
            and (isinstance(one, UserDict) or _attributes(one).keys() == _attributes(other).keys())
        )
    if isinstance(one, PackedSequence):
        return all(same(a, b) for a, b in zip(tuple(one), tuple(other), strict=True))
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if dataclasses.is_dataclass(one):
        return all(
            same(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one)
        )
    if isinstance(one, (Opaque, Span, types.SimpleNamespace)):
        return same(vars(one), vars(other))
    return bool(one == other)


def _attributes(one: Any) -> dict[str, Any]:
    return getattr(one, "__dict__", {})


def _same_tensors(one: Tensor, other: Tensor) -> bool:
    facts = "dtype", "shape", "layout", "requires_grad", "is_leaf", "device"
    if any(getattr(one, fact) != getattr(other, fact) for fact in facts):
        return False
    if (one.is_conj(), one.is_neg()) != (other.is_conj(), other.is_neg()):
        return False
    with torch.no_grad():
        one, other = one.detach().resolve_conj().resolve_neg(), other.detach().resolve_conj().resolve_neg()
        if one.layout is not torch.strided:
            one, other = one.to_dense(), other.to_dense()
        if one.is_complex():
            one, other = torch.view_as_real(one.clone()), torch.view_as_real(other.clone())
        # By their bits, because torch cannot compare values of some dtypes.
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize]
        return torch.equal(one.view(width), other.view(width))
