"""The counter of a round, from which whoever concludes it learns in one request how the ranks fared."""

from __future__ import annotations

from typing import NamedTuple, Self

__all__ = ["Tally"]

# More than any job has ranks.
_MOST = 1 << 20


class Tally(NamedTuple):
    """How many ranks `arrived` in a round, how many of them `failed`, and how many `noted` something.

    `number` is how it stands in the store: those of several ranks add up.
    """

    arrived: int = 0
    failed: int = 0
    noted: int = 0

    @classmethod
    def of(cls, number: int) -> Self:
        """What stands in the store as `number`."""
        number, arrived = divmod(number, _MOST)
        noted, failed = divmod(number, _MOST)
        return cls(arrived, failed, noted)

    @property
    def number(self) -> int:
        """Of this tally."""
        return self.arrived + _MOST * (self.failed + _MOST * self.noted)
