"""Programs of users, as processes of their own in a process group of their own, which tests signal."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parents[2]


class Program:
    """A script that uses a pool and prints lines with `say(...)`."""

    def __init__(self, script: str, folder: Path) -> None:
        path = folder / "program.py"
        path.write_text(
            f"import sys\nsys.path.insert(0, {str(TESTS)!r})\n"
            "import os, signal, time\nimport numpy as np\nimport tundish as td\n"
            "import support.shm.pool_tasks as tasks\n"
            "def say(*words):\n    print(*words, flush=True)\n" + script
        )
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", str(path)],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.group = self.process.pid

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)
        self.process.communicate()

    def read_line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            assert self.process.stderr is not None
            raise AssertionError(f"it ended with {self.process.wait()}: {self.process.stderr.read()}")
        return line.rstrip("\n")

    def members(self) -> dict[int, str]:
        """The living processes of its group, with their command lines."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if int(fields[2]) == self.group and fields[0] != "Z":
                found[int(entry.name)] = command
        return found

    def expect_nobody(self, seconds: float) -> None:
        """Check that all processes of the group end in time: `seconds` is the promise."""
        # time: ten times the promise
        deadline = time.monotonic() + 10 * seconds
        while left := self.members():
            assert time.monotonic() < deadline, left
            time.sleep(0.01)
