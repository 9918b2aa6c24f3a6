"""Random nested structures come back as pickle brings them back, and their tensors are not in the schema."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import torch
from hypothesis import given
from support.tree.comparison import assert_same
from support.tree.structures import STRUCTURES, with_tensors

import tundish as td


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
    assert_same(obj, td.tree.unflatten(pickle.loads(pickle.dumps(schema)), there))


@given(STRUCTURES)
def test_pickle_alone_brings_back_the_same(structure: Any) -> None:
    """The oracle: pickle, for objects without tensors."""
    by_pickle = pickle.loads(pickle.dumps(structure))
    tensors, schema = td.tree.flatten(structure)
    assert not tensors
    assert_same(by_pickle, td.tree.unflatten(schema, []))
