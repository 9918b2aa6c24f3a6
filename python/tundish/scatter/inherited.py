"""Descriptors of memory that several receivers have, as one of them was sent them.

What always holds: of each segment there is one at most, and of those that their source has let go of none is kept once
another one comes, as it would keep their memory. The source lets go of no segment before all who were sent it have
looked at the message that refers to it.
"""

from __future__ import annotations

import os
from typing import Final

from tundish._native import is_segment_retired

__all__ = ["MOST_KNOWN", "Inherited"]

# As many segments as a receiver keeps.
MOST_KNOWN: Final = 128


class Inherited:
    """Descriptors by the identity of their segments."""

    def __init__(self) -> None:
        self._descriptors: dict[int, int] = {}

    def keep(self, identity: int, descriptor: int) -> None:
        """Take over a descriptor. The source may have forgotten that it sent one of this segment before."""
        given_up = [
            known for known, one in self._descriptors.items() if known == identity or is_segment_retired(one)
        ]
        if not given_up and len(self._descriptors) >= MOST_KNOWN:
            given_up = [next(iter(self._descriptors))]
        for known in given_up:
            os.close(self._descriptors.pop(known))
        self._descriptors[identity] = descriptor

    def get(self, identity: int) -> int | None:
        """The descriptor of a segment."""
        return self._descriptors.get(identity)

    def close(self) -> None:
        """Close all."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
