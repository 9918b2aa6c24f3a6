"""What a controller carries over from one step to later ones.

What always holds: what was carried over ends with the step that claims it, or by its id; what some workers keep and
others do not, since they could not all be told, ends with the current step after all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Keeping"]

_Owners = Mapping[str, Sequence[str]]


class Keeping:
    """Of one controller. Shards are told apart by their owners, too, who may have given them the same names.

    In workers' buffers they are kept by their names alone.
    """

    def __init__(self) -> None:
        # Owner and name of what is not to end with the current step.
        self._kept: set[tuple[str, str]] = set()
        # Names of what did not end with one before, by which it is not dropped.
        self._carried: set[str] = set()
        # Names of what some workers keep and others do not.
        self._half_kept: set[str] = set()
        # Entries that are kept, by address: of one shard several, where rows were fetched.
        self._entries: Counter[str] = Counter()

    def begin(self, ids: Iterable[str]) -> None:
        """Workers are about to be told to keep these."""
        self._half_kept.update(ids)

    def note(self, entries: Mapping[str, int]) -> None:
        """So many entries are kept at these addresses."""
        self._entries.update(entries)

    def succeed(self, by_owner: _Owners) -> None:
        """All were told."""
        self._kept.update(_pairs(by_owner))
        self._half_kept.difference_update(*by_owner.values())

    def let_go(self, by_owner: _Owners) -> None:
        """These were drained by their ids."""
        self._kept.difference_update(_pairs(by_owner))
        self._carried.difference_update(*by_owner.values())

    def begin_step(self, claimed: _Owners) -> None:
        """A step begins and claims these: it is a later one than the keeps that there were."""
        anew = self._kept.intersection(_pairs(claimed))
        self._kept -= anew
        self._carried.update(one for _, one in anew)

    def ending(self, claimed: _Owners) -> dict[str, list[str]]:
        """Of what a step claimed, that which ends with it."""
        return {
            owner: [one for one in ids if (owner, one) not in self._kept] for owner, ids in claimed.items()
        }

    def end_step(self, ending: _Owners, were_kept: set[str]) -> tuple[set[str], set[str]]:
        """A step ends, and with it `ending`.

        Names that are half kept, and all that are to be dropped by their names: these, and of `ending` those that
        `were_kept` before the step, by whomever.
        """
        ids = [one for some in ending.values() for one in some]
        kept = {one for _, one in self._kept}
        self._carried.difference_update(ids)
        # A name that two owners gave, too: whoever was told to keep the one keeps both.
        half_kept = (self._half_kept - self._carried - kept) | kept.intersection(ids)
        self._carried |= kept - half_kept
        self._kept.clear()
        self._half_kept.clear()
        return half_kept, half_kept | were_kept.intersection(ids)

    def dropped(self, entries: Mapping[str, int]) -> None:
        """So many entries that were kept are dropped at these addresses."""
        for addr, count in entries.items():
            # Of what was half kept it is not known how many there were.
            self._entries[addr] = max(0, self._entries[addr] - count)

    def saw(self, addr: str, entries: int) -> None:
        """No more are in that buffer: others' steps dropped some, or there is a new process."""
        if entries < self._entries[addr]:
            self._entries[addr] = max(0, entries)

    def expected(self, addr: str) -> int:
        """How many entries are in that buffer on purpose."""
        if not self._carried and not self._kept:
            self._entries.clear()
        return self._entries[addr]


def _pairs(by_owner: _Owners) -> Iterable[tuple[str, str]]:
    return ((owner, one) for owner, ids in by_owner.items() for one in ids)
