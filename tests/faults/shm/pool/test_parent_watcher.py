"""A worker's watcher ends it when its parent is gone, whatever the worker is doing."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tundish._native import exit_with_parent
from tundish.errors import InvalidInputError

# `sum` holds the GIL and checks no signals.
WATCHED = """
import os, sys
from tundish._native import exit_with_parent
exit_with_parent(int(sys.argv[1]), int(sys.argv[2]))
os.write(int(sys.argv[3]), b"!")
{work}
"""


def start(work: str, pipe: int, pid: int) -> subprocess.Popen[bytes]:
    ready, begun = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-c", WATCHED.format(work=work), str(pipe), str(pid), str(begun)],
        pass_fds=(pipe, begun),
    )
    os.close(begun)
    assert os.read(ready, 1) == b"!"
    os.close(ready)
    return child


@pytest.mark.parametrize("work", ["sum(range(10**15))", "import time; time.sleep(1000)"])
@pytest.mark.parametrize("end", ["pipe closed", "pipe written", "process killed"])
def test_the_end_of_the_parent_is_the_workers_within_a_second(work, end):
    reading, writing = os.pipe()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) as parent:
        child = start(work, reading, parent.pid)
        os.close(reading)
        time.sleep(0.2)
        assert child.poll() is None
        begin = time.monotonic()
        if end == "pipe written":
            os.write(writing, b".")
        elif end == "process killed":
            parent.send_signal(signal.SIGKILL)
        else:
            os.close(writing)
        # time: ten times the promise of a second; the work takes 1000 s
        assert child.wait(10) == 1 and time.monotonic() - begin < 10
        parent.kill()
    if end != "pipe closed":
        os.close(writing)


def test_a_parent_that_is_gone_already_ends_the_process_at_once():
    with subprocess.Popen([sys.executable, "-c", ""]) as parent:
        parent.wait()
    reading, writing = os.pipe()
    command = [
        sys.executable,
        "-c",
        WATCHED.format(work="import time; time.sleep(1000)"),
        str(reading),
        str(parent.pid),
        "1",
    ]
    assert subprocess.run(command, pass_fds=(reading,), timeout=20).returncode == 1
    os.close(reading)
    os.close(writing)


def test_invalid_processes_and_descriptors_are_refused():
    reading, writing = os.pipe()
    for pid in (0, -1):
        with pytest.raises(InvalidInputError, match="not the number of a process"):
            exit_with_parent(reading, pid)
    with pytest.raises(InvalidInputError, match="not the number of a descriptor"):
        exit_with_parent(-1, os.getpid())
    os.close(reading)
    os.close(writing)
    with pytest.raises(OSError, match="watch"):
        exit_with_parent(reading, os.getpid())
