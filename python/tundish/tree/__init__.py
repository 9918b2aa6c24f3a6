"""Flattens nested containers into their tensors and a small schema, and rebuilds them.

    >>> import torch
    >>> import tundish as td
    >>> batch = {"input_ids": torch.arange(6).view(2, 3), "task": "caption", "images": [torch.rand(3, 8, 8)]}
    >>> tensors, schema = td.tree.flatten(batch)
    >>> [tuple(tensor.shape) for tensor in tensors]
    [(2, 3), (3, 8, 8)]
    >>> td.tree.unflatten(schema, tensors)["task"]
    'caption'

`flattening` and `map_and_find` traverse an object. `container_rules`, `tensor_rules` and `array_rules` say what the
parts of an object of each type are, and how to build it again. `memory_regions` and `buffer_layout` choose the tensors
that travel; `schema` holds the rest; `unflattening` rebuilds the object.

Invariants:

1. The same types come back, with the same values, attributes and sharing, in whichever process.
2. Nothing is copied that can be read where it is; nothing that was given is changed.
3. `flatten` refuses an object that cannot travel, with its path, before it returns anything.
4. A schema holds no tensor.
"""

from __future__ import annotations

from tundish.tree.array_rules import NUMPY_DTYPES
from tundish.tree.buffer_layout import DLPACK_DTYPES, BufferLayout
from tundish.tree.container_rules import register
from tundish.tree.flattening import flatten, flatten_with_addresses
from tundish.tree.map_and_find import find_all, map_only
from tundish.tree.memory_regions import DLPACK_EXCHANGE
from tundish.tree.object_parts import Refusal
from tundish.tree.schema import Schema
from tundish.tree.unflattening import unflatten, unflatten_unchecked

__all__ = [
    "DLPACK_DTYPES",
    "DLPACK_EXCHANGE",
    "NUMPY_DTYPES",
    "BufferLayout",
    "Refusal",
    "Schema",
    "find_all",
    "flatten",
    "flatten_with_addresses",
    "map_only",
    "register",
    "unflatten",
    "unflatten_unchecked",
]
