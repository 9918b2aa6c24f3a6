"""The queue of the saves of one kind: a background thread finishes one after the other.

Invariants:
    - A save is over on this rank before the next one begins to be written.
    - A save's staging memory is given back and its future resolved, whatever happens.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
from collections.abc import Callable

from tundish.callers_device import on_this_device
from tundish.checkpoint.publish.finalizer import Finalizer, QueuedSave
from tundish.errors import CallbackError, InvalidInputError

__all__ = ["SaveQueue"]

_logger = logging.getLogger("tundish.checkpoint")


class SaveQueue:
    """The saves of one kind and the thread that finishes them.

    Args:
        finalizer: of that kind.
        on_failure: called with the error of a save that failed in the background, and what it was.
    """

    def __init__(self, finalizer: Finalizer, on_failure: Callable[[BaseException, str], None]) -> None:
        self._finalizer = finalizer
        self._on_failure = on_failure
        self._thread: threading.Thread | None = None
        self._pending: list[QueuedSave] = []
        self._changed = threading.Condition()
        self._is_closing = False
        self._has_ended = threading.Event()

    def steps_under_way(self) -> list[int]:
        """Steps of the saves that are not over, in order."""
        with self._changed:
            return [queued.save.step for queued in self._pending]

    def wait_for_turn(self) -> None:
        """Block until at most one save is not over: that one may be written while the next is staged."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._pending) < 2)

    def start(self) -> None:
        """Start the thread before ranks agree on a save: if it cannot start, the other ranks have to hear."""
        if self._thread is None and not self._is_closing:
            # The user's conversions and callbacks run on this thread.
            thread = threading.Thread(
                target=on_this_device(self._run), name=f"tundish-{self._finalizer.kind}-finalize", daemon=True
            )
            thread.start()
            self._thread = thread

    def submit(self, queued: QueuedSave) -> None:
        """Take over a save. Where the queue is closed, the save fails and gives back its memory."""
        with self._changed:
            if not self._is_closing:
                self._pending.append(queued)
                self._changed.notify_all()
                return
        error = InvalidInputError(f"{queued.what}: the checkpointer was closed while the save was taken")
        self._finalizer.abandon(queued)
        _release(queued)
        queued.save._fail(error)
        raise error

    def is_own_thread(self) -> bool:
        """Whether the caller runs on this queue's thread, and so would wait for itself."""
        return threading.current_thread() is self._thread

    def wait(self, timeout: float | None) -> bool:
        """Block until no save is under way, up to `timeout` seconds; returns whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout)

    def finish(self) -> None:
        """Take no more saves, and block until the pending ones are over and the thread has ended."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            # Not `join`, which takes the thread for ended where Ctrl-C interrupts it (Python 3.11).
            self._has_ended.wait()

    def close(self) -> None:
        """Close the finalizer. After `finish`."""
        self._finalizer.close()

    # From here on everything runs on the queue's thread.

    def _run(self) -> None:
        try:
            while (queued := self._next()) is not None:
                self._finish(queued)
                del queued
        finally:
            self._has_ended.set()

    def _next(self) -> QueuedSave | None:
        """Wait for a save; None once the queue is closing and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._is_closing)
            return self._pending[0] if self._pending else None

    def _finish(self, queued: QueuedSave) -> None:
        error: BaseException | None = None
        try:
            self._finalizer.finish(queued)
        except BaseException as caught:  # noqa: BLE001 (whatever it is, it is the save's failure)
            error = caught
            # The frames hold on to what was staged.
            traceback.clear_frames(caught.__traceback__)
        caller_raises = queued.caller_raises
        if isinstance(error, CallbackError):
            with contextlib.suppress(Exception):
                _logger.error("a callback failed", exc_info=error)
        elif error is not None and not caller_raises:
            # Before the leftovers are removed, which may take long, and before the future is resolved.
            self._on_failure(error, queued.what)
        if error is not None:
            self._finalizer.report(queued, error)
            if not queued.is_published:
                self._finalizer.abandon(queued)
        _release(queued)
        with self._changed:
            self._pending.remove(queued)
            self._changed.notify_all()
        try:
            if error is None:
                queued.save._finish(queued.target)
            else:
                queued.save._fail(error)
        except BaseException:
            # A callback of the future raised, perhaps SystemExit; the next save must go on.
            with contextlib.suppress(Exception):
                _logger.exception("a callback of the future of %s failed", queued.what)
        is_unraised = caller_raises and not queued.caller_raises
        if is_unraised and error is not None and not isinstance(error, CallbackError):
            # Ctrl-C ended the caller's wait after this thread relied on the caller to raise the error.
            self._on_failure(error, queued.what)


def _release(queued: QueuedSave) -> None:
    if isinstance(queued.staged, BaseException):
        traceback.clear_frames(queued.staged.__traceback__)
    elif queued.staged is not None:
        queued.staged.release()
    queued.release()
