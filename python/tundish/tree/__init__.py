"""Flattens nested containers into their tensors and a small schema, and rebuilds them.

    >>> import torch
    >>> import tundish as td
    >>> batch = {"input_ids": torch.arange(6).view(2, 3), "task": "caption", "images": [torch.rand(3, 8, 8)]}
    >>> tensors, schema = td.tree.flatten(batch)
    >>> [tuple(tensor.shape) for tensor in tensors]
    [(2, 3), (3, 8, 8)]
    >>> td.tree.unflatten(schema, tensors)["task"]
    'caption'

`flattening` pickles an object without its tensors. `tensors` says how tensors and arrays that are more than plain
tensors are taken apart; `layout` chooses the tensors that travel, and says where they lie in one buffer. `mapping`
replaces or collects tensors in containers.

Invariants:

1. The same types come back, with the same values, attributes and sharing as pickle keeps, in whichever process.
2. Nothing is copied that can be read where it is; nothing that was given is changed.
3. `flatten` refuses an object that cannot travel, with its path, before it returns anything.
4. A schema holds no tensor.
"""

from __future__ import annotations

# The names in `__all__` are public. The others, imported as themselves, are for the other parts of tundish.
from tundish.tree.flattening import Schema, flatten, unflatten
from tundish.tree.flattening import flatten_with_addresses as flatten_with_addresses
from tundish.tree.flattening import unflatten_unchecked as unflatten_unchecked
from tundish.tree.layout import DLPACK_DTYPES as DLPACK_DTYPES
from tundish.tree.layout import DLPACK_EXCHANGE as DLPACK_EXCHANGE
from tundish.tree.layout import BufferLayout as BufferLayout
from tundish.tree.mapping import find_all as find_all
from tundish.tree.mapping import map  # noqa: A004 (as in other libraries of trees)
from tundish.tree.tensors import NUMPY_DTYPES as NUMPY_DTYPES
from tundish.tree.tensors import Refusal as Refusal

__all__ = ["Schema", "flatten", "map", "unflatten"]
