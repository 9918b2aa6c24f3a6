"""The schema of an object: everything but its tensors, in memory and in bytes.

A schema has three parts: the *structure* (types, keys, where leaves and values go), the *layout* of the tensors, and
the *values* (numbers, texts, and what is pickled). Structures and layouts are encoded once and cached, by content where
they are made and by their bytes where they arrive.

Invariants:

1. Values of built-in types are encoded in bytes that are equal where the values are, and decoded anew each time.
2. Bytes are read only from processes of the same job: reading them runs pickles.
"""

from __future__ import annotations

import marshal
import pickle
import struct
from functools import cached_property, lru_cache
from typing import Any

from tundish._native import QuickProgram
from tundish.errors import InvalidInputError, NotPicklableError
from tundish.tree.buffer_layout import BufferLayout, decode_layout
from tundish.tree.node_spec import HOST, Token

__all__ = [
    "MARSHALLED",
    "Schema",
    "Structure",
    "structure_of",
    "values_of",
]

# The first version without references between values, which differ from one equal value to the next.
MARSHALLED = 2
_HEADER = struct.Struct("<4sBQQQ")
_MAGIC = b"tree"


class Structure:
    """How an object is put together: a program for `building`, which makes parts before what they are parts of.

    An integer puts down the leaf of that number, a range those leaves, None puts down None, the text `VALUE` the next
    value; a tuple takes what its builder needs off the end of what was put down, and puts down what that makes of it:
    `(number of parts, token)`.
    """

    __slots__ = ("__dict__", "encoded", "program")

    def __init__(self, program: tuple[Any, ...], encoded: bytes) -> None:
        self.program = program
        self.encoded = encoded

    @cached_property
    def host_only_leaves(self) -> frozenset[int]:
        """Leaves of which nothing is made but what has to be in host memory."""
        found: set[int] = set()
        others: set[int] = set()
        for token, after in zip(self.program, (*self.program[1:], None), strict=True):
            if type(token) is int:
                is_host = type(after) is tuple and after[1][0] in (HOST, "array", "array of")
                (found if is_host else others).add(token)
            elif type(token) is range:
                others.update(token)
        return frozenset(found - others)

    @cached_property
    def fast_program(self) -> QuickProgram | None:
        """The program compiled, where only Python's own containers and namedtuples are made.

        Those do not look at what tensors hold; of the values among them, the ones that were pickled may.
        """
        return QuickProgram.of(self.program)


@lru_cache(256)
def structure_of(program: tuple[Any, ...]) -> Structure:
    """The structure with this program. Raises what pickling the program raises."""
    return Structure(program, pickle.dumps(program, 5))


@lru_cache(256)
def _decode_structure(encoded: bytes) -> Structure:
    return Structure(pickle.loads(encoded), encoded)  # noqa: S301 (from a rank of the same job)


class Schema:
    """What `unflatten` needs beside the tensors. Pickles; equal where structure, layout and values are.

    Attributes:
        structure: equal structures are one object, as long as they are recent.
        layout: dtypes, shapes, sizes and offsets of the tensors.
        values: the bytes of what is neither tensor nor container.
        pickled: whether something had to be pickled into them, so that equal objects may differ in their bytes.
    """

    __slots__ = ("layout", "pickled", "structure", "values")

    def __init__(self, structure: Structure, layout: BufferLayout, values: bytes, pickled: bool) -> None:
        self.structure = structure
        self.layout = layout
        self.values = values
        self.pickled = pickled

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schema):
            return NotImplemented
        return (
            (self.structure is other.structure or self.structure.program == other.structure.program)
            and self.layout == other.layout
            and self.values == other.values
        )

    def __hash__(self) -> int:
        return hash((self.structure.program, self.layout, self.values))

    def __repr__(self) -> str:
        return f"<Schema of {len(self.layout.shapes)} tensors, {sum(self.layout.sizes)} bytes>"

    def __reduce__(self) -> Token:
        return Schema.decode, (self.encode(),)

    @property
    def host_only_tensors(self) -> frozenset[int]:
        """Numbers of the tensors that may stay in host memory: of arrays alone, or of what torch wants there."""
        leaves, leaf_sources = self.structure.host_only_leaves, self.layout.leaf_sources
        if leaf_sources is None or not leaves:
            return leaves
        carried = [one if isinstance(one, int) else one[0] for one in leaf_sources]
        others = {number for leaf, number in enumerate(carried) if leaf not in leaves}
        return frozenset(carried[leaf] for leaf in leaves) - others

    def encode(self) -> bytes:
        """The schema in bytes. Only the values were written for this one; the rest is there."""
        structure, layout = self.structure.encoded, self.layout.encoded
        header = _HEADER.pack(_MAGIC, self.pickled, len(structure), len(layout), len(self.values))
        return b"".join((header, structure, layout, self.values))

    @staticmethod
    def decode(encoded: Any) -> Schema:
        """The schema that `encode` told, from a buffer, which is not held on to.

        Raises `InvalidInputError` if the bytes are none, `NotPicklableError` if a type that they name is not found
        here.
        """
        view = memoryview(encoded)
        if len(view) < _HEADER.size or bytes(view[:4]) != _MAGIC:
            raise InvalidInputError("these bytes do not begin as a schema does")
        _, pickled, structure_size, layout_size, values_size = _HEADER.unpack_from(view)
        first = _HEADER.size
        second, third = first + structure_size, first + structure_size + layout_size
        if third + values_size != len(view):
            raise InvalidInputError(f"a schema of {third + values_size} bytes was cut to {len(view)}")
        try:
            return Schema(
                _decode_structure(bytes(view[first:second])),
                decode_layout(bytes(view[second:third])),
                bytes(view[third:]),
                bool(pickled),
            )
        except Exception as error:
            raise NotPicklableError(f"a batch came that cannot be put together here: {error}") from error


def values_of(encoded: bytes) -> list[Any]:
    """The values that marshal wrote."""
    values: list[Any] = marshal.loads(encoded)  # noqa: S302 (from a rank of the same job)
    return values
