"""The workers of a pool: they are started, watched and replaced.

Owns the workforce and the thread that hears of starts and deaths. What always holds:

1. A dead worker is buried on the board before anything else, so that what it had run is told and nothing waits for it.
2. It is replaced as long as `max_restarts` allows; when one died `_STILLBORN` times in a row before it could work, or
   none is left, the pool breaks down and says why.
3. When the thread ends, no worker lives.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Final, Protocol

from tundish import _native
from tundish.errors import WorkerDiedError
from tundish.shm.pool.ends import Line
from tundish.shm.pool.reception import Reception
from tundish.shm.pool.worker import FAILED, READY, Saying
from tundish.shm.pool.workforce import Death, Workforce, WorkforceLostError

__all__ = ["Supervisor"]

_STILLBORN: Final = 3
# Somebody kills workers, or memory is short: that may pass, where a worker that ends by itself will do so again.
_KILLED_STILLBORN: Final = 30
# Of what is tolerated; a little less than all of it, since thirds are rounded.
_ENOUGH: Final = 0.99
_ENDING_SECONDS: Final = 30.0
_LONGEST_MESSAGE: Final = 64


class Tasks(Protocol):
    """What the supervisor needs of the engine."""

    def lose(self, tickets: list[int], error_of: Callable[[str], Exception]) -> None: ...
    def break_down(self, failure: str) -> None: ...


class Supervisor:
    """The workers of one pool.

    Args:
        board: the pool's.
        reception: where workers say that they are ready.
        lifeline: workers end when it is closed.
        workforce: starts and kills processes.
        workers: how many there are to be.
        max_restarts: dead workers that are replaced; None for all.
        is_staged: whether the others are started when the first can work.
        hint: what may be wrong where workers do not start.
    """

    def __init__(
        self,
        board: _native.TaskQueue,
        reception: Reception,
        lifeline: Line,
        workforce: Workforce,
        *,
        workers: int,
        max_restarts: int | None,
        is_staged: bool,
        hint: str,
    ) -> None:
        self._board = board
        self._reception = reception
        self._lifeline = lifeline
        self._workforce = workforce
        self._workers = workers
        self._restarts_left = max_restarts
        self._hint = hint
        self._waiting = set(range(1, workers)) if is_staged else set()
        self._starting: set[int] = set()
        self._ready: set[int] = set()
        self._killed: set[int] = set()
        # Of each number, how much of what is tolerated its workers have died in a row before they could work.
        self._stillborn: defaultdict[int, float] = defaultdict(float)
        self._last_words = ""
        self._wake = Line()
        self._ending: float | None = None
        self._is_forced = False
        self._tasks: Tasks
        self._thread = threading.Thread(target=self._run, name="tundish-pool-workers", daemon=True)

    def start(self, tasks: Tasks) -> None:
        """Start the workers; `tasks` hears of deaths."""
        self._tasks = tasks
        self._thread.start()

    @property
    def is_started(self) -> bool:
        """Whether the thread came up, and so lets go of everything when it ends."""
        return self._thread.ident is not None

    def close(self) -> None:
        """Let go of what is its own. For one that was never started."""
        self._wake.close()

    def end(self, patience: float | None, *, is_forced: bool) -> None:
        """Let workers end, at once if `is_forced`, and wait until none lives. Not on the supervisor's own thread.

        `patience`: seconds that whoever ends the pool gives to what is stuck: a worker may be stopped, or have threads
        that do not end.
        """
        self._is_forced = self._is_forced or is_forced
        seconds = _ENDING_SECONDS if patience is None else min(patience, _ENDING_SECONDS)
        self._ending = time.monotonic() + (0 if is_forced else seconds)
        self._board.stop()
        self._nudge()
        self._thread.join()

    def hurry(self) -> None:
        """Let an end that is under way be by force."""
        self._is_forced = True
        self._ending = time.monotonic()
        self._nudge()

    def _nudge(self) -> None:
        try:
            self._wake.parent.send(b"!", socket.MSG_DONTWAIT)
        except OSError:
            # Nudged already, or over.
            return

    # ---- The thread ----

    def _run(self) -> None:
        try:
            for worker in sorted(set(range(self._workers)) - self._waiting):
                self._start(worker)
            while self._alive() or self._ending is None:
                if self._ending is not None:
                    self._end_starts()
                self._watch()
                if self._ending is not None and time.monotonic() >= self._ending:
                    self._kill(self._alive())
        except WorkforceLostError as error:
            # Nobody is left to kill workers; they end by themselves.
            self._lifeline.close()
            self._break(str(error))
        except Exception as error:  # noqa: BLE001 (told to whoever waits for a task)
            self._break(f"its workers cannot be watched any more: {error!r}")
        finally:
            self._workforce.close()
            for end in (self._lifeline, self._reception, self._wake):
                end.close()

    def _alive(self) -> set[int]:
        return self._starting | self._ready

    def _start(self, worker: int) -> None:
        try:
            self._workforce.start(worker)
        except Exception as error:
            raise WorkforceLostError(f"a worker cannot be started: {error}") from error
        self._starting.add(worker)

    def _end_starts(self) -> None:
        """End workers that are not ready, which have had no task: imports of seconds would be waited for in vain."""
        # Who has had one said before that it is ready.
        self._hear_all()
        self._kill(self._starting)

    def _kill(self, workers: set[int]) -> None:
        """End workers by force, of a pool that ends; each once, as a pipe has no room for a hundred at every death."""
        for worker in workers - self._killed:
            self._workforce.kill(worker)
            self._killed.add(worker)

    def _watch(self) -> None:
        """Wait for something to happen, and deal with it."""
        poll = select.poll()
        for number in (self._reception.fileno(), self._wake.child.fileno(), *self._workforce.descriptors()):
            poll.register(number, select.POLLIN)
        poll.poll(None if self._ending is None else max(0.0, self._ending - time.monotonic()) * 1000 + 1)
        _drain(self._wake.child)
        # First what workers said, then who died.
        self._hear_all()
        for death in self._workforce.deaths():
            self._bury(death)

    def _hear_all(self) -> None:
        for saying in self._reception.sayings():
            self._hear(saying)

    def _hear(self, saying: Saying) -> None:
        if saying.what == FAILED:
            self._last_words = saying.text
        elif saying.what == READY and saying.worker in self._starting:
            self._starting.discard(saying.worker)
            self._ready.add(saying.worker)
            self._stillborn.pop(saying.worker, None)
            while self._waiting and self._ending is None:
                self._start(self._waiting.pop())

    def _bury(self, death: Death) -> None:
        was_ready = death.worker in self._ready
        self._ready.discard(death.worker)
        self._starting.discard(death.worker)
        lost = self._board.bury(death.worker)
        self._tasks.lose(lost, lambda task: self._error(task, death))
        self._reception.forget(death.pid)
        if self._ending is not None:
            return
        if not was_ready:
            self._stillborn[death.worker] += 1 / (_KILLED_STILLBORN if death.is_by_kill else _STILLBORN)
        if self._stillborn[death.worker] >= _ENOUGH:
            self._break(f"workers do not start: the last one {death}. {self._last_words or self._hint}")
        elif self._restarts_left == 0:
            if not self._alive():
                self._break(f"its last worker {death}, and no more are restarted (max_restarts)")
        else:
            if self._restarts_left is not None:
                self._restarts_left -= 1
            self._start(death.worker)

    def _error(self, task: str, death: Death) -> Exception:
        if self._is_forced:
            reason = f"the pool was ended while worker process {death.pid} ran it"
        else:
            reason = f"while it ran, its worker, process {death.pid}, {death}"
        return WorkerDiedError(
            f"{task} has no result: {reason}; it is not tried again", death.pid, death.status
        )

    def _break(self, reason: str) -> None:
        self._is_forced = True
        self._ending = time.monotonic()
        self._tasks.break_down(f"the pool is broken: {reason}")


def _drain(line: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while line.recv(_LONGEST_MESSAGE, socket.MSG_DONTWAIT):
            pass
