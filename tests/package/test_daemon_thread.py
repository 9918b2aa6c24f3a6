"""`DaemonThread`: calls in order, and a process that ends although a call blocks."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from tundish.daemon_thread import DaemonThread


def test_calls_are_made_in_order_and_their_errors_raised_where_the_result_is_asked_for() -> None:
    made: list[int] = []
    thread = DaemonThread("called in order")
    futures = [thread.submit(lambda number=number: made.append(number)) for number in range(100)]  # type: ignore[misc]
    failed = thread.submit(lambda: 1 // 0)
    assert thread.submit(threading.get_ident).result(10) != threading.get_ident()
    assert made == list(range(100)) and all(future.done() for future in futures)
    with pytest.raises(ZeroDivisionError):
        failed.result(10)


@pytest.mark.parametrize("closes", [False, True])
def test_the_thread_ends_after_its_last_call_once_it_is_closed_or_garbage(closes: bool) -> None:
    go_on = threading.Event()
    thread = DaemonThread("called last")
    last = thread.submit(lambda: go_on.wait(10))
    (running,) = [one for one in threading.enumerate() if one.name == "called last"]
    if closes:
        thread.close()
    else:
        del thread
    go_on.set()
    assert last.result(10)
    running.join(10)
    assert not running.is_alive()


def test_a_call_that_does_not_wait_leaves_a_blocked_one_behind() -> None:
    go_on = threading.Event()
    thread = DaemonThread("called beside")
    blocked = thread.submit(lambda: go_on.wait(10))
    assert thread.submit(lambda: 3, waits=False).result(10) == 3
    assert not blocked.done()
    go_on.set()
    assert blocked.result(10)


def test_a_process_ends_although_a_call_blocks() -> None:
    script = "import threading; from tundish.daemon_thread import DaemonThread\n"
    script += "thread = DaemonThread('blocked'); thread.submit(threading.Event().wait); print('end')"
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=False
    )
    assert (ran.stdout, ran.stderr, ran.returncode) == ("end\n", "", 0)
