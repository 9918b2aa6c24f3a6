"""The life of one pool: how it begins, its two threads, and its end.

Owns the board, the lines and the workforce of a pool, the thread that tends its tasks and, by it, the one that
supervises its workers. The pool itself need not live to see the end. What always holds:

1. A beginning that fails, or that Ctrl-C or a handler of signals ends anywhere, leaves no process, thread or
   descriptor: whoever is first of the pool's thread and of the one that gave up takes care of what is there.
2. Whatever ends the pool's thread, its workers end with it and every future is answered.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from multiprocessing import util
from multiprocessing.context import BaseContext
from typing import Any, Final, Protocol, TypeVar

from tundish import _native
from tundish.errors import PoolError, TundishError
from tundish.shm.pool.arguments import MAIN_GUARD
from tundish.shm.pool.binding import Placed, inherited
from tundish.shm.pool.ends import Line
from tundish.shm.pool.engine import Engine
from tundish.shm.pool.messages import Courier
from tundish.shm.pool.reception import Reception
from tundish.shm.pool.started import StartedWorkers
from tundish.shm.pool.supervisor import Supervisor
from tundish.shm.pool.worker import Link, serve
from tundish.shm.pool.workforce import Workforce
from tundish.shm.pool.zygote import Zygote
from tundish.waiting import Thread

__all__ = ["PATIENCE_SECONDS", "ROOM", "Life"]

# 512 slots of 16 KiB: room for the messages of many workers, and warm in the processor's cache where few are used.
_SLOTS: Final = 512
_SLOT_BYTES: Final = 16 * 1024
ROOM: Final = _SLOT_BYTES - 64
PATIENCE_SECONDS: Final = 30.0


class _Part(Protocol):
    def close(self) -> None: ...


_P = TypeVar("_P", bound=_Part)


class Life:
    """What a pool consists of. Arguments are those of the pool, checked.

    Raises:
        PoolError: the system has no descriptor, process or thread left for it.
    """

    engine: Engine
    _supervisor: Supervisor

    def __init__(
        self,
        pool: object,
        function: Callable[..., Any],
        shared: Mapping[str, Any],
        context: BaseContext,
        courier: Courier,
        workers: int,
        max_restarts: int | None,
    ) -> None:
        # Held by whoever was first: the pool's thread, or the one that gives the beginning up.
        self._claim = threading.Lock()
        self._parts: list[_Part] = []
        self._at_exit: util.Finalize | None = None
        self._thread = Thread(self._run, "tundish-pool-results")
        try:
            self._gather(function, shared, context, courier, workers, max_restarts)
            weakref.finalize(pool, self.engine.drop).atexit = False
            # Before multiprocessing looks for children that are left, at the end of the interpreter or of a worker.
            # Ctrl-C may come when it is there and not known here, to be cancelled: so it keeps nothing alive.
            self._at_exit = util.Finalize(None, _at_exit, (weakref.ref(self),), exitpriority=100)
            self._thread.start()
        except BaseException as error:
            self._give_up()
            if isinstance(error, OSError | RuntimeError) and not isinstance(error, TundishError):
                raise PoolError(f"a pool cannot be started: {error}") from error
            raise

    def _gather(
        self,
        function: Callable[..., Any],
        shared: Mapping[str, Any],
        context: BaseContext,
        courier: Courier,
        workers: int,
        max_restarts: int | None,
    ) -> None:
        """Make all that the pool consists of but its threads."""
        board = _native.TaskQueue(_SLOTS, _SLOT_BYTES)
        lifeline, voice = self._having(Line()), self._having(Line())
        is_forked = context.get_start_method() == "fork"
        workforce = self._having(_workforce(function, shared, context, board, lifeline, voice))
        if isinstance(workforce, Zygote):
            # Not before it is among the parts, which are closed whatever comes.
            workforce.begin()
        reception = Reception(voice, courier)
        self._supervisor = self._having(
            Supervisor(
                board,
                reception,
                lifeline,
                workforce,
                workers=workers,
                max_restarts=max_restarts,
                is_staged=not is_forked,
                hint="" if is_forked else MAIN_GUARD,
            )
        )
        self.engine = Engine(board, reception)

    def _having(self, part: _P) -> _P:
        self._parts.append(part)
        return part

    def _give_up(self) -> None:
        if self._claim.acquire(blocking=False):
            # Should the thread come up after all, it finds the claim taken.
            self._leave()
            self._close()
        else:
            self.end()

    # ---- The pool's thread ----

    def _run(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        is_over = False
        try:
            self._supervisor.start(self.engine)
            is_over = self.engine.tend()
        except Exception as error:  # noqa: BLE001 (told to whoever waits for the pool)
            self.engine.break_down(f"the pool is broken: {error!r}")
        if self._supervisor.is_started:
            self._supervisor.end(self.engine.patience, is_forced=not is_over)
        else:
            self._close()
        self._leave()
        self.engine.finish()

    def _close(self) -> None:
        """Let go of all that the supervisor's thread would have."""
        for part in reversed(self._parts):
            part.close()

    def _leave(self) -> None:
        if self._at_exit is not None:
            self._at_exit.cancel()

    # ---- The end ----

    def join(self) -> None:
        """Wait until the workers have ended. On the pool's own thread it is not waited for."""
        try:
            self._join()
        except BaseException:
            # Ctrl-C: whoever waits no longer wants the rest of it.
            self.end()
            raise

    def end(self) -> None:
        """By force and at once."""
        self.engine.close(cancel=True, patience=0, is_forced=True)
        self._supervisor.hurry()
        self._join()

    def _join(self) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def exit(self) -> None:
        """The interpreter ends."""
        if self._thread.ident is None:
            # It was given up.
            return
        if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
            self.end()
        else:
            self.engine.close(cancel=False, patience=PATIENCE_SECONDS)
            self.join()


def _at_exit(known: weakref.ref[Life]) -> None:
    # Its thread keeps it as long as there is anything to end.
    life = known()
    if life is not None:
        life.exit()


def _workforce(
    function: Callable[..., Any],
    shared: Mapping[str, Any],
    context: BaseContext,
    board: _native.TaskQueue,
    lifeline: Line,
    voice: Line,
) -> Workforce:
    numbers = {
        "board": board.fd,
        "lifeline": lifeline.child.fileno(),
        "voice": voice.child.fileno(),
        "room": ROOM,
    }
    if context.get_start_method() != "fork":
        return StartedWorkers(context, Placed(function, shared), **numbers)
    parent = os.getpid()

    def work(worker: int) -> None:
        serve(Link(worker=worker, parent=parent, **numbers), lambda: inherited(function, shared))

    return Zygote(work)
