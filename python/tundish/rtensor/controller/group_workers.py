"""Collects the workers of a process group: each rank's server address and role."""

from __future__ import annotations

import json
from typing import Any

from tundish.distributed import compress_list, decompress_list, voter_of
from tundish.rtensor.process import state
from tundish.rtensor.server import server_address, trust
from tundish.rtensor.workers.worker import Worker

__all__ = ["group_workers"]


def group_workers(group: Any, role: str) -> list[Worker]:
    """Collective: the workers of all ranks of a group, in the group's order, the same on every rank.

    A rank that does not serve begins to. Two votes, however many ranks there are.
    """
    voter = voter_of(group)
    own = ""
    error: BaseException | None = None
    try:
        own = json.dumps([server_address(), role])
    except BaseException as caught:  # noqa: BLE001 (the vote raises it again)
        error = caught
    what = "collect the addresses of the ranks"
    gathered = voter.gather(own, error, what=what)
    together = compress_list([json.loads(one) for one in gathered]) if gathered else None
    collected = decompress_list(voter.broadcast(together, source=voter.ranks[0], what=what))
    workers = [Worker(addr, role, rank) for rank, (addr, role) in zip(voter.ranks, collected, strict=True)]
    server = state().server
    if server is not None and server.token is not None:
        trust(*(worker.addr for worker in workers), token=server.token)
    return workers
