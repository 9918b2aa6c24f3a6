"""The saves of one kind, one after the other.

A `SaveQueue` owns the finalize thread of its kind. What always holds:

1. The save of step N is over on every rank before that of step N+1 begins to be written.
2. A save's staging memory is given back and its future resolved, whatever happened.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import traceback
from collections.abc import Callable

from tundish.checkpoint.publish.finalizer import Finalizer, Job
from tundish.devices import on_this_device
from tundish.errors import CallbackError, InvalidInputError
from tundish.waiting import Changes, Moment, Thread, wait_for

__all__ = ["SaveQueue"]

_logger = logging.getLogger("tundish.checkpoint")


class SaveQueue:
    """The finalize thread of one kind.

    Args:
        finalizer: of that kind.
        failed: called with the error of a save that failed in the background and what it was.
    """

    def __init__(self, finalizer: Finalizer, failed: Callable[[BaseException, str], None]) -> None:
        self._finalizer = finalizer
        self.options = finalizer.options
        self._failed = failed
        # Says that there may be something to do; whether there is, `_pending` and `_is_closing` say.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        # The one that has `_turn`: where Ctrl-C came while a thread was started, nobody knows of it, and another is.
        self._thread: threading.Thread | None = None
        self._turn = threading.Lock()
        self._process = os.getpid()
        self._pending: list[Job] = []
        self._changes = Changes()
        self._is_closing = False
        self._has_ended = Moment()

    def steps_under_way(self) -> list[int]:
        """Steps of the saves that are not over, in order."""
        with self._changes.lock:
            return [job.save.step for job in self._pending]

    def wait_for_turn(self) -> None:
        """Block until at most one save is not over: that one may be written while the next is staged."""
        self._changes.wait_until(lambda: len(self._pending) < 2)

    def start(self) -> None:
        """Have the thread there, before ranks agree on a save: where it cannot be started, the others have to hear."""
        if self._thread is None and not self._is_closing:
            name = f"tundish-{self._finalizer.kind}-finalize"
            # Functions of the caller's, conversions and callbacks, run there too.
            thread = Thread(on_this_device(self._run), name)
            thread.start()
            self._thread = self._thread or thread

    def submit(self, job: Job) -> None:
        """Take over a save; one that cannot be, as the lane is closed, fails and gives back what it has.

        Does nothing with one that was taken over before Ctrl-C interrupted this.
        """
        with self._changes.lock:
            if job in self._pending or job.is_over:
                return
            if not self._is_closing:
                # First, so that what is taken over, by one call, is never without a thread that looks at it.
                self._wake.put(None)
                self._pending.append(job)
                return
            job.is_over = True
        error = InvalidInputError(f"{job.what}: the checkpointer was closed while the save was taken")
        self._give_back(job)
        self._finalizer.abandon(job)
        job.save.fail(error)
        raise error

    def is_own_thread(self) -> bool:
        """Whether the caller is called by this lane, and so would wait for itself."""
        return threading.current_thread() is self._thread

    def wait(self, timeout: float | None) -> bool:
        """Block until no save is under way; whether it came to that in time."""
        return self._changes.wait_until(lambda: not self._pending, timeout)

    def finish(self) -> None:
        """Take no more saves, and block until those that it has are over, and the thread has ended.

        May be called again, by any thread, where a call was interrupted.
        """
        with self._changes.lock:
            self._is_closing = True
        self._wake.put(None)
        if self._thread is not None and os.getpid() == self._process:
            # A join that Ctrl-C ends takes the thread for ended, in some versions of Python.
            wait_for(self._has_ended.wait)

    def close(self) -> None:
        """Let go of the voter. After `finish`."""
        self._finalizer.close()

    # From here on everything runs on the finalize thread.

    def _run(self) -> None:
        if not self._turn.acquire(blocking=False):
            return
        self._thread = threading.current_thread()
        try:
            while (job := self._next()) is not None:
                self._finish(job)
                del job
        finally:
            self._has_ended.come()

    def _next(self) -> Job | None:
        """The save that is to be finished; None once the lane is closed and has none."""
        while True:
            self._wake.get()
            with self._changes.lock:
                if self._pending:
                    return self._pending[0]
                if self._is_closing:
                    return None

    def _give_back(self, job: Job) -> None:
        if job.undo is not None:
            # Perhaps for the second time, where it was interrupted.
            job.undo()
        if isinstance(job.staged, BaseException):
            # As do those of what interrupted the staging.
            traceback.clear_frames(job.staged.__traceback__)
        elif job.staged is not None:
            job.staged.release()
        job.release()

    def _finish(self, job: Job) -> None:
        error: BaseException | None = None
        try:
            self._finalizer.finish(job)
        except BaseException as caught:  # noqa: BLE001 (whatever it is, it is the save's failure)
            error = caught
            # They hold on to what was staged until somebody collects their cycle.
            traceback.clear_frames(caught.__traceback__)
        # Asked once: a caller that Ctrl-C interrupts takes it back.
        was_answered = job.is_answered
        if isinstance(error, CallbackError):
            # It is the future's alone, which perhaps nobody asks. A log that cannot be written ends no thread.
            with contextlib.suppress(Exception):
                _logger.error("a callback failed", exc_info=error)
        elif error is not None and not was_answered:
            # First: to remove what lies in the root may take long, or for ever where a file system hangs. And before
            # anybody is told that the save is over: the next call is to know of it.
            self._failed(error, job.what)
        if error is not None:
            self._finalizer.tell(job, error)
        if error is not None and not job.is_published:
            self._finalizer.abandon(job)
        self._give_back(job)
        with self._changes.lock:
            job.is_over = True
            self._pending.remove(job)
            self._changes.tell()
        try:
            if error is None:
                job.save.finish(job.target)
            else:
                job.save.fail(error)
        except BaseException:
            # Of a function that waited for the future, which may even exit; the next save is none of its business.
            with contextlib.suppress(Exception):
                _logger.exception("a callback of the future of %s failed", job.what)
        is_unheard = was_answered and not job.is_answered
        if is_unheard and error is not None and not isinstance(error, CallbackError):
            # Ctrl-C ended the caller's wait after it was counted on to hear of this.
            self._failed(error, job.what)
