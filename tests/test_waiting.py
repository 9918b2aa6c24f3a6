"""Waits that Ctrl-C ends, also where the signal came before they began, and that hold up nobody after it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.distributed.ctrl_c import at_every_moment

from tundish import waiting
from tundish.waiting import Changes, Moment, SteadyFuture, to_its_end, wait_for


def test_what_comes_in_time_is_waited_for() -> None:
    event = threading.Event()
    timer = threading.Timer(0.7, event.set)
    timer.start()
    assert wait_for(event.wait, 30)
    timer.join()
    assert wait_for(event.wait, 0)


def test_a_moment_may_come_again_while_somebody_hears_of_it() -> None:
    moment = Moment()

    class Gate:
        """Lets the moment come again right when somebody who waits has got through."""

        lock = moment._gate

        def acquire(self, timeout: float) -> bool:
            got = self.lock.acquire(timeout=timeout)
            moment.come()
            return got

        def release(self) -> None:
            self.lock.release()

    moment._gate = Gate()  # type: ignore[assignment]  # as far as it is used
    timer = threading.Timer(0.1, moment.come)
    timer.start()
    assert moment.wait(20)
    timer.join()
    assert moment.wait(0)


@pytest.mark.parametrize("seconds", [0, 0.1, 0.5, 0.8])
def test_no_wait_is_shorter_than_it_was_asked_for(seconds: float) -> None:
    begun = time.monotonic()
    assert not wait_for(threading.Event().wait, seconds)
    assert time.monotonic() - begun >= seconds


def test_a_signal_that_another_thread_took_ends_the_wait() -> None:
    """As one does that the interpreter saw before the wait began: neither wakes the waiting thread."""
    pressed: list[float] = []

    def press() -> None:
        time.sleep(0.2)
        pressed.append(time.monotonic())
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        wait_for(threading.Event().wait, 30)
    assert time.monotonic() - pressed[0] < 5
    presser.join()


def test_a_change_is_waited_for() -> None:
    changes, things = Changes(), deque([1, 2, 3])

    def take() -> None:
        while things:
            with changes.lock:
                things.popleft()
                changes.tell()

    assert not changes.wait_until(lambda: not things, 0.1)
    thread = threading.Thread(target=take)
    thread.start()
    assert changes.wait_until(lambda: not things, 30)
    thread.join()
    assert changes.wait_until(lambda: True, 0)


def test_who_changes_something_is_not_held_up_by_ctrl_c_in_a_wait_for_it() -> None:
    for number, ctrl_c in at_every_moment(threading, waiting):
        changes = Changes()
        with ctrl_c:
            changes.wait_until(lambda: False, 0.001)
        thread = threading.Thread(target=lambda: _told(changes), daemon=True)  # noqa: B023 (as above)
        thread.start()
        thread.join(30)
        assert not thread.is_alive(), number


def _told(changes: Changes) -> None:
    with changes.lock:
        changes.tell()


USES: dict[str, Callable[[SteadyFuture[int]], object]] = {
    "done": lambda future: (future.done(), future.running(), future.cancelled(), repr(future)),
    "result": lambda future: future.result(0.001),
    "exception": lambda future: future.exception(0.001),
    "cancel": lambda future: future.cancel(),
    "add_done_callback": lambda future: future.add_done_callback(lambda _: None),
    "wait": lambda future: concurrent.futures.wait([future], 0.001),
    "as_completed": lambda future: list(concurrent.futures.as_completed([future], 0.001)),
}


@pytest.mark.parametrize("use", USES)
def test_who_has_the_result_is_not_held_up_by_ctrl_c_in_a_use_of_its_future(
    use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "_TURN_SECONDS", 0.01)
    for number, ctrl_c in at_every_moment(threading, concurrent.futures._base, waiting):
        future = SteadyFuture[int]()
        with contextlib.suppress(TimeoutError), ctrl_c:
            USES[use](future)
        thread = threading.Thread(target=future.set_result, args=(number,), daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive(), number
        assert future.result(30) == number


def test_a_future_tells_everybody_who_waits_for_it() -> None:
    future, other = SteadyFuture[str](), SteadyFuture[str]()
    told: list[str] = []
    future.add_done_callback(lambda done: told.append(done.result()))
    waiters = [
        threading.Thread(target=lambda: told.append(future.result(30))),
        threading.Thread(target=lambda: told.append(str(future.exception(30)))),
        threading.Thread(target=lambda: told.append(next(_completed(future, other)).result())),
        threading.Thread(target=lambda: told.append(_first_of(future, other).result())),
    ]
    for waiter in waiters:
        waiter.start()
    with pytest.raises(TimeoutError):
        future.result(0.2)
    assert future.running()
    assert not future.cancel()
    future.set_result("x")
    for waiter in waiters:
        waiter.join()
    assert sorted(told) == ["None", "x", "x", "x", "x"]
    future.add_done_callback(lambda done: told.append("late"))
    assert told[-1] == "late"
    other.set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        other.result()
    assert concurrent.futures.wait([future, other]).not_done == set()
    assert asyncio.run(_awaited(future)) == "x"


def _completed(*futures: SteadyFuture[str]) -> Iterator[concurrent.futures.Future[str]]:
    return concurrent.futures.as_completed(futures)


def _first_of(*futures: SteadyFuture[str]) -> concurrent.futures.Future[str]:
    return concurrent.futures.wait(futures, return_when="FIRST_COMPLETED").done.pop()


async def _awaited(future: SteadyFuture[str]) -> str:
    return await asyncio.wrap_future(future)


def test_no_thread_stays_behind_whose_start_ctrl_c_interrupts() -> None:
    before, noted = _threads(), threading.active_count()
    for _, ctrl_c in at_every_moment(threading, waiting):
        with ctrl_c:
            waiting.Thread(lambda: None, "passing").start()
    deadline = time.monotonic() + 30
    while _threads() > before or threading.active_count() > noted:
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)


def test_a_thread_that_cannot_be_started_says_so() -> None:
    thread = waiting.Thread(lambda: None, "passing")
    thread.start()
    with pytest.raises(RuntimeError, match="once"):
        thread.start()


def test_no_thread_is_waited_for_that_is_started_as_the_interpreter_ends() -> None:
    program = """
import sys
from tundish.waiting import Thread
class Last:
    def __del__(self, thread=Thread, say=print):
        try:
            thread(say, "late", ("started",)).start()
        except RuntimeError:
            say("refused", flush=True)
sys.modules["last"] = Last()
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout == "refused\n"


def _threads() -> int:
    """As the system counts them."""
    return len(list(Path("/proc/self/task").iterdir()))


def test_work_goes_to_its_end_whatever_interrupts_its_caller() -> None:
    for number, ctrl_c in at_every_moment(waiting, threading):
        done: list[int] = []
        with ctrl_c:
            to_its_end(lambda: done.append(number))  # noqa: B023 (called in this round)
            assert done == [number]
        assert len(done) <= 1
