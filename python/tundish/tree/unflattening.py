"""Rebuilds an object from its tensors and schema.

Invariant: everything that can be changed is made anew. Only the tensors are the ones that were given, or views of them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tundish.errors import InvalidInputError, InvalidTypeError, format_count, format_type
from tundish.tree.array_rules import ARRAY_BUILDERS
from tundish.tree.container_rules import build
from tundish.tree.object_parts import Token
from tundish.tree.pickled_values import Builder, load_pickles
from tundish.tree.schema import Schema, decode_values
from tundish.tree.tensor_rules import TENSOR_BUILDERS

__all__ = ["unflatten", "unflatten_unchecked"]

_get_dtype = operator.attrgetter("dtype")
_get_shape = operator.attrgetter("shape")


def unflatten(schema: Schema, tensors: Sequence[Tensor]) -> Any:
    """Rebuild the object that `flatten` took apart.

    Args:
        schema: the schema that `flatten` returned, here or in another process of the same job.
        tensors: the tensors that it returned, or tensors of the same dtypes and shapes in the same order, on any
            device.

    Returns:
        The object. Its tensors are `tensors`, or views of them.

    Raises:
        InvalidInputError: number, dtypes or shapes of the tensors are not the schema's.
        InvalidTypeError: a type is registered where the object was flattened, and not here, or its unflatten function
            raised a TypeError; or `schema` is no schema.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> tensors, schema = td.tree.flatten({"ids": torch.arange(3), "task": "caption"})
        >>> td.tree.unflatten(schema, tensors)
        {'ids': tensor([0, 1, 2]), 'task': 'caption'}
    """
    if not isinstance(schema, Schema):
        raise InvalidTypeError(f"unflatten takes the schema that flatten returned, not {format_type(schema)}")
    tensors = list(tensors)
    layout = schema.layout
    if len(tensors) != len(layout.shapes):
        raise InvalidInputError(
            f"the schema is of {format_count(len(layout.shapes), 'tensor')}, and tensors has {len(tensors)}: give "
            "those that flatten returned with it, in the same order"
        )
    for number, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise InvalidTypeError(f"tensors[{number}] is {format_type(tensor)}: give a tensor")
    if tuple(map(_get_dtype, tensors)) != layout.dtypes or tuple(map(_get_shape, tensors)) != layout.shapes:
        for number, tensor in enumerate(tensors):
            dtype, shape = layout.dtypes[number], layout.shapes[number]
            if tensor.dtype != dtype or tensor.shape != shape:
                raise InvalidInputError(
                    f"tensors[{number}] is {tensor.dtype} of shape {tuple(tensor.shape)}; "
                    f"the schema has {dtype} of shape {tuple(shape)} there: give the tensors in the order of flatten"
                )
    return unflatten_unchecked(schema, tensors)


def unflatten_unchecked(schema: Schema, tensors: Sequence[Tensor]) -> Any:
    """Rebuild the object like `unflatten`, without checking the tensors.

    Args:
        schema: as for `unflatten`.
        tensors: as for `unflatten`.

    Returns:
        The object.

    Raises:
        InvalidTypeError: as for `unflatten`.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> tensors, schema = td.tree.flatten({"ids": torch.arange(3)})
        >>> td.tree.unflatten_unchecked(schema, tensors)
        {'ids': tensor([0, 1, 2])}
    """
    leaves = list(schema.layout.leaves(tensors))
    program = schema.structure.program
    pickled: list[Any] = []
    builder: Builder = build
    if schema.pickles:
        builder = _build_once()
        pickled = load_pickles(schema.pickles, program.pickles, leaves, builder)
    return program.build(leaves, decode_values(schema.values), pickled, builder)


def _build_once() -> Builder:
    """A builder that builds an array or tensor once, also where it is inside of a pickled object and outside."""
    known: dict[Any, tuple[Any, list[Any]]] = {}

    def build_or_find(token: Token, parts: list[Any]) -> Any:
        if token[0] not in ARRAY_BUILDERS and token[0] not in TENSOR_BUILDERS:
            return build(token, parts)
        # Both builds get parts of their own, with the same tensors.
        key = token[0], *(id(part) for part in parts if isinstance(part, Tensor))
        if len(key) == 1:
            return build(token, parts)
        if key not in known:
            # With the parts, or the identities would be those of other objects.
            known[key] = build(token, parts), parts
        return known[key][0]

    return build_or_find
