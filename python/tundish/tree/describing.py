"""From an object to its tensors and schema."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tundish.tree.carrying import as_they_are, carry
from tundish.tree.quick import quick_walk
from tundish.tree.schema import Schema
from tundish.tree.walking import Walk

__all__ = ["flatten", "flatten_with_addresses"]


def flatten(obj: Any) -> tuple[list[Tensor], Schema]:
    """Take a nested object apart into its tensors and a schema of the rest.

    Args:
        obj: anything: containers of containers of tensors, arrays and other values. It is not changed, and must not be
            while it is taken apart.

    The tensors are the object's own, or views of them, in the order in which they are met: dense, without gradients
    or lazy conjugation, on the device on which they were. No two overlap: a tensor that is named twice is there once,
    and so is memory that several tensors are views of. Copies are made of read-only arrays, and of arrays that torch
    cannot view.

    The schema can be pickled, and is equal for equal objects that hold nothing which pickles differently each time.

    Raises:
        InvalidTypeError: a tensor cannot be carried: it has no memory of its own, or is a part of something
        distributed.
        NotPicklableError: an object that is not known here cannot be pickled, or its type not found again.
        InvalidInputError: a container contains itself.

    Each names the path, as in `batch["pixel"][3].mask`.

        >>> import torch
        >>> import tundish as td
        >>> rows = torch.zeros(4, 2)
        >>> tensors, schema = td.tree.flatten({"all": rows, "first": rows[0]})
        >>> len(tensors)
        1
        >>> back = td.tree.unflatten(schema, [tensor.clone() for tensor in tensors])
        >>> back["first"].fill_(1.0)
        tensor([1., 1.])
        >>> back["all"][0]
        tensor([1., 1.])
    """
    tensors, schema, _ = flatten_with_addresses(obj)
    return tensors, schema


def flatten_with_addresses(obj: Any, name: str = "batch") -> tuple[list[Tensor], Schema, bytes]:
    """As `flatten`, with the addresses of the tensors, native 64-bit integers; `name` stands for `obj` in messages.

    No addresses where not all tensors are in host memory, each one's values one after the other.
    """
    walk = quick_walk(obj) or Walk(obj, name, careful=False)
    tensors, known = walk.leaves, as_they_are(walk.leaves)
    if known is not None:
        layout, addresses = known
    else:
        walk = Walk(obj, name, careful=True)
        tensors, layout, addresses = carry(walk.leaves)
    return tensors, Schema(walk.structure, layout, walk.values, walk.pickled), addresses
