"""Compares two objects part by part, without any code of the library."""

from __future__ import annotations

import ctypes
import dataclasses
import enum
from collections import OrderedDict, UserDict, defaultdict, deque
from typing import Any

import numpy as np
import torch
from torch import Tensor


def assert_same(left: Any, right: Any, path: str = "it") -> None:
    """`right` has the types, values and attributes of `left`, and names twice what `left` names twice."""
    _compare(left, right, path, {}, {})


def _compare(left: Any, right: Any, path: str, there: dict[int, Any], here: dict[int, Any]) -> None:
    assert type(left) is type(right), f"{path}: {type(left)} became {type(right)}"
    if left is None or isinstance(left, (type, torch.dtype, torch.device, enum.Enum)):
        assert left == right, path
        return
    if isinstance(left, (bool, int, float, complex, str, bytes, np.generic)):
        assert repr(left) == repr(right), path
        return
    if id(left) in there or id(right) in here:
        if type(left) is tuple and not left:
            return
        assert there.get(id(left)) is right and here.get(id(right)) is left, f"{path}: not shared as it was"
        return
    there[id(left)], here[id(right)] = right, left
    if isinstance(left, Tensor):
        assert_same_tensor(left, right, path)
        if type(left) is not Tensor and not left.is_nested:
            _compare(vars(left), vars(right), f"{path}.__dict__", there, here)
        return
    if isinstance(left, np.ndarray):
        assert left.dtype == right.dtype and left.shape == right.shape, path
        assert left.flags.writeable == right.flags.writeable, path
        assert left.tobytes() == right.tobytes() or left.dtype.hasobject, path
        if left.dtype.hasobject:
            _compare(left.tolist(), right.tolist(), path, there, here)
        return
    if isinstance(left, (set, frozenset)):
        assert left == right, path
        return
    if isinstance(left, dict):
        base = OrderedDict if isinstance(left, OrderedDict) else dict
        pairs = list(zip(base.items(left), base.items(right), strict=True))
        for (key, value), (other_key, other_value) in pairs:
            _compare(key, other_key, f"{path} key {key!r}", there, here)
            _compare(value, other_value, f"{path}[{key!r}]", there, here)
        if isinstance(left, defaultdict):
            assert left.default_factory is right.default_factory, path
    if isinstance(left, (list, tuple, deque)):
        assert len(left) == len(right), path
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            _compare(one, other, f"{path}[{index}]", there, here)
    if isinstance(left, deque):
        assert left.maxlen == right.maxlen, path
    if hasattr(left, "__dict__") and not isinstance(left, type):
        _compare(dict(vars(left)), dict(vars(right)), f"{path}.__dict__", there, here)
    for kind in type(left).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and not issubclass(kind, tuple):
                assert hasattr(left, name) == hasattr(right, name), f"{path}.{name}"
                if hasattr(left, name):
                    _compare(getattr(left, name), getattr(right, name), f"{path}.{name}", there, here)
    known = dict, list, tuple, deque, UserDict
    if not isinstance(left, known) and not dataclasses.is_dataclass(left) and not hasattr(left, "__dict__"):
        assert left == right, path


def assert_same_tensor(left: Tensor, right: Tensor, path: str = "it") -> None:
    assert left.dtype == right.dtype, path
    assert left.layout == right.layout, path
    assert left.requires_grad == right.requires_grad and right.is_leaf, path
    assert left.is_nested == right.is_nested, path
    if left.is_nested:
        for one, other in zip(left.unbind(), right.unbind(), strict=True):
            assert torch.equal(one, other), path
        return
    assert left.shape == right.shape, path
    left, right = left.detach(), right.detach()
    if left.layout is torch.sparse_coo:
        assert left.is_coalesced() == right.is_coalesced(), path
        assert_same_tensor(left._indices(), right._indices(), path)
        assert_same_tensor(left._values(), right._values(), path)
        return
    if left.layout in (torch.sparse_csr, torch.sparse_bsr):
        assert_same_tensor(left.crow_indices(), right.crow_indices(), path)
        assert_same_tensor(left.col_indices(), right.col_indices(), path)
        assert_same_tensor(left.values(), right.values(), path)
        return
    if left.layout in (torch.sparse_csc, torch.sparse_bsc):
        assert_same_tensor(left.ccol_indices(), right.ccol_indices(), path)
        assert_same_tensor(left.row_indices(), right.row_indices(), path)
        assert_same_tensor(left.values(), right.values(), path)
        return
    assert left.is_conj() == right.is_conj() and left.is_neg() == right.is_neg(), path
    if left.device.type == "meta":
        assert right.device.type == "meta" and left.stride() == right.stride(), path
        return
    assert bytes_of(left) == bytes_of(right), path


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of each element in order, whatever its dtype."""
    tensor = tensor.resolve_conj().resolve_neg()
    size, width = list(tensor.shape), tensor.dtype.itemsize
    if not tensor.numel():
        return b""
    span = 1 + sum((n - 1) * step for n, step in zip(size, tensor.stride(), strict=True))
    memory = ctypes.string_at(tensor.data_ptr(), span * width)
    found = bytearray()
    index = [0] * len(size)
    for _ in range(tensor.numel()):
        at = sum(i * step for i, step in zip(index, tensor.stride(), strict=True))
        found += memory[at * width : (at + 1) * width]
        for dimension in reversed(range(len(size))):
            index[dimension] += 1
            if index[dimension] < size[dimension]:
                break
            index[dimension] = 0
    return bytes(found)
