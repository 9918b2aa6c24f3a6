"""The schema of an object: everything but its tensors, in memory and in bytes.

A schema has three parts. The *structure* has the types and keys, and says where leaves and values go. The *layout*
describes the tensors. The *values* are numbers, texts, and pickled objects. Structures and layouts are encoded once.
They are cached by content in the process that flattens, and by their bytes in the one that decodes.

Invariants:

1. Values of built-in types are encoded in bytes that are equal where the values are, and decoded anew each time.
2. Bytes are read only from processes of the same job: reading them runs pickles.
"""

from __future__ import annotations

import marshal
import pickle
import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from tundish._native import RebuildProgram
from tundish.errors import InvalidInputError, NotPicklableError
from tundish.tree.buffer_layout import BufferLayout, decode_layout

__all__ = ["Schema", "Structure", "decode_values", "encode_values", "structure_of"]

# The first version without references between values, which differ from one equal value to the next.
_MARSHAL_VERSION = 2
_HEADER = struct.Struct("<4s4Q")
_MAGIC = b"tree"


class Structure:
    """The words and tokens of a traversal: how leaves and values make up an object."""

    def __init__(self, words: bytes, tokens: tuple[Any, ...], encoded: bytes) -> None:
        self.words = words
        self.tokens = tokens
        self.encoded = encoded

    @cached_property
    def program(self) -> RebuildProgram:
        """Build the object."""
        return RebuildProgram(self.words, self.tokens)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure):
            return NotImplemented
        return self is other or (self.words == other.words and self.tokens == other.tokens)

    def __hash__(self) -> int:
        return hash((self.words, self.tokens))


@lru_cache(256)
def structure_of(words: bytes, tokens: tuple[Any, ...]) -> Structure:
    """The structure with these words and tokens. Raises the errors of pickling them."""
    return Structure(words, tokens, pickle.dumps((words, tokens), 5))


@lru_cache(256)
def _decode_structure(encoded: bytes) -> Structure:
    words, tokens = pickle.loads(encoded)  # noqa: S301 (from a rank of the same job)
    return Structure(words, tokens, encoded)


@dataclass(frozen=True, repr=False, slots=True)
class Schema:
    """All that `unflatten` needs beside the tensors. Pickles; equal where structure, layout and values are.

    Attributes:
        structure: the types and keys; equal structures are one object, as long as they are recent.
        layout: dtypes, shapes, sizes and offsets of the tensors.
        values: the encoded values of built-in types.
        pickles: the pickles of other objects, which may differ for equal objects.
    """

    structure: Structure
    layout: BufferLayout
    values: bytes
    pickles: bytes

    def __repr__(self) -> str:
        return f"<Schema of {len(self.layout.shapes)} tensors, {sum(self.layout.sizes)} bytes>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Schema.decode, (self.encode(),)

    @property
    def host_only_tensors(self) -> frozenset[int]:
        """Numbers of the tensors that may stay in host memory, since only arrays are made of them."""
        leaves, leaf_sources = self.structure.program.host_only_leaves, self.layout.leaf_sources
        if leaf_sources is None or not leaves:
            return frozenset(leaves)
        carried = [source if isinstance(source, int) else source[0] for source in leaf_sources]
        others = {number for leaf, number in enumerate(carried) if leaf not in leaves}
        return frozenset(carried[leaf] for leaf in leaves) - others

    def encode(self) -> bytes:
        """Encode the schema. Only the values are encoded for this one object; the rest is cached.

        Returns:
            The bytes, which `decode` takes in any process of the same job.
        """
        parts = self.structure.encoded, self.layout.encoded, self.values, self.pickles
        return b"".join((_HEADER.pack(_MAGIC, *map(len, parts)), *parts))

    @staticmethod
    def decode(encoded: Any) -> Schema:
        """Decode a schema.

        Args:
            encoded: the bytes that `encode` returned, in any buffer; they are copied. They must come from a process of
                the same job, since decoding runs pickles.

        Returns:
            The schema.

        Raises:
            InvalidInputError: the bytes are no schema.
            NotPicklableError: a type that they name is not found here.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> _, schema = td.tree.flatten({"ids": torch.arange(3)})
            >>> td.tree.Schema.decode(schema.encode()) == schema
            True
        """
        view = memoryview(encoded)
        if len(view) < _HEADER.size or bytes(view[:4]) != _MAGIC:
            raise InvalidInputError("encoded is not a schema: give the bytes that Schema.encode() returned")
        _, *sizes = _HEADER.unpack_from(view)
        total = _HEADER.size + sum(sizes)
        if total != len(view):
            raise InvalidInputError(f"encoded has {len(view)} bytes of a schema of {total}: give all of them")
        parts, start = [], _HEADER.size
        for size in sizes:
            parts.append(bytes(view[start : start + size]))
            start += size
        structure, layout, values, pickles = parts
        try:
            return Schema(_decode_structure(structure), decode_layout(layout), values, pickles)
        except Exception as error:
            raise NotPicklableError(f"the schema cannot be decoded in this process: {error}") from error


def encode_values(values: list[Any]) -> bytes:
    """The bytes of values of built-in types. Raises `ValueError` for a text or bytes of 2 GiB."""
    return marshal.dumps(values, _MARSHAL_VERSION)


def decode_values(encoded: bytes) -> list[Any]:
    """The values that `encode_values` encoded."""
    values: list[Any] = marshal.loads(encoded)  # noqa: S302 (from a rank of the same job)
    return values
