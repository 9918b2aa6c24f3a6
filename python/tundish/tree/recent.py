"""What was made once and is used again while it is recent: a job has a few of each kind, and those stay.

What always holds: of `2 * most` at most is held on to, however many come that never come again; and what was used
among the last `most` different ones is still there.
"""

from __future__ import annotations

from typing import TypeVar

__all__ = ["Recent"]

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(dict[Key, Value | None]):
    """By what it is known by; None for what is not, or not any more.

    A dict, so that what is there is found without a line of Python.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        # Those of before, of which what is asked for again moves over.
        self._before: dict[Key, Value | None] = {}

    def __missing__(self, key: Key) -> Value | None:
        found = self._before.get(key)
        if found is not None:
            self.keep(key, found)
        return found

    def keep(self, key: Key, value: Value) -> None:
        """Make it the most recent one."""
        if len(self) >= self._most:
            self._before = dict(self)
            self.clear()
        self[key] = value
