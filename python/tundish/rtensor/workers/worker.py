"""`Worker`: the address and role of a process that a controller drains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tundish.errors import InvalidTypeError, format_type
from tundish.rtensor.arguments import split_address

__all__ = ["Worker", "as_worker"]


class Worker(NamedTuple):
    """A process that a controller drains.

    Attributes:
        addr: the address of its server, `"host:port"`; any name, where `drain` is given.
        role: its role, for messages: actor, critic, ref.
        rank: its rank within the role.
        drain: for a process without a server, such as an inference server's. The controller calls it with the ids of
            the shards to drop; at the end of a step these are the ids that the step claimed. It runs on a thread of
            its own. The controller waits for it no longer than its `timeout`.

    Example:
        >>> import tundish as td
        >>> print(td.rtensor.Worker("10.0.0.2:7000", "actor", 3))
        actor 3 at 10.0.0.2:7000
    """

    addr: str
    role: str = "worker"
    rank: int = 0
    drain: Callable[[list[str]], object] | None = None

    def __str__(self) -> str:
        return f"{self.role} {self.rank} at {self.addr}"


def as_worker(given: Any) -> Worker:
    """Return a `Worker`, or make one of a tuple or list.

    Raises:
        InvalidTypeError: a field has the wrong type.
        InvalidInputError: the address is not `host:port`.
    """
    if isinstance(given, Worker):
        worker = given
    elif isinstance(given, (tuple, list)) and 1 <= len(given) <= len(Worker._fields):
        worker = Worker(*given)
    else:
        raise InvalidTypeError(f"{given!r} is not a worker: give Worker(addr, role, rank)")
    if isinstance(worker.rank, bool) or not isinstance(worker.rank, int):
        raise InvalidTypeError(f"rank of {worker} is {format_type(worker.rank)}: give an integer")
    if worker.drain is None:
        split_address(worker.addr)
        return worker
    if not callable(worker.drain):
        raise InvalidTypeError(f"drain of {worker} is {format_type(worker.drain)}: give a function")
    try:
        hash(worker)
    except TypeError as error:
        raise InvalidTypeError(f"{worker} is not hashable ({error}): give a function as its drain") from None
    return worker
