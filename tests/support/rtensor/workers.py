"""Workers of a controller in tests, and looks into them."""

from __future__ import annotations

from typing import Any

from support.rtensor import peer_functions
from support.rtensor.peers import Peer
from tundish.rtensor import Worker

__all__ = ["entries", "fetch_everywhere", "workers_of"]

ROLES = ("actor", "critic", "ref")


def workers_of(owners: list[Peer], consumers: list[Peer]) -> list[Worker]:
    return [
        *(Worker(peer.addr, "rollout", rank) for rank, peer in enumerate(owners)),
        *(
            Worker(peer.addr, role, rank)
            for rank, (peer, role) in enumerate(zip(consumers, ROLES, strict=False))
        ),
    ]


def entries(peers: list[Peer]) -> list[tuple[int, int]]:
    """The number of stored and of fetched tensors of each."""
    found = [peer.call(peer_functions.stats) for peer in peers]
    return [(storage["num_tensors"], buffer["num_entries"]) for storage, buffer in found]


def fetch_everywhere(handles: Any, consumers: list[Peer], fetch: Any = peer_functions.sums) -> None:
    for peer in consumers:
        peer.begin(fetch, handles)
    for peer in consumers:
        peer.result()
