"""`Drained`: the result of `Controller.clear_batches`."""

from __future__ import annotations

from typing import NamedTuple

from tundish.rtensor.workers.worker import Worker

__all__ = ["Drained"]


class Drained(NamedTuple):
    """The result of a drain by ids.

    Attributes:
        entries: entries that consumers had fetched and have dropped.
        shards: shards that owners have removed.
        bytes: bytes of these shards.
        failures: the failure of each worker that could not be drained; it is tried again.
        left: entries still in the fetch buffer of each worker that has any. Kept entries do not count.
    """

    entries: int
    shards: int
    bytes: int
    failures: dict[Worker, Exception]
    left: dict[Worker, int]
