"""The argument `on_failure`: the process ends, the next call raises, or a function gets the error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tundish.checkpoint.failures import FailurePolicy
from tundish.errors import InvalidInputError

PROGRAM = """
    import os, signal, sys, threading, time
    from tundish.checkpoint import failures

    if sys.argv[1] == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        failures.GRACE_SECONDS = 0.5
    if sys.argv[1] == "child":
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    policy = failures.FailurePolicy("terminate", 3)
    print(time.time(), flush=True)
    threading.Thread(target=policy.act, args=(OSError(28, "full"), "save_hf of step 7")).start()
    time.sleep(60)
"""


def run(mode: str, *, leads: bool) -> tuple[int, float, str]:
    """Exit status, seconds from the failure to the end, and what was logged.

    Fails unless the process ends, and every other one that holds its pipes, long before they would by themselves.
    """
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), mode]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=leads
    ) as process:
        assert process.stdout is not None
        started = float(process.stdout.readline())
        process.wait(30)
        seconds = time.time() - started
        _, logged = process.communicate(timeout=20)
        return process.returncode, seconds, logged


@pytest.mark.parametrize("leads", [True, False])
def test_terminate_ends_the_process(leads: bool) -> None:
    status, _, logged = run("plain", leads=leads)
    assert status == -signal.SIGTERM
    assert "rank 3: save_hf of step 7 failed" in logged
    assert "[Errno 28] full" in logged


def test_terminate_takes_along_the_group_that_the_process_leads() -> None:
    status, _, _ = run("child", leads=True)
    assert status == -signal.SIGTERM


def test_a_process_that_ignores_the_request_is_killed() -> None:
    status, seconds, _ = run("deaf", leads=False)
    assert status == -signal.SIGKILL
    assert seconds >= 0.5


FIRST_PROCESS = """
    import os, signal, subprocess, sys, time
    from tundish.checkpoint.failures import FailurePolicy

    os.setsid()
    # As one that was sent into the container from outside.
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)

    def asked(*_):
        print("asked", stranger.poll(), flush=True)
        os._exit(7)

    if sys.argv[1] == "asked":
        signal.signal(signal.SIGTERM, asked)
    assert os.getpid() == os.getpgrp() == 1
    print(time.time(), flush=True)
    FailurePolicy("terminate", 0).act(OSError(28, "full"), "save_hf of step 7")
    time.sleep(60)
"""


@pytest.mark.parametrize(("mode", "status", "said"), [("asked", 7, "asked None\n"), ("deaf", 1, "")])
def test_the_first_process_of_a_container_ends_itself_alone(mode: str, status: int, said: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("making a process space takes root")
    alone = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    command = [*alone, sys.executable, "-c", textwrap.dedent(FIRST_PROCESS), mode]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        started = float(process.stdout.readline())
        assert process.wait(30) == status
        assert time.time() - started < 1
        assert process.stdout.read() == said


def test_raise_tells_once() -> None:
    policy = FailurePolicy("raise", 0)
    policy.raise_pending()
    first = OSError(5, "first")
    policy.act(first, "a save")
    policy.act(OSError(5, "second"), "a save")
    with pytest.raises(OSError, match="first"):
        policy.raise_pending()
    policy.raise_pending()


def test_a_function_gets_the_error_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    told: list[BaseException] = []

    def on_failure(error: BaseException) -> None:
        told.append(error)
        raise RuntimeError("the pager is down")

    error = OSError(5, "lost")
    FailurePolicy(on_failure, 2).act(error, "save_dcp of step 9")
    assert told == [error]
    assert "the pager is down" in caplog.text
    assert "rank 2" in caplog.text


@pytest.mark.parametrize("on_failure", ["explode", None, 3])
def test_other_policies_are_refused(on_failure: object) -> None:
    with pytest.raises(InvalidInputError, match="on_failure"):
        FailurePolicy(on_failure, 0)  # type: ignore[arg-type]
