"""`GuardedCalls`, a base of `Checkpointer`: which calls are accepted now, and what interrupts do to them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from tundish.checkpoint.checkpointer_resources import CheckpointerResources
from tundish.errors import InvalidInputError

__all__ = ["GuardedCalls"]

# More votes than a call takes.
_VOTES_PER_CALL = 256
# How long an interrupted rank waits for the others to hear of it.
_REPORT_SECONDS = 0.3


class GuardedCalls:
    """Refuses calls of a checkpointer that is closed, and calls that would wait for themselves.

    Attributes:
        path: the folder of all checkpoints.
    """

    path: Path
    _resources: CheckpointerResources

    def __init__(self) -> None:
        # None while it is open, else why it was closed, for the message.
        self._closed_by: str | None = None
        # The collective call that each thread is in.
        self._current = threading.local()

    @contextlib.contextmanager
    def _collective(self, call: str) -> Iterator[None]:
        """A block in which this rank makes a collective call; an interrupt in it closes the checkpointer."""
        self._check_open()
        self._refuse_in_callback(call)
        outer = getattr(self._current, "call", None)
        if outer is not None:
            raise InvalidInputError(
                f"{call}() was called inside {outer}(), by a signal handler or a function that was given: the other "
                "ranks cannot know of it. Have the handler set a flag, and save between two steps"
            )
        self._current.call = call
        try:
            # The votes of a call have numbers of its own, so that ranks meet again after one left a call early.
            voter = self._resources.voter
            voter.skip_to(-(-voter.last_vote.number // _VOTES_PER_CALL) * _VOTES_PER_CALL)
            yield
        except Exception:
            raise
        except BaseException as interrupt:
            self._close_after_interrupt(call, interrupt)
            raise
        finally:
            self._current.call = None

    def _close_after_interrupt(self, call: str, interrupt: BaseException) -> None:
        """Tell the other ranks that this one left the call, and close."""
        self._closed_by = f", since {call}() was interrupted by {type(interrupt).__name__}"
        resources = self._resources
        try:
            with contextlib.suppress(Exception):
                resources.voter.vote(interrupt, what=call, timeout=_REPORT_SECONDS)
        except BaseException as caught:
            if caught is not interrupt:
                raise
        finally:
            # Ranks that wait for this one in a vote or an exchange fail now; saves under way have voters of their own.
            resources.voter.close()
            if resources.exchange_group is not None:
                resources.exchange_group.close()
            self._resources.close_later()

    def _check_open(self) -> None:
        if os.getpid() != self._resources.process:
            raise InvalidInputError(
                "this checkpointer was made before a fork: use it in the process that made it"
            )
        # Callbacks of the saves that a close waits for may still use it.
        if self._closed_by is not None and not self._is_in_callback():
            raise InvalidInputError(f"this checkpointer is closed{self._closed_by}: make a new one")

    def _raise_pending(self) -> None:
        """Raise the error of a save on the training thread; a callback must not consume it."""
        if not self._is_in_callback():
            self._resources.failure.raise_pending()

    def _refuse_in_callback(self, call: str) -> None:
        if self._is_in_callback():
            raise InvalidInputError(
                f"{call}() in a callback of a save would wait for that save itself: call it on the thread that trains"
            )

    def _is_in_callback(self) -> bool:
        """Whether the caller is a function of the user's on the thread of a save."""
        return any(queue.is_own_thread() for queue in self._resources.queues.values())
