"""Fixtures of the tests of rtensor: an empty store after each test, and peers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.rtensor.peers import Peer

    from tundish.rtensor import Controller


@pytest.fixture
def local() -> Iterator[None]:
    """An empty LocalBackend."""
    import tundish as td

    td.rtensor.set_backend(td.rtensor.LocalBackend())
    td.rtensor.clear_node()
    yield
    td.rtensor.clear_node()
    td.rtensor.set_backend(None)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Later tests of shared memory in this process count segments."""
    yield
    import tundish as td

    td.rtensor.clear_node()


@pytest.fixture(scope="module")
def owners() -> Iterator[list[Peer]]:
    from support.rtensor.peers import Peer

    with Peer() as one, Peer() as two:
        yield [one, two]


@pytest.fixture(scope="module")
def consumers() -> Iterator[list[Peer]]:
    from support.rtensor.peers import Peer

    with Peer() as one, Peer() as two, Peer() as three:
        yield [one, two, three]


@pytest.fixture
def emptied(owners: list[Peer], consumers: list[Peer]) -> Iterator[None]:
    """Empties all peers after the test."""
    from support.rtensor import peer_functions

    yield
    for peer in (*owners, *consumers):
        peer.call(peer_functions.clear)
    peer_functions.clear()


@pytest.fixture
def controller(owners: list[Peer], consumers: list[Peer]) -> Iterator[Controller]:
    from support.rtensor.workers import workers_of

    from tundish.rtensor import Controller

    with Controller(workers_of(owners, consumers), timeout=10) as made:
        yield made
