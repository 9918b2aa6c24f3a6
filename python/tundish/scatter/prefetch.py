"""The steps of an iteration for its caller: prefetched by a thread, or made when they are asked for.

`EpochIterator` is what a loop has. It takes steps from `PrefetchedSteps`, which a thread makes, or from `InlineSteps`.

Invariants:
- The thread keeps neither the loader nor its iterator alive, so both are freed when nobody uses them.
- The thread ends when everything that was sent in the iteration is read, also where its caller left.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Self, TypeVar

from tundish.callers_device import on_this_device
from tundish.daemon_thread import is_done
from tundish.errors import InvalidInputError, TimedOutError
from tundish.scatter.iteration import Epoch, LoaderStep

FORKED = "this DispatchLoader was made before a fork: make one in the process that uses it"

T_co = TypeVar("T_co", covariant=True)

# How often a thread that is far enough ahead looks for ranks that are gone, and a caller for its deadline.
_POLL_SECONDS = 0.1
# How much longer a caller waits than the source, which may name another rank to all.
_GRACE_SECONDS = 1.0

# Steps whose iteration is not over. They tell the other ranks when this rank leaves, so their sockets must not be
# collected together with the loader.
_active_steps: set[InlineSteps] = set()


class InlineSteps:
    """Steps that the caller's thread makes when it asks for them, on the source.

    Attributes:
        epoch: makes the steps.
        over: done when no thread uses the epoch any more.
    """

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self.over: Future[None] = Future()
        self.over.set_result(None)
        self._taken = 0
        self._is_left = False
        _active_steps.add(self)

    @property
    def ready(self) -> tuple[int, int]:
        """How many steps are prefetched, and their bytes."""
        return 0, 0

    def next_step(self) -> LoaderStep | None:
        """The next step; None at the end."""
        try:
            step = self.epoch.next_step()
            if step is None:
                self.epoch.finish()
        except BaseException:
            self.leave()
            raise
        if step is None:
            _active_steps.discard(self)
        else:
            self._taken += 1
        return step

    def leave(self) -> None:
        """Leave the iteration. Tells the other ranks, without waiting for them."""
        if not self._is_left:
            self._is_left = True
            with contextlib.suppress(Exception):
                self.epoch.leave(self._taken)
            _active_steps.discard(self)

    def join(self, seconds: float) -> bool:
        """Whether `over` is done within so many seconds."""
        return is_done(self.over, seconds)


class PrefetchedSteps(InlineSteps):
    """Steps that a thread makes, `max_steps` and `max_bytes` ahead of the caller. One step may have more bytes.

    Args:
        epoch: makes the steps, on the thread.
        max_steps: how many steps may be ready.
        max_bytes: how many bytes they may have.
        timeout: for how many seconds a caller waits without a sign of the source; None without end.
    """

    def __init__(self, epoch: Epoch, *, max_steps: int, max_bytes: int, timeout: float | None) -> None:
        super().__init__(epoch)
        self.over = Future()
        self._max_steps = max_steps
        self._max_bytes = max_bytes
        self._timeout = timeout
        self._changed = threading.Condition()
        self._steps: deque[LoaderStep] = deque()
        self._bytes = 0
        self._is_ended = False
        self._error: BaseException | None = None
        # The device on which the source's loader is read is the caller's.
        threading.Thread(target=on_this_device(self._run), name="tundish-dispatch", daemon=True).start()

    @property
    def ready(self) -> tuple[int, int]:
        return len(self._steps), self._bytes

    def next_step(self) -> LoaderStep | None:
        begin = time.monotonic()
        while not self._wait_for(lambda: bool(self._steps) or self._is_ended):
            waited = time.monotonic() - max(begin, self.epoch.last_heard)
            if self._timeout is not None and waited > self._timeout + _GRACE_SECONDS:
                raise TimedOutError(
                    f"the source, rank {self.epoch.scatter.participants.source}, sent nothing within "
                    f"{self._timeout:.4g} s. It hangs, was stopped, reads its data, or is elsewhere in the program: "
                    "look at its stack, or give the process group a longer timeout"
                )
        with self._changed:
            if self._steps:
                step = self._steps.popleft()
                self._bytes -= step.size
                self._taken += 1
                self._changed.notify_all()
                return step
            error, self._error = self._error, None
        if error is None:
            return None
        try:
            raise error
        finally:
            # Else the error keeps the caller's frames, and with them the batch.
            del error

    def leave(self) -> None:
        with self._changed:
            was_left, self._is_left, self._error = self._is_left, True, None
            self._steps.clear()
            self._bytes = 0
            self._changed.notify_all()
        if not was_left:
            self.epoch.report_exit(self._taken)

    def _run(self) -> None:
        try:
            try:
                self._make_steps()
                self._end()
            except BaseException as error:  # noqa: BLE001 (raised where steps are taken)
                self.epoch.report_exit(self._end(error))
            with contextlib.suppress(BaseException):
                self.epoch.leave(self._taken)
        finally:
            _active_steps.discard(self)
            self.over.set_result(None)

    def _make_steps(self) -> None:
        while True:
            while not self._wait_for(self._has_room):
                self.epoch.check_peers()
            if self._is_left:
                return
            step = self.epoch.next_step()
            if step is None:
                # Until all steps are taken, this rank or another one may leave early.
                while not self._wait_for(lambda: not self._steps):
                    self.epoch.check_peers()
                if not self._is_left:
                    self.epoch.finish()
                return
            with self._changed:
                if not self._is_left:
                    self._steps.append(step)
                    self._bytes += step.size
                    self._changed.notify_all()
            # Else the batch would live until the next one is made.
            del step

    def _end(self, error: BaseException | None = None) -> int:
        """Make no more steps. Returns how many the caller gets in all, before `error` is raised."""
        most = None if error is None else self.epoch.steps_before_error(error)
        with self._changed:
            self._is_ended = True
            # An error that nobody takes would keep the frames that it was raised in.
            self._error = None if self._is_left else error
            while most is not None and self._steps and self._taken + len(self._steps) > most:
                self._bytes -= self._steps.pop().size
            self._changed.notify_all()
            return self._taken + len(self._steps)

    def _has_room(self) -> bool:
        return not self._steps or (len(self._steps) < self._max_steps and self._bytes < self._max_bytes)

    def _wait_for(self, condition: Callable[[], bool]) -> bool:
        """Whether `condition` comes true soon, or the caller has left."""
        try:
            with self._changed:
                return self._changed.wait_for(lambda: self._is_left or condition(), _POLL_SECONDS)
        except RuntimeError as error:
            # Ctrl-C while `Condition.wait` takes its lock again: leaving the block releases a lock that is not held.
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            raise


class EpochIterator(Iterator[T_co]):
    """Iterates over this rank's batches of one epoch. Deleting it leaves the loop.

    Args:
        steps: the steps of the iteration.
        hand_out: returns the batch of a step; called with None at the end. Its second argument is how many seconds the
            loop waited for the step.
    """

    def __init__(self, steps: InlineSteps, hand_out: Callable[[LoaderStep | None, float], T_co]) -> None:
        self._steps = steps
        self._hand_out = hand_out
        self._process = os.getpid()
        self._is_over = False
        self._left_because: str | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T_co:
        self._raise_if_left()
        if self._is_over:
            raise StopIteration
        if os.getpid() != self._process:
            raise InvalidInputError(FORKED)
        begin = time.monotonic()
        try:
            try:
                step = self._steps.next_step()
            except Exception:
                self._raise_if_left()
                raise
            # A signal's handler may have left the loop meanwhile.
            self._raise_if_left()
            batch = self._hand_out(step, time.monotonic() - begin)
        except BaseException:
            self.close()
            raise
        if step is None:
            self._is_over = True
            raise StopIteration
        return batch

    def close(self, why: str | None = None) -> None:
        """Leave the loop, where it is not over. `why`: where it is not the caller that leaves it."""
        if not self._is_over and os.getpid() == self._process:
            self._left_because = why
            self._is_over = True
            self._steps.leave()

    def _raise_if_left(self) -> None:
        if self._left_because is not None:
            # The end of the iteration would look like the end of the data.
            raise InvalidInputError(f"this iterator has no more steps: {self._left_because}")

    def __del__(self) -> None:
        # At the end of the interpreter, modules may be gone.
        try:  # noqa: SIM105
            self.close()
        except Exception:  # noqa: BLE001, S110
            pass
