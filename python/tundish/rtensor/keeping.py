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
        # Whether one that went before this controller had something kept, which ends when it is claimed here.
        self.has_inherited = False

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

    def ending(self, claimed: _Owners) -> dict[str, list[str]]:
        """Of what a step claimed, that which ends with it."""
        return {
            owner: [one for one in ids if (owner, one) not in self._kept] for owner, ids in claimed.items()
        }

    def end_step(self, ending: _Owners) -> tuple[set[str], list[str]]:
        """A step ends, and with it `ending`. Names that are half kept, and of `ending` those that were carried over."""
        ids = [one for some in ending.values() for one in some]
        kept = {one for _, one in self._kept}
        carried = [one for one in ids if self.has_inherited or one in self._carried]
        self._carried.difference_update(ids)
        # A name that two owners gave, too: whoever was told to keep the one keeps both.
        half = (self._half_kept - self._carried - kept) | kept.intersection(ids)
        self._carried |= kept - half
        self._kept.clear()
        self._half_kept.clear()
        return half, carried

    def dropped(self, entries: Mapping[str, int]) -> None:
        """So many entries that were kept are dropped at these addresses."""
        self._entries.subtract(entries)

    def carries(self) -> bool:
        """Whether there is anything that was carried over."""
        return bool(self._carried)

    def expected(self, addr: str) -> int:
        """How many entries are in that buffer on purpose."""
        shards = len(self._carried.union(one for _, one in self._kept))
        if not shards:
            self._entries.clear()
        return max(shards, self._entries[addr])


def _pairs(by_owner: _Owners) -> Iterable[tuple[str, str]]:
    return ((owner, one) for owner, ids in by_owner.items() for one in ids)
