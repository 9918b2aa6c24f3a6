"""`KeptShards`: the shards that `Controller.keep` carries over into later steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

__all__ = ["KeptShards"]

# Shard ids by the address of their owner.
_ByOwner = Mapping[str, Sequence[str]]


class KeptShards:
    """The shards that do not end with the current step.

    Two owners may have given one name: shards are known by owner and name. In workers' buffers they are kept by their
    names alone.
    """

    def __init__(self) -> None:
        self._kept: set[tuple[str, str]] = set()
        # Some workers keep these and others do not, since a request failed: they end with the step after all.
        self._partly_kept: set[str] = set()

    def begin_keep(self, ids: Iterable[str]) -> None:
        """Before the requests to keep these."""
        self._partly_kept.update(ids)

    def finish_keep(self, by_owner: _ByOwner) -> None:
        """After all workers have kept these."""
        self._kept.update(_pairs(by_owner))
        self._partly_kept.difference_update(*by_owner.values())

    def discard(self, by_owner: _ByOwner) -> None:
        """These were drained by their ids, or a new step claims them."""
        self._kept.difference_update(_pairs(by_owner))

    def end_step(self, claimed: _ByOwner) -> tuple[dict[str, list[str]], set[str]]:
        """Ends a step that claimed these.

        Returns:
            The claimed shards that end with the step, by owner; and names that some worker keeps though they are to
            end with it.
        """
        ending = {
            owner: [one for one in ids if (owner, one) not in self._kept] for owner, ids in claimed.items()
        }
        kept_names = {name for _, name in self._kept}
        kept_wrongly = self._partly_kept | kept_names.intersection(
            one for ids in ending.values() for one in ids
        )
        self._kept.clear()
        self._partly_kept = set()
        return ending, kept_wrongly


def _pairs(by_owner: _ByOwner) -> Iterable[tuple[str, str]]:
    return ((owner, one) for owner, ids in by_owner.items() for one in ids)
