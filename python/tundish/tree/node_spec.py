"""How one object is made again, and of which parts: the result of a container's rule.

Invariants:

1. A token is hashable, and pickles wherever its classes do.
2. What changes from batch to batch (sizes, numbers, texts) is a part, not in the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

__all__ = [
    "AGAIN",
    "CONSTANT",
    "GIVES_ITSELF",
    "HOST",
    "INDEX",
    "ITSELF",
    "KEYS",
    "LIST",
    "TUPLE",
    "VALUE",
    "WHOLE",
    "HostOnly",
    "NodeSpec",
    "Refusal",
    "Token",
]

# The first item names a builder, the others are told to it.
Token = tuple[Any, ...]

# In place of a token: the next of the values.
VALUE: Final = "value"
# A container that was named before: `(AGAIN, number)`.
AGAIN: Final = "again"
# An object that is pickled as a name: `(CONSTANT, object)`.
CONSTANT: Final = "constant"
# Exact dicts, lists and tuples: `(KEYS, keys)` of values, `(LIST,)` and `(TUPLE,)` of items.
KEYS: Final = "keys"
LIST: Final = "items of a list"
TUPLE: Final = "items of a tuple"
# A list or tuple that is a value: `(WHOLE,)` of it.
WHOLE: Final = "whole"
# In place of attributes: a dict that has its items as such.
ITSELF: Final = "itself"
# In place of a state: the object, which gives itself for that and takes it back.
GIVES_ITSELF: Final = "gives itself"
# A tensor that stays in host memory, whatever device the others go to: `(HOST,)`.
HOST: Final = "host"

# Labels of the parts of a sequence, which are numbered.
INDEX: Final = None


class NodeSpec(NamedTuple):
    """The parts of an object, and the token of its builder.

    `labels` name the parts for a message: `INDEX`, or a text for each, which follows the object's own path.
    """

    token: Token
    children: Sequence[Any]
    labels: Sequence[str] | None = INDEX


class HostOnly(NamedTuple):
    """A part that has to stay in host memory."""

    tensor: Any


class Refusal(Exception):
    """The reason why an object is refused. The caller that knows its path raises it as an error of the library."""

    def __init__(self, kind: type[Exception], reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason
