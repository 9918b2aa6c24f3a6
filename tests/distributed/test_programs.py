"""A program of the fork server behaves as in an interpreter of its own, from its arguments to its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.distributed.programs import PIPE, Program, run
from support.shm.private_shm import private_shm


def test_a_program_gets_its_arguments(tmp_path: Path) -> None:
    code = (
        "import os, sys; assert __name__ == '__main__' and sys.modules['__main__'].__dict__ is globals();"
        "print(sys.argv, os.environ, os.getcwd(), sys.stdin.read(), os.getsid(0) == os.getpid())"
    )
    alone = {"A": "b", "LC_CTYPE": "C.UTF-8"}
    settings = {"input": "told", "env": alone, "cwd": tmp_path, "start_new_session": True}
    ran = run(["-c", code, 1, "two"], **settings)  # type: ignore[arg-type]
    real = subprocess.run(
        [sys.executable, "-c", code, "1", "two"], capture_output=True, text=True, check=True, **settings
    )  # type: ignore[call-overload]
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, real.stdout, "")


def test_a_program_ends_its_interpreter() -> None:
    code = """
import atexit, threading, time

class Kept:
    def __del__(self):
        print("taken down")

kept = Kept()
atexit.register(print, "atexit")
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
"""
    for last, status, said in (("", 0, ""), ("raise ValueError('no')", 1, "ValueError: no\n")):
        ran = run(["-c", f"{code}\n{last}"])
        assert (ran.returncode, ran.stdout) == (status, "thread\natexit\ntaken down\n")
        # No line of the fork server.
        assert ran.stderr.endswith(said) and "programs.py" not in ran.stderr, ran.stderr


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('why')", 1, "why\n"),
        ("raise SystemExit", 0, ""),
        ("import os; os._exit(4)", 4, ""),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_its_exit_is_known(code: str, status: int, said: str) -> None:
    ran = run(["-c", code])
    assert (ran.returncode, ran.stdout, ran.stderr) == (status, "", said)


def test_modules_and_scripts_are_run(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    script.write_text("import sys, beside; print(__name__, __file__, sys.argv, beside.VALUE)\n")
    assert run([script, "x"], check=True).stdout == f"__main__ {script} ['{script}', 'x'] 7\n"
    assert run(["-m", "program", "x"], cwd=tmp_path, check=True).stdout.startswith(f"__main__ {script} [")


def test_a_program_gets_signals_and_is_waited_for() -> None:
    code = """
import time
print("up", flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    with Program(["-c", code], stdout=PIPE) as program:
        assert program.stdout is not None and program.stdout.readline() == "up\n"
        assert program.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(0.01)
        program.send_signal(signal.SIGINT)
        assert program.communicate(timeout=20) == ("interrupted\n", None)
        assert program.returncode == 0


def test_a_program_sees_the_mounts_of_its_test() -> None:
    with private_shm(1 << 20) as folder:
        (folder / "mine").write_text("")
        assert run(["-c", "import os; print(os.listdir('/dev/shm'))"]).stdout == "['mine']\n"
    assert "mine" not in os.listdir("/dev/shm")
