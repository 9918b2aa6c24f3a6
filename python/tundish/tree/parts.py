"""What a rule says about one object: how it is made again, and of what.

Owns the form of that answer and the refusals. What always holds: a token is hashable and can be pickled wherever its
classes can; what changes from batch to batch (sizes, numbers, texts) is a part, not in the token.
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
    "Host",
    "Parts",
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


class Parts(NamedTuple):
    """What an object is made of.

    `labels` name the parts for a message: `INDEX`, or a text for each, which follows the object's own path.
    """

    token: Token
    children: Sequence[Any]
    labels: Sequence[str] | None = INDEX


class Host(NamedTuple):
    """A part that has to be in host memory."""

    tensor: Any


class Refusal(Exception):
    """Why an object cannot be carried; whoever knows its path turns this into an error of the library."""

    def __init__(self, kind: type[Exception], reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason
