"""Which processes a controller drains.

What always holds: every one of them has an address of its own, by which it is found without looking through all: they
may be ten thousand.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from tundish.errors import InvalidInputError
from tundish.rtensor.lines import Worker, worker_of

__all__ = ["Roster"]


class Roster:
    """The workers of one controller.

    Attributes:
        all: each of them, as they were given.
    """

    def __init__(self) -> None:
        self.all: tuple[Worker, ...] = ()
        self._by_address: dict[str, Worker] = {}

    def replace(self, workers: Iterable[Worker]) -> list[Worker]:
        """Have these from here on. Those that serve and were not among them before.

        Raises `InvalidInputError` and `InvalidTypeError`, and then it has those that it had.
        """
        given = [worker_of(one) for one in workers]
        by_address: dict[str, Worker] = {}
        for worker in given:
            if worker.addr in by_address:
                raise InvalidInputError(
                    f"two workers serve at {worker.addr}: every process has an address of its own"
                )
            by_address[worker.addr] = worker
        new = [one for one in given if one.addr not in self._by_address and one.drain is None]
        self.all, self._by_address = tuple(given), by_address
        return new

    def addresses(self) -> Set[str]:
        """Of all of them."""
        return self._by_address.keys()

    def serving(self) -> list[Worker]:
        """Those that are asked, not called."""
        return [worker for worker in self.all if worker.drain is None]

    def at(self, addr: str) -> Worker:
        """The one at this address, or else one that owns what a handle led to."""
        return self._by_address.get(addr) or Worker(addr, "owner")

    def __contains__(self, addr: object) -> bool:
        return addr in self._by_address
