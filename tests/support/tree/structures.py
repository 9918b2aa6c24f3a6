"""Strategies for random nested structures whose tensors share memory."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections import OrderedDict, UserDict, defaultdict, deque
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as some


class Pair(NamedTuple):
    first: Any
    second: Any


class Row(list[Any]):
    pass


@dataclasses.dataclass
class Sample:
    tokens: Any
    name: Any


class Unknown:
    def __init__(self, inside: Any) -> None:
        self.inside = inside


DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.uint8,
    torch.complex64,
    torch.float8_e4m3fn,
)
SHAPES = some.lists(some.integers(0, 3), max_size=3).map(tuple)
# The tensors of one object are cut out of so many buffers, so that many of them share memory.
BUFFERS = 3


@dataclasses.dataclass(frozen=True)
class Part:
    """How a tensor is cut out of a buffer; made anew for each example."""

    buffer: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    is_transposed: bool
    is_conjugate: bool
    kind: str


PARTS = some.builds(
    Part,
    some.integers(0, BUFFERS - 1),
    some.sampled_from(DTYPES),
    SHAPES,
    some.integers(0, 4),
    some.booleans(),
    some.booleans(),
    some.sampled_from(["plain", "plain", "plain", "gradient", "parameter", "sparse", "array", "expanded"]),
)


def cut(part: Part, buffers: list[torch.Tensor]) -> Any:
    steps, step = [], 1
    for size in reversed(part.shape):
        steps.append(step)
        step *= max(size, 1)
    tensor = torch.empty(0, dtype=part.dtype).set_(
        buffers[part.buffer].untyped_storage(), part.first, part.shape, tuple(reversed(steps))
    )
    if part.is_transposed and tensor.dim() > 1:
        tensor = tensor.transpose(0, -1)
    if part.is_conjugate and tensor.dtype is torch.complex64:
        tensor = tensor.conj()
    floating = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    if part.kind == "gradient" and floating:
        return tensor.requires_grad_()
    if part.kind == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=floating)
    if part.kind == "sparse" and tensor.dtype is torch.float32:
        return tensor.to_sparse()
    if part.kind == "array" and tensor.dtype in (torch.float32, torch.int64, torch.uint8):
        return tensor.numpy()
    if part.kind == "expanded":
        return tensor.unsqueeze(0).expand(3, *tensor.shape)
    return tensor


VALUES = (
    some.none()
    | some.booleans()
    | some.integers()
    | some.floats()
    | some.text(max_size=4)
    | some.binary(max_size=4)
    | some.sampled_from([1j, torch.float16, 2**80])
    | some.lists(some.integers(0, 9), min_size=16, max_size=20)
)
KEYS = some.text(max_size=3) | some.integers(0, 3) | some.tuples(some.integers(0, 2))


def containers(
    inner: some.SearchStrategy[Any], *, rows: type[list[Any]], keys: some.SearchStrategy[Any], most: int
) -> some.SearchStrategy[Any]:
    """Of up to `most` of `inner`: lists, also as `rows`, dicts, namespaces, and the same thing twice."""
    return (
        some.lists(inner, max_size=most).flatmap(
            lambda items: some.sampled_from([list, tuple, rows, deque]).map(lambda kind: kind(items))
        )
        | some.dictionaries(keys, inner, max_size=most).flatmap(
            lambda items: some.sampled_from(
                [dict, OrderedDict, lambda one: defaultdict(list, one), UserDict]
            ).map(lambda kind: kind(items))
        )
        | some.builds(lambda one, other: types.SimpleNamespace(a=one, b=other), inner, inner)
        | inner.map(lambda one: [one, {"again": one}])
    )


STRUCTURES: some.SearchStrategy[Any] = some.recursive(
    PARTS | VALUES,
    lambda inner: (
        containers(inner, rows=Row, keys=KEYS | some.booleans(), most=6)
        | some.builds(Pair, inner, inner)
        | some.builds(Sample, inner, inner)
        | some.builds(Unknown, inner)
    ),
    max_leaves=20,
)


def with_tensors(structure: Any) -> Any:
    """The structure with tensors in place of their descriptions: equal ones are the same tensor."""
    buffers = [torch.randint(0, 2, (4096,), dtype=torch.uint8) for _ in range(BUFFERS)]
    made: dict[Part, Any] = {}

    class Filling(dict[int, Any]):
        """The memo of `deepcopy`."""

    memo = Filling()

    def find(value: Any, seen: set[int]) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Part):
            memo[id(value)] = made.setdefault(value, cut(value, buffers))
        elif isinstance(value, dict):
            for one in value.values():
                find(one, seen)
        elif isinstance(value, (list, tuple, deque)):
            for one in value:
                find(one, seen)
        elif hasattr(value, "__dict__"):
            for one in vars(value).values():
                find(one, seen)

    find(structure, set())
    return copy.deepcopy(structure, memo)
