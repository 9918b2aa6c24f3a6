"""What tests of remote tensors run under: a store that is empty after each of them; and peers for those of drains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.rtensor.peers import Peer

    from tundish.rtensor import Controller


@pytest.fixture
def local() -> Iterator[None]:
    """The backend of one process, with nothing in it."""
    import tundish as td

    td.rtensor.set_backend(td.rtensor.LocalBackend())
    td.rtensor.clear_node()
    yield
    td.rtensor.clear_node()
    td.rtensor.set_backend(None)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Tests of shared memory, which may be the next ones of this process, count its segments."""
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
    """Afterwards nothing is in any of them."""
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
