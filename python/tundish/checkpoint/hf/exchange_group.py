"""A gloo process group of the checkpointer's own, connected by the first save that needs it.

A gloo group has a connection between every two ranks, so a checkpointer that never needs it never makes it.

Invariants:
    - A rank that gives up in the middle of a collective closes the group, so that the other ranks fail at once.
    - The group is connected on all ranks or on none. A rank that died does not hold up the others.
    - No reference to the group is kept beyond a collective: sockets close with the last reference.
"""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future, wait
from typing import Any

from torch import distributed

from tundish.daemon_thread import DaemonThread
from tundish.distributed import (
    Voter,
    second_client,
    store_load_factor,
    temporary_group,
)
from tundish.errors import PeerFailedError

__all__ = ["ExchangeGroup"]

# Seconds between checks that the other ranks are alive; more for many ranks, which share the store.
_POLL_SECONDS = 0.25
# How long the vote after connecting waits; the ranks reach it at about the same time.
_VOTE_SECONDS = 5.0

_WHAT = "connecting the ranks with one another"


class ExchangeGroup:
    """A gloo group of `ranks` that nothing else uses; absent until `connect`.

    Args:
        ranks: global ranks of the members.
        timeout: seconds that a collective waits for the other ranks.
        voter: of the thread that connects.

    Attributes:
        generation: how often the group was connected.
    """

    def __init__(self, ranks: tuple[int, ...], timeout: float, voter: Voter) -> None:
        self._ranks = ranks
        self._timeout = timeout
        self._voter = voter
        # A background thread may close the group while the caller's thread replaces it.
        self._lock = threading.Lock()
        self._group: Any = None
        self._resources = contextlib.ExitStack()
        self.generation = 0

    @property
    def is_absent(self) -> bool:
        """Whether this rank has no group: it was never connected, or it was closed."""
        return self._group is None

    def of_generation(self, generation: int) -> Any:
        """The `ProcessGroup` of that generation; raises `PeerFailedError` if it was closed or replaced."""
        group = self._group
        if group is None or generation != self.generation:
            raise PeerFailedError(
                "a rank gave up while the ranks exchanged tensors: its own error says why", -1
            )
        return group

    def connect(self, name: str) -> None:
        """Collective: make the group anew on all ranks, under a `name` that was never used before.

        Raises, on all ranks: the error of a rank that could not connect, or `PeerFailedError` that names a lost rank.
        """
        self.close()
        with contextlib.ExitStack() as resources:
            group: Any = None
            problem = error = None
            try:
                group, own = self._connect(name)
                resources.enter_context(own)
            except PeerFailedError as caught:
                # Another rank is to blame: it brings its error, or the vote names it.
                problem = caught
            except Exception as caught:  # noqa: BLE001 (the vote raises it again)
                error = caught
            if self._voter.vote(error, what=_WHAT, flag=group is None, timeout=_VOTE_SECONDS):
                raise problem or PeerFailedError(f"{_WHAT}: another rank could not connect", -1)
            with self._lock:
                self._group, self._resources = group, resources.pop_all()
                self.generation += 1

    def close(self, generation: int | None = None) -> None:
        """Close the group, or only that generation of it; ranks that wait in it for this one fail at once."""
        with self._lock:
            if generation in (None, self.generation):
                self._group = None
                resources, self._resources = self._resources, contextlib.ExitStack()
                resources.close()

    def _connect(self, name: str) -> tuple[Any, contextlib.ExitStack]:
        """Connect on another thread: neither Ctrl-C nor the death of a rank ends the wait of gloo."""

        def connect() -> tuple[Any, contextlib.ExitStack]:
            stack = contextlib.ExitStack()
            client = None
            if distributed.is_initialized():
                # gloo blocks the client of the job's store while it waits for a rank, so the group has its own.
                client = second_client(distributed.distributed_c10d._get_default_store())
            # The group's reference to the client is not visible to Python.
            stack.callback(id, client)
            return stack.enter_context(temporary_group(name, self._timeout, self._ranks, store=client)), stack

        connected = DaemonThread("tundish-connect").submit(connect)
        pause = _POLL_SECONDS * store_load_factor(len(self._ranks))
        deadline = time.monotonic() + self._timeout
        try:
            while time.monotonic() < deadline:
                if wait([connected], timeout=pause).done:
                    return connected.result()
                if self._voter.next_vote_fails(pause):
                    break
            raise PeerFailedError(f"{_WHAT}: another rank did not connect in time", -1)
        except BaseException as error:
            if not connected.done():
                connected.add_done_callback(_close_late)
            # torch and gloo raise these if another rank is gone or does not answer.
            if type(error) is RuntimeError or isinstance(error, distributed.DistError):
                raise PeerFailedError(f"{_WHAT}: {error}", -1) from None
            raise


def _close_late(connected: Future[tuple[Any, contextlib.ExitStack]]) -> None:
    if connected.exception() is None:
        connected.result()[1].close()
