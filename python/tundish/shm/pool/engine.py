"""The tasks of a pool: which are on the board, which wait for room, and who is told of their answers.

Owns the board's parent side. One thread of the pool, its keeper, tends it when no caller does. What always holds:

1. A task is in one place: waiting (`_backlog`), on the board (`_outstanding`), or finished. All moves are made under
   `_lock`; receivers are called under it and do no more than note what came.
2. Ctrl-C can split what a caller's thread does here, and nothing is lost by it: answers stay in `_arrived`, and what is
   taken back in `_revoked` and `_withdrawn`, until each of them is noted, noting twice changes nothing, and only the
   keeper moves tasks from the backlog onto the board.
3. Whoever collects does so for all. A caller that leaves while tasks are outstanding passes this on to the keeper,
   which else sleeps as long as a caller collects.
4. A child made by `fork` has nothing of it: neither the board, which its parent goes on to use, nor the memory that
   was kept for messages.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, repeat
from typing import Any, Protocol

from tundish import _native
from tundish.errors import PoolError
from tundish.shm.pool.futures import TaskFuture
from tundish.shm.pool.messages import IN_PARCEL, LOST
from tundish.shm.pool.no_board import NoBoard
from tundish.shm.pool.reception import Reception
from tundish.timeouts import deadline_of

__all__ = ["Engine", "Receiver"]

# The longest that anybody sleeps without a look; all that matters wakes them sooner.
_LOOK_AROUND_SECONDS = 1.0
_PARK_SECONDS = 0.05
_COURTESY_SECONDS = 5e-4
# So often a caller who submits ahead of the workers lets the keeper work: tasks, and how long at least.
_BREATH = 256
_BREATH_SECONDS = 1e-4
_SHUT_DOWN = "the pool is shut down: make another one"
_ENDED = "the pool was shut down, and ended by force before a worker was free"
_CANCELLED = "the pool was shut down with cancel=True"


class Receiver(Protocol):
    """Who is told of answers: a future, or a map. May be called twice with the same answer."""

    def arrive(self, number: int, kind: int, payload: Any, /) -> None: ...
    def is_ready(self) -> bool: ...
    def park(self, seconds: float) -> None: ...
    def describe(self, number: int, /) -> str: ...


class Engine:
    """The tasks of one pool.

    Args:
        board: the pool's, of which this is the parent.
        reception: opens parcels of workers.
    """

    def __init__(self, board: _native.TaskQueue, reception: Reception) -> None:
        self.pid = os.getpid()
        self.main = threading.main_thread().ident
        self._board: _native.TaskQueue | NoBoard = board
        self._reception = reception
        self._lock = threading.Lock()
        self._outstanding: dict[int, tuple[Receiver, int]] = {}
        self._lent: dict[int, _native.SendBuffer] = {}
        self._backlog: deque[tuple[TaskFuture, int, Any, _native.SendBuffer | None]] = deque()
        self._arrived: deque[Sequence[tuple[int, int, Any]]] = deque()
        self._announcements: deque[tuple[TaskFuture, tuple[Any, ...]]] = deque()
        # What was taken back, from the board and from the backlog, until that is noted everywhere.
        self._revoked: deque[int] = deque()
        self._withdrawn: deque[TaskFuture] = deque()
        self._abandoned: deque[Receiver] = deque()
        # The thread that collects as a caller. Set without a lock: two at once do no harm.
        self._collector: int | None = None
        # The thread that tends, which runs callbacks too.
        self._keeper: int | None = None
        # How often a caller has collected.
        self._calls = 0
        self._refusal: str | None = None
        self._failure: str | None = None
        self._patience: float | None = None
        self._is_forced = False
        self._is_dropped = False
        self._is_disowned = False
        self._progress = 0
        _engines.add(self)

    # ---- Tasks come ----

    def submit(self, future: TaskFuture, kind: int, payload: Any, parcel: _native.SendBuffer | None) -> None:
        """Put a task on the board, or behind those that wait for room there."""
        with self._lock:
            self.check_open()
            if not self._backlog:
                ticket = self._board.put(kind, payload)
                if ticket is not None:
                    self._note(ticket, future, parcel)
                    return
            self._backlog.append((future, kind, payload, parcel))
            is_time = len(self._backlog) % _BREATH == 0
        if is_time and self._board.is_ready():
            # The keeper alone can go on, and would wait for the interpreter as long as a caller may keep it.
            time.sleep(_BREATH_SECONDS)

    def put_many(self, receiver: Receiver, first: int, kind: int, payloads: list[Any]) -> int:
        """Put `payloads` on the board, numbered from `first` on; how many found room."""
        with self._lock:
            self.check_open()
            if self._backlog:
                return 0
            tickets = self._board.put_many(kind, payloads, 0)
            numbers = range(first, first + len(tickets))
            self._outstanding.update(zip(tickets, zip(repeat(receiver), numbers, strict=False), strict=True))
            return len(tickets)

    def put(
        self, receiver: Receiver, number: int, kind: int, payload: Any, parcel: _native.SendBuffer | None
    ) -> bool:
        """Put one task on the board, if there is room."""
        with self._lock:
            self.check_open()
            ticket = None if self._backlog else self._board.put(kind, payload)
            if ticket is None:
                return False
            self._outstanding[ticket] = receiver, number
            if parcel is not None:
                self._lent[ticket] = parcel
            return True

    def check_open(self) -> None:
        """Raise unless tasks may be submitted."""
        reason = self._failure
        if self._refusal is not None and reason in (None, _ENDED):
            # What the end says is for tasks that were never begun.
            reason = self._refusal
        if reason is not None:
            raise PoolError(reason)

    def _note(self, ticket: int, future: TaskFuture, parcel: _native.SendBuffer | None) -> None:
        future.ticket = ticket
        self._outstanding[ticket] = future, future.number
        if parcel is not None:
            self._lent[ticket] = parcel

    # ---- Tasks go ----

    def withdraw(self, future: TaskFuture) -> bool:
        """Take a task back that no worker has; whether that was so, and for the first time."""
        with self._lock:
            self._note_taken_back()
            if future.is_ready():
                return False
            if future.ticket in self._outstanding:
                self._revoke(future.ticket)
            elif any(waiting[0] is future for waiting in self._backlog):
                self._withdrawn.append(future)
            self._note_taken_back()
            is_taken_back = future.is_ready()
        if self._announcements:
            self._board.poke()
        return is_taken_back

    def _revoke(self, ticket: int) -> None:
        """Take a task off the board that no worker has. In one step as far as Ctrl-C sees."""
        self._revoked.extend(compress((ticket,), map(self._board.revoke, (ticket,))))

    def _note_taken_back(self) -> None:
        """Have what was taken back in no place any more, and its receivers know; under the lock."""
        while self._revoked:
            ticket = self._revoked[0]
            entry = self._outstanding.get(ticket)
            if entry is not None:
                receiver, number = entry
                if isinstance(receiver, TaskFuture):
                    receiver.withdraw()
                else:
                    error = PoolError(f"{receiver.describe(number)} was not begun: {_CANCELLED}")
                    receiver.arrive(number, LOST, error)
                self._forget(ticket)
            self._revoked.popleft()
        while self._withdrawn:
            future = self._withdrawn[0]
            place = next((at for at, waiting in enumerate(self._backlog) if waiting[0] is future), None)
            if place is not None:
                del self._backlog[place]
            future.withdraw()
            self._withdrawn.popleft()

    def is_running(self, future: TaskFuture) -> bool:
        ticket = future.ticket
        return ticket is not None and self._board.running(ticket)

    def abandon(self, receiver: Receiver) -> None:
        """Nobody will look at what comes for `receiver`. May be called from anywhere, a destructor included."""
        self._abandoned.append(receiver)
        self._board.poke()

    def lose(self, tickets: Iterable[int], error_of: Callable[[str], Exception]) -> None:
        """The worker that had these tasks is dead. `error_of` makes an error of a task's description."""
        with self._lock:
            self._collect()
            for ticket in tickets:
                entry = self._outstanding.get(ticket)
                if entry is not None:
                    receiver, number = entry
                    receiver.arrive(number, LOST, error_of(receiver.describe(number)))
                    self._forget(ticket)
        self._board.poke()

    def break_down(self, failure: str) -> None:
        """The pool cannot go on: every task that has no answer fails with `failure`."""
        with self._lock:
            self._collect()
            self._failure = failure
            for ticket, (receiver, number) in list(self._outstanding.items()):
                receiver.arrive(
                    number, LOST, PoolError(f"{receiver.describe(number)} has no result: {failure}")
                )
                self._forget(ticket)
            while self._backlog:
                future, _, _, parcel = self._backlog.popleft()
                future.arrive(
                    future.number, LOST, PoolError(f"{future.describe(0)} was not begun: {failure}")
                )
                _release(parcel)
        self._board.poke()

    def _forget(self, ticket: int) -> None:
        if self._lent:
            _release(self._lent.pop(ticket, None))
        del self._outstanding[ticket]

    # ---- Answers ----

    def attend(self, receiver: Receiver, timeout: float | None = None) -> None:
        """Collect on this thread, or wait while another does, until `receiver` is ready or the time is over."""
        deadline = deadline_of(timeout)
        me = threading.get_ident()
        while not receiver.is_ready():
            if self._is_disowned:
                raise PoolError(self._failure)
            remaining = _LOOK_AROUND_SECONDS if deadline is None else deadline - time.monotonic()
            if remaining <= 0:
                return
            if self._backlog or self._collector not in (None, me):
                self._stand_by(receiver, min(remaining, _PARK_SECONDS))
                continue
            try:
                self._collector = me
                self._collect_for(receiver, deadline)
            finally:
                self._collector = None
                if self._announcements or self._backlog:
                    self._board.poke()

    def _stand_by(self, receiver: Receiver, seconds: float) -> None:
        """Wait while another thread sees to what `receiver` waits for: where that is this one, see to it."""
        if threading.get_ident() != self._keeper:
            receiver.park(seconds)
            return
        # A callback waits, and nobody else has the backlog put on the board.
        self._board.wait(seconds, False)
        with self._lock:
            self._collect()
            self._refill()

    def collect(self) -> None:
        """Note what has come, without waiting."""
        with self._lock:
            self._calls += 1
            self._collect()
        if self._announcements or self._collector is not None:
            self._board.poke()

    def _collect_for(self, receiver: Receiver, deadline: float | None) -> None:
        remaining = _LOOK_AROUND_SECONDS
        while not receiver.is_ready() and not self._backlog:
            if deadline is not None:
                remaining = min(_LOOK_AROUND_SECONDS, deadline - time.monotonic())
                if remaining <= 0:
                    return
            self._board.wait(remaining, True)
            with self._lock:
                self._calls += 1
                self._collect()

    def _collect(self) -> None:
        """Note every answer on the board; under the lock."""
        arrived, outstanding = self._arrived, self._outstanding
        # In one step as far as Ctrl-C sees: what has left the board is in the deque.
        arrived.extend(iter(self._board.collect, []))
        while arrived:
            self._progress += 1
            for ticket, kind, payload in arrived[0]:
                entry = outstanding.get(ticket)
                if kind & IN_PARCEL:
                    self._receive_parcel(ticket, kind, payload)
                elif entry is not None:
                    receiver, number = entry
                    receiver.arrive(number, kind, payload)
                    if self._lent:
                        _release(self._lent.pop(ticket, None))
                    del outstanding[ticket]
            arrived.popleft()

    def _receive_parcel(self, ticket: int, kind: int, payload: Any) -> None:
        content: Any
        try:
            content = self._reception.open(ticket, payload)
        except Exception as error:  # noqa: BLE001 (whatever it is, it stands for the result)
            kind, content = LOST, PoolError(f"a result came in shared memory that cannot be opened: {error}")
        entry = self._outstanding.get(ticket)
        if entry is not None:
            entry[0].arrive(entry[1], kind, content)
            self._forget(ticket)
        self._reception.hand_over(ticket)

    # ---- What the keeper does ----

    def announce_later(self, future: TaskFuture, waiters: tuple[Any, ...]) -> None:
        self._announcements.append((future, waiters))

    def _announce(self) -> None:
        """Tell waiters and callbacks; without the lock."""
        while self._announcements:
            try:
                future, waiters = self._announcements.popleft()
            except IndexError:
                return
            future.announce(waiters)

    def tend(self) -> bool:
        """Collect what no caller does and tell whom it is for, until the pool is over; whether all tasks are done.

        For one thread, the keeper.
        """
        self._keeper = threading.get_ident()
        silent_since, seen = time.monotonic(), -1
        while True:
            self._board.wait(self._nap(), False)
            self._give_way()
            with self._lock:
                self._collect()
                self._refill()
                self._drop_abandoned()
                if self._is_dropped:
                    self._refusal = self._refusal or _SHUT_DOWN
                is_over = self._refusal is not None and not self._outstanding and not self._backlog
            if self._collector is not None:
                # It may have gone to wait for what was collected here.
                self._board.poke()
            self._announce()
            if is_over or self._is_forced or self._failure is not None:
                return is_over
            if self._refusal is None or seen != self._progress:
                silent_since, seen = time.monotonic(), self._progress
            elif self._patience is not None and time.monotonic() - silent_since >= self._patience:
                return False

    def finish(self) -> None:
        """No worker lives: what was not begun never will be, and the board can go."""
        if self._failure is None:
            self.break_down(_ENDED)
        with self._lock:
            self._board = NoBoard()
        self._announce()

    def _give_way(self) -> None:
        """Stay away while callers come back for more: each turn of this thread costs them the interpreter."""
        seen = -1
        while (
            seen != self._calls
            and self._refusal is None
            and not (self._backlog or self._announcements or self._abandoned)
        ):
            seen = self._calls
            time.sleep(_COURTESY_SECONDS)

    def _nap(self) -> float:
        if self._refusal is None or self._patience is None:
            return _LOOK_AROUND_SECONDS
        return min(_LOOK_AROUND_SECONDS, max(self._patience / 4, 0.001))

    def _refill(self) -> None:
        self._note_taken_back()
        backlog = self._backlog
        while backlog:
            future, kind, payload, parcel = backlog[0]
            ticket = self._board.put(kind, payload)
            if ticket is None:
                return
            backlog.popleft()
            self._note(ticket, future, parcel)

    def _drop_abandoned(self) -> None:
        while self._abandoned:
            receiver = self._abandoned.popleft()
            mine = [ticket for ticket, entry in self._outstanding.items() if entry[0] is receiver]
            for ticket in mine:
                if self._board.revoke(ticket):
                    self._forget(ticket)

    # ---- The end ----

    def close(self, *, cancel: bool, patience: float | None, is_forced: bool = False) -> None:
        """Refuse tasks from now on, and end when those there are done.

        `patience`: seconds without any answer after which workers are ended by force; `is_forced`: at once.
        """
        with self._lock:
            self._refusal = _SHUT_DOWN
            self._patience = patience
            self._is_forced = self._is_forced or is_forced
            futures = self._cancel() if cancel else []
        for future in futures:
            future.cancel()
        self._board.poke()

    def drop(self) -> None:
        """Nobody has the pool any more: end when all is done. May be called from anywhere, a destructor included."""
        self._is_dropped = True
        self._board.poke()

    def _cancel(self) -> list[TaskFuture]:
        """Take back the pieces of maps; the futures, of which the last comes first, cancel themselves."""
        futures = [waiting[0] for waiting in self._backlog]
        for ticket, (receiver, _) in reversed(list(self._outstanding.items())):
            if isinstance(receiver, TaskFuture):
                futures.append(receiver)
            else:
                self._revoke(ticket)
        self._note_taken_back()
        return futures

    @property
    def patience(self) -> float | None:
        """What `close` was given; None before."""
        return self._patience

    # ---- In a child made by fork ----

    def disown(self) -> None:
        """Be of no use, and touch nothing that the parent goes on with. Threads of the parent may hold its locks."""
        self._lock = threading.Lock()
        self._board = NoBoard()
        self._failure = f"this pool belongs to process {self.pid}, which made it; make a pool in this one"
        self._is_disowned = True
        self._backlog.clear()
        self._lent.clear()
        self._reception.disown()


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _disown_all() -> None:
    for engine in list(_engines):
        engine.disown()


os.register_at_fork(after_in_child=_disown_all)


def _release(parcel: _native.SendBuffer | None) -> None:
    if parcel is not None:
        # Whoever was to open it has, or never will.
        parcel.revoke()
