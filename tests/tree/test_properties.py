"""Random nested structures come back the same, by an oracle that shares no code with the library."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from support.tree.comparison import assert_same
from support.tree.structures import (
    STRUCTURES,
    with_tensors,
)

import tundish as td
from tundish.tree.schema import Schema


@settings(max_examples=300)
@given(STRUCTURES)
def test_any_structure_comes_back(structure: Any) -> None:
    obj = with_tensors(structure)
    tensors, schema = td.tree.flatten(obj)
    assert_same(obj, td.tree.unflatten(schema, tensors))
    # The memory of the tensors, and bytes that say the rest, are all that it takes.
    buffer = torch.zeros(schema.layout.total, dtype=torch.uint8)
    there = schema.layout.tensors_in(buffer)
    for place, tensor in zip(there, tensors, strict=True):
        place.copy_(tensor)
    ranges = sorted(
        (tensor.data_ptr(), size) for tensor, size in zip(tensors, schema.layout.sizes, strict=True) if size
    )
    if all(tensor.is_contiguous() for tensor in tensors):
        assert all(one + size <= other for (one, size), (other, _) in itertools.pairwise(ranges))
    back = td.tree.unflatten(Schema.decode(schema.encode()), there)
    assert_same(obj, back)
    assert td.tree.flatten(obj)[1] == schema or schema.pickles


@given(some.lists(some.integers(0, 5), min_size=1, max_size=8), some.data())
def test_equal_objects_have_equal_schemas(kinds: list[int], data: some.DataObject) -> None:
    def make() -> list[Any]:
        return [[torch.zeros(kind), {"n": kind}, np.zeros(kind), (kind,) * kind][kind % 4] for kind in kinds]

    assert td.tree.flatten(make())[1] == td.tree.flatten(make())[1]
    changed = make()
    place = data.draw(some.integers(0, len(changed) - 1))
    changed[place] = [changed[place]]
    assert td.tree.flatten(changed)[1] != td.tree.flatten(make())[1]
    assert pickle.loads(pickle.dumps(td.tree.flatten(changed)[1])) == td.tree.flatten(changed)[1]
