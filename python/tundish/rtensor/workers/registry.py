"""`WorkerRegistry`: the workers of a controller, by address."""

from __future__ import annotations

from collections.abc import Iterable, Set

from tundish.errors import InvalidInputError
from tundish.rtensor.workers.worker import Worker, as_worker

__all__ = ["WorkerRegistry"]


class WorkerRegistry:
    """The workers of one controller, each with an address of its own.

    Attributes:
        workers: all of them, in the order in which they were given.
    """

    def __init__(self) -> None:
        self.workers: tuple[Worker, ...] = ()
        self._by_address: dict[str, Worker] = {}

    def replace(self, workers: Iterable[Worker]) -> list[Worker]:
        """Replaces all workers; returns those with a server that were not registered before.

        Raises:
            InvalidInputError: two workers have one address, or an address is invalid. Nothing is replaced then.
            InvalidTypeError: one of them is no worker. Nothing is replaced then.
        """
        given = [as_worker(one) for one in workers]
        by_address: dict[str, Worker] = {}
        for worker in given:
            if worker.addr in by_address:
                raise InvalidInputError(
                    f"two workers serve at {worker.addr}: every process has an address of its own"
                )
            by_address[worker.addr] = worker
        new = [one for one in given if one.addr not in self._by_address and one.drain is None]
        self.workers, self._by_address = tuple(given), by_address
        return new

    def addresses(self) -> Set[str]:
        return self._by_address.keys()

    def with_server(self) -> list[Worker]:
        """The workers that are drained by requests, not by a function."""
        return [worker for worker in self.workers if worker.drain is None]

    def at(self, addr: str) -> Worker:
        """The worker at an address; an owner that is no worker gets the role "owner"."""
        return self._by_address.get(addr) or Worker(addr, "owner")

    def __contains__(self, addr: object) -> bool:
        return addr in self._by_address
