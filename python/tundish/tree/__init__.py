"""Nested containers, taken apart into their tensors and a light schema, and put together again.

    >>> import torch
    >>> import tundish as td
    >>> batch = {"input_ids": torch.arange(6).view(2, 3), "task": "caption", "images": [torch.rand(3, 8, 8)]}
    >>> tensors, schema = td.tree.flatten(batch)
    >>> [tuple(tensor.shape) for tensor in tensors]
    [(2, 3), (3, 8, 8)]
    >>> td.tree.unflatten(schema, tensors)["task"]
    'caption'

This part is the one place of the library that walks nested containers. `walking` reads an object, `rules` and `tensors`
say what each type is made of and how it is made again, `carrying` says in what memory the tensors travel, `schema` is
what is told about the rest. What always holds:

1. The same types come back, with the same values, attributes and sharing, whatever process they come back in.
2. Nothing is copied that can be read where it is; nothing that was given is changed.
3. What cannot be carried is refused by `flatten`, with its path, before it returns anything.
4. A schema holds no tensor. Its parts are told in bytes when `flatten` returns, and a part equal to a recent one is not
   pickled again.
"""

from __future__ import annotations

from tundish.tree.arrays import NUMPY_DTYPES
from tundish.tree.building import unflatten, unflatten_unchecked
from tundish.tree.carrying import DLPACK_EXCHANGE
from tundish.tree.describing import flatten, flatten_with_addresses
from tundish.tree.layout import DLPACK_DTYPES, BufferLayout
from tundish.tree.mapping import find_all, map_only
from tundish.tree.parts import Refusal
from tundish.tree.rules import register
from tundish.tree.schema import Schema

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
