"""The result of a rule: the parts of an object, and a token that names the builder of the object.

Invariants:

1. A token is hashable, and pickles wherever its classes do.
2. A token holds no value that changes from batch to batch, as sizes, numbers and texts do: these are parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

__all__ = ["ObjectParts", "Refusal", "Token", "format_key", "part_label"]

# The name of the builder, and its arguments.
Token = tuple[Any, ...]


class ObjectParts(NamedTuple):
    """The parts of an object, and the token of its builder.

    The label of a part follows the object's own path in messages. `labels` contains it, or returns it for the part's
    number; None numbers the parts.
    """

    token: Token
    children: Sequence[Any]
    labels: Sequence[str] | Callable[[int], str] | None = None


class Refusal(Exception):
    """The reason why an object is refused. The caller that knows its path raises it as an error of the library."""

    def __init__(self, kind: type[Exception], reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


def part_label(parts: ObjectParts | type | None, key: Any) -> str:
    """The label of a part: of a node by its number, of a namedtuple's class by its index, else by its key or index."""
    if isinstance(parts, ObjectParts) and parts.labels is not None:
        return parts.labels(key) if callable(parts.labels) else parts.labels[key]
    if isinstance(parts, ObjectParts) and parts.token[0] == "dict":
        key = parts.token[1][key]
    elif isinstance(parts, type) and hasattr(parts, "_fields"):
        return f".{parts._fields[key]}"
    return f"[{format_key(key)}]"


def format_key(key: Any) -> str:
    """Format a key of a dict for a message."""
    if type(key) is str:
        return '"' + key.replace('"', '\\"') + '"'
    if not isinstance(key, (int, float, bytes, tuple)):
        return type(key).__name__
    try:
        text = repr(key)
    except Exception:  # noqa: BLE001 (code of users; a key without a repr can still travel)
        return type(key).__name__
    return text if len(text) <= 60 else text[:57] + "..."
