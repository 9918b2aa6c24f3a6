"""The steps of an iteration for its caller: prefetched by a thread, or made when they are asked for.

Invariants:
- The thread keeps neither the loader nor its iterator alive, so both are freed when nobody uses them.
- The thread ends when everything that was sent in the iteration is read, also where its caller left.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Protocol

from tundish.devices import on_this_device
from tundish.errors import TimedOutError
from tundish.scatter.loader.bounded_queue import BoundedQueue
from tundish.scatter.loader.epoch_source import Epoch, Step
from tundish.scatter.session import Session

__all__ = ["Inline", "Prefetcher", "Steps"]

# How often a thread that is far enough ahead looks for ranks that are gone, and a caller for signals.
_POLL_SECONDS = 0.1
# How much longer a caller waits than the source, which may name another rank to all.
_GRACE_SECONDS = 1.0


class Steps(Protocol):
    """The steps of one iteration, for its caller."""

    def next_step(self) -> Step | None:
        """The next step; None at the end."""

    def leave(self) -> None:
        """No more steps are wanted. Tells the other ranks; does not wait for them."""

    def join(self, seconds: float, /) -> bool:
        """Whether the iteration is over on this rank within so many seconds."""

    def close_when_over(self, session: Session) -> None:
        """Close the session, once no thread uses it."""

    @property
    def ready(self) -> tuple[int, int]:
        """How many steps are prefetched, and their bytes."""


# Where a loader and its iterator are garbage together, the sockets behind them have to outlive them, as they tell the
# other ranks that this one left. A prefetching thread keeps them alive by itself.
_under_way: set[Inline] = set()


class Inline:
    """Steps that the caller's thread makes, on the source."""

    ready = (0, 0)

    def __init__(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self._taken = 0
        self._is_over = False
        _under_way.add(self)

    def next_step(self) -> Step | None:
        try:
            step = self._epoch.next_step()
            if step is None:
                self._epoch.finish()
        except BaseException:
            self.leave()
            raise
        if step is None:
            self._is_over = True
            _under_way.discard(self)
        else:
            self._taken += 1
        return step

    def leave(self) -> None:
        if not self._is_over:
            self._is_over = True
            with contextlib.suppress(Exception):
                self._epoch.leave(self._taken)
            _under_way.discard(self)

    def join(self, _: float, /) -> bool:
        return True

    def close_when_over(self, session: Session) -> None:
        session.close()


class Prefetcher:
    """Steps that a thread makes, `max_steps` and `max_bytes` ahead of the caller.

    Args:
        epoch: makes the steps, on the thread.
        timeout: for how many seconds a caller waits without a sign of the source; None without end.
        source: the source's rank, for the error.
    """

    def __init__(
        self, epoch: Epoch, *, max_steps: int, max_bytes: int, timeout: float | None, source: int
    ) -> None:
        self._epoch = epoch
        self._timeout = timeout
        self._source = source
        self._queue = BoundedQueue[Step](max_steps, max_bytes)
        self._cleanup = _Cleanup()
        # The device on which the source's loader is read is the caller's.
        make = on_this_device(_make_steps)
        self._thread = threading.Thread(
            target=make, args=(epoch, self._queue, self._cleanup), name="tundish-dispatch", daemon=True
        )
        self._thread.start()

    @property
    def ready(self) -> tuple[int, int]:
        return self._queue.contents

    def next_step(self) -> Step | None:
        queue, begin = self._queue, time.monotonic()
        while not queue.wait(_POLL_SECONDS):
            waited = time.monotonic() - max(begin, self._epoch.last_heard)
            if self._timeout is not None and waited > self._timeout + _GRACE_SECONDS:
                raise TimedOutError(
                    f"the source, rank {self._source}, gave nothing within {self._timeout:.4g} s: hung, stopped, "
                    "reading, or elsewhere in the program"
                )
        return queue.get()

    def leave(self) -> None:
        if not self._queue.is_closed():
            self._queue.close()
            self._epoch.report_exit(self._queue.taken)

    def join(self, seconds: float, /) -> bool:
        deadline = time.monotonic() + seconds
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(_POLL_SECONDS)
        return not self._thread.is_alive()

    def close_when_over(self, session: Session) -> None:
        self._cleanup.set(session)


class _Cleanup:
    """A session that is closed when a thread is over with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_over = False
        self._session: Session | None = None

    def set(self, session: Session) -> None:
        with self._lock:
            self._session = session
            if not self._is_over:
                return
        session.close()

    def thread_is_over(self) -> None:
        with self._lock:
            self._is_over = True
        if self._session is not None:
            self._session.close()


def _make_steps(epoch: Epoch, queue: BoundedQueue[Step], cleanup: _Cleanup) -> None:
    try:
        try:
            _fill(epoch, queue)
            queue.end()
        except BaseException as error:  # noqa: BLE001 (raised where steps are taken)
            epoch.report_exit(queue.end(error, after=epoch.steps_before(error)))
        with contextlib.suppress(BaseException):
            epoch.leave(queue.taken)
    finally:
        cleanup.thread_is_over()


def _fill(epoch: Epoch, queue: BoundedQueue[Step]) -> None:
    while not queue.is_closed():
        while not queue.wait_for_room(_POLL_SECONDS):
            epoch.check_peers()
        if queue.is_closed():
            return
        step = epoch.next_step()
        if step is None:
            # Until all steps are taken, this rank or another one may leave early.
            while not queue.wait_until_empty(_POLL_SECONDS):
                epoch.check_peers()
            if not queue.is_closed():
                epoch.finish()
            return
        queue.put(step, step.size)
        # Else the batch would live until the next one is made.
        del step
