"""Decides what a save that fails in the background does to the process: the argument `on_failure`.

A failure is logged with its traceback and its rank, and acted upon once. The save's future has it in any case.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from tundish.errors import InvalidInputError

OnFailure = Literal["terminate", "raise"] | Callable[[BaseException], Any]

# How long the process may take to end after SIGTERM before it gets SIGKILL.
GRACE_SECONDS = 10.0

_logger = logging.getLogger("tundish.checkpoint")


class FailurePolicy:
    """The `on_failure` of a checkpointer.

    "terminate" ends this process, and with it the group that it leads, so that a launcher restarts the job
    from the last good checkpoint. "raise" raises at the next call into the checkpointer. A callable gets the
    error, on a background thread; what it raises is logged.
    """

    def __init__(self, on_failure: OnFailure, rank: int) -> None:
        if on_failure not in ("terminate", "raise") and not callable(on_failure):
            raise InvalidInputError(
                f"on_failure is {on_failure!r}: give 'terminate', 'raise' or a function of the error"
            )
        self._on_failure = on_failure
        self._rank = rank
        self._pending: BaseException | None = None
        self._lock = threading.Lock()

    def act(self, error: BaseException, what: str) -> None:
        """Act on a failure of `what`. Never raises."""
        # A log that cannot be written must not keep the failure from being acted on.
        with contextlib.suppress(Exception):
            _logger.error("rank %d: %s failed", self._rank, what, exc_info=error)
        if self._on_failure == "raise":
            with self._lock:
                self._pending = self._pending or error
        elif self._on_failure == "terminate":
            _end_process(self._rank, what)
        else:
            try:
                self._on_failure(error)
            except BaseException:
                # An exit too: it would end the thread of the saves, and nothing else.
                with contextlib.suppress(Exception):
                    _logger.exception("rank %d: on_failure itself failed after %s", self._rank, what)

    def raise_pending(self) -> None:
        """With "raise": raise a failure that was not raised yet."""
        with self._lock:
            error, self._pending = self._pending, None
        if error is not None:
            raise error


def _end_process(rank: int, what: str) -> None:
    """Send SIGTERM to this process and the group it leads, and SIGKILL after a grace period."""
    leads = os.getpgrp() == os.getpid()
    with contextlib.suppress(Exception):
        _logger.critical(
            "rank %d: ending this process%s because %s failed; the last published checkpoint is whole",
            rank,
            " and its group" if leads else "",
            what,
        )
        sys.stderr.flush()
    # An interpreter that is ending already starts no threads, and need not be made to end.
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=_kill_after_grace, args=(leads,), name="tundish-end", daemon=True).start()
    _signal(signal.SIGTERM, leads=leads)


def _kill_after_grace(leads: bool) -> None:
    # The first process of a container is sent no signal that it has no handler for.
    if os.getpid() != 1 or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        time.sleep(GRACE_SECONDS)
    _signal(signal.SIGKILL, leads=leads)
    os._exit(1)


def _signal(number: signal.Signals, *, leads: bool) -> None:
    if leads:
        # Its own, not by number: to the system -1 is not the group of the process 1, but all processes there are.
        os.killpg(0, number)
    else:
        os.kill(os.getpid(), number)
