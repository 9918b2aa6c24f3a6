"""Waits that Ctrl-C ends, and that it leaves whole.

What always holds: no wait is for long. A signal that comes between the interpreter's last look for one and the wait for
a lock does not end that wait, which for a checkpoint is minutes and for a lost rank hours; so it is begun again, and
the signal looked for, twice a second.

Ctrl-C raises in the main thread between any two steps of the interpreter. What the standard library writes in Python
(`threading.Event` and `Condition`, `concurrent.futures.Future`) then may keep its lock for ever, and the thread that
wants it next hangs; a bare lock in a `with` is taken and given back in one step. What is here has nothing else.
"""

from __future__ import annotations

import _thread
import contextlib
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures._base import FINISHED
from typing import TYPE_CHECKING, Any, TypeVar

from tundish.timeouts import deadline_of

if TYPE_CHECKING:
    # To the checker it is final.
    class _RLock:
        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...
        def release(self) -> None: ...
        def __enter__(self) -> bool: ...
        def __exit__(self, *_: object) -> None: ...
else:
    _RLock = type(threading.RLock())

__all__ = [
    "Changes",
    "Guard",
    "Moment",
    "SteadyFuture",
    "Thread",
    "Waiters",
    "run_aside",
    "taken",
    "to_its_end",
    "wait_for",
    "was_let_go",
]

_LONGEST_SECONDS = 0.5
# So often whoever resolves a future waits so long for its lock, which nobody keeps for longer than some steps.
_TURNS = 10
_TURN_SECONDS = 0.5

T = TypeVar("T")


def wait_for(wait: Callable[[float], bool], seconds: float | None = None) -> bool:
    """Whether `wait`, which blocks for up to as many seconds as it is given, came to its end within `seconds`.

    None waits without end. As `Moment.wait`. Raises as `deadline_of`.
    """
    deadline = deadline_of(seconds)
    while True:
        left = _LONGEST_SECONDS if deadline is None else min(_LONGEST_SECONDS, deadline - time.monotonic())
        if wait(max(0.0, left)):
            return True
        if left < _LONGEST_SECONDS:
            return False


class Moment:
    """Something that comes once, as a `threading.Event`, but that no wait can hold up.

    An event has a lock which Ctrl-C, if it comes right after a wait has taken it, leaves taken: whoever then says that
    the event has come waits for ever. Here that one takes nothing.
    """

    def __init__(self) -> None:
        self._has_come = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def come(self) -> None:
        """It has come."""
        self._has_come = True
        with contextlib.suppress(RuntimeError):
            self._gate.release()

    def has_come(self) -> bool:
        return self._has_come

    def wait(self, seconds: float) -> bool:
        """Whether it came within so many seconds."""
        if not self._has_come and self._gate.acquire(timeout=seconds):
            # For others who wait; unless somebody who says again that it has come did that just now.
            with contextlib.suppress(RuntimeError):
                self._gate.release()
        return self._has_come


class Changes:
    """The lock of what several threads change, and the wait for its next change: a `threading.Condition` in two parts.

    `lock`: for a `with`, in which nobody waits.
    """

    def __init__(self) -> None:
        # Re-entrant for a signal's handler.
        self.lock = threading.RLock()
        self._next = Moment()

    def tell(self) -> None:
        """Something has changed. Under the lock."""
        upcoming, self._next = self._next, Moment()
        upcoming.come()

    def wait_until(self, holds: Callable[[], bool], seconds: float | None = None) -> bool:
        """Whether `holds`, asked under the lock, came to be true within so many seconds; None waits without end."""

        def look(pause: float) -> bool:
            deadline = time.monotonic() + pause
            while True:
                upcoming = self._next
                with self.lock:
                    if holds():
                        return True
                if not upcoming.wait(max(0.0, deadline - time.monotonic())):
                    return False

        return wait_for(look, seconds)


class _Event(threading.Event):
    """A `Moment` where the standard library wants an event."""

    def __init__(self) -> None:
        super().__init__()
        self._moment = Moment()

    def is_set(self) -> bool:
        return self._moment.has_come()

    def set(self) -> None:
        self._moment.come()

    def clear(self) -> None:
        self._moment = Moment()

    def wait(self, timeout: float | None = None) -> bool:
        return wait_for(self._moment.wait, timeout)


def run_aside(run: Callable[[], None]) -> None:
    """Have a thread without a name do `run`, which raises nothing; begun in one step of the interpreter.

    Does not wait until the thread is there, which takes some tenth of a millisecond. Raises `RuntimeError` where there
    can be no more.
    """
    if sys.is_finalizing():
        # Later versions of Python say so themselves; in 3.11 it would never come up.
        raise RuntimeError("no thread is started any more: the interpreter ends")
    _thread.start_new_thread(run, ())


class Thread(threading.Thread):
    """A daemon thread of which nothing stays behind where Ctrl-C interrupts its start.

    In the base's `start` the new thread may be held up by it, or be noted for ever though it never began, with all that
    it holds. So here that is done on a thread which no signal reaches, begun in one step of the interpreter.
    """

    def __init__(self, target: Callable[..., object], name: str, args: tuple[Any, ...] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)

    def start(self) -> None:
        """As that of the base; where Ctrl-C interrupts it, the thread comes up, or nothing knows of it."""
        begin, over = super().start, Moment()
        errors: list[Exception] = []

        def aside() -> None:
            try:
                begin()
            except Exception as error:  # noqa: BLE001 (the caller raises it)
                errors.append(error)
            finally:
                over.come()

        run_aside(aside)
        wait_for(over.wait)
        if errors:
            raise errors.pop()


class Waiters(list[Any]):
    """Those who wait for a future in `concurrent.futures.wait` and `as_completed`, by an event that holds up nobody."""

    def append(self, waiter: Any) -> None:
        """Note somebody who begins to wait, perhaps for other futures too. Under the future's lock."""
        if not isinstance(waiter.event, _Event):
            waiter.event = _Event()
        super().append(waiter)


class Guard(_RLock):
    """In the place of a future's condition: the lock alone, which a `with` takes and gives back in one step."""

    __slots__ = ()

    def wait(self, timeout: float | None = None) -> None:
        """Not here: whoever waits does so before, and without the lock."""

    def notify_all(self) -> None:
        """Nobody waits here."""


def taken(guard: Guard) -> Guard:
    """`guard`, taken; in the place of one that Ctrl-C left taken in `concurrent.futures.wait`, another.

    On a thread that no signal reaches.
    """
    for _ in range(_TURNS):
        if guard.acquire(timeout=_TURN_SECONDS):
            return guard
    guard = Guard()
    guard.acquire()
    return guard


class SteadyFuture(Future[T]):
    """A `concurrent.futures.Future` under way, whose users Ctrl-C may interrupt anywhere.

    The base's methods go through a condition, whose lock Ctrl-C may leave taken: whoever has the result hangs then.
    """

    def __init__(self) -> None:
        super().__init__()
        self._condition: Any = Guard()
        self._waiters = Waiters()
        self._over = Moment()
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> T:
        """As that of the base."""
        wait_for(self._over.wait, timeout)
        try:
            return super().result(0)
        finally:
            # Else the error holds on to what it is raised from.
            del self

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As that of the base."""
        wait_for(self._over.wait, timeout)
        return super().exception(0)

    def set_result(self, result: T) -> None:
        """As that of the base, on a thread that no signal reaches."""
        self._result = result
        self._finish(lambda waiter: waiter.add_result(self))

    def set_exception(self, exception: BaseException | None) -> None:
        """As that of the base, on a thread that no signal reaches."""
        self._exception = exception
        self._finish(lambda waiter: waiter.add_exception(self))

    def _finish(self, tell: Callable[[Any], None]) -> None:
        self._condition = guard = taken(self._condition)
        try:
            self._state = FINISHED
            for waiter in self._waiters:
                tell(waiter)
        finally:
            guard.release()
        self._over.come()
        self._invoke_callbacks()  # type: ignore[attr-defined]  # typeshed leaves it out


def to_its_end(work: Callable[[], None], *, hurry: Callable[[], object] | None = None) -> None:
    """Do `work`, on a thread that no signal reaches; what interrupts the caller meanwhile is raised when it is done.

    `hurry`: called when something interrupts the caller, perhaps more than once.
    """
    over = Moment()
    claim = threading.Lock()
    errors: list[BaseException] = []

    def run() -> None:
        # Once: where the start of the thread was interrupted, nobody knows whether it began.
        if not claim.acquire(blocking=False):
            return
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (the caller raises it)
            errors.append(error)
        finally:
            over.come()

    interruption: BaseException | None = None
    is_begun = False
    while True:
        try:
            if interruption is not None and hurry is not None:
                hurry()
            if not is_begun:
                _begin(run)
                is_begun = True
            wait_for(over.wait)
            break
        except BaseException as caught:  # noqa: BLE001 (raised below)
            interruption = caught
    if interruption is not None:
        raise interruption
    if errors:
        raise errors.pop()


def _begin(run: Callable[[], None]) -> None:
    if sys.is_finalizing():
        # Of a generator that is closed as the interpreter ends: no other thread runs any more, nor does one come up.
        run()
        return
    try:
        Thread(run, "tundish-to-its-end").start()
    except RuntimeError:
        # No more threads: here, where a signal may interrupt it.
        run()


def was_let_go(caught: BaseException) -> bool:
    """Whether `caught`, at the `yield` of a context manager, only says that nobody has it any more.

    Ctrl-C that comes as such a block is entered or left leaves it suspended, and some time after, wherever its error's
    traceback is freed, the generator is closed. What comes out of the block's body has been in other frames.
    """
    traceback = caught.__traceback__
    return isinstance(caught, GeneratorExit) and (traceback is None or traceback.tb_next is None)
