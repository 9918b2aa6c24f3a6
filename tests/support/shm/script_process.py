"""Processes that run scripts for a test, and can be killed at any moment."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from types import TracebackType
from typing import Any

# Runs each line of input; answers with the variable `answer`, or the exception.
STAGE = """
import json, sys
replies, sys.stdout = sys.stdout, sys.stderr
# Unbuffered: later input stays in the pipe, where a waiting script looks for it.
for line in open(0, "rb", buffering=0, closefd=False):
    answer = None
    try:
        exec(json.loads(line), globals())
        reply = {"answer": answer}
    except BaseException as error:
        reply = {"kind": type(error).__name__, "errno": getattr(error, "errno", None), "message": str(error)}
    print(json.dumps(reply), file=replies, flush=True)
"""

PROLOGUE = """
import os, signal
import numpy as np
from tundish.shm import SharedArray, sweep
"""


class ScriptError(Exception):
    """A script raised an exception."""

    def __init__(self, reply: dict[str, Any]) -> None:
        super().__init__(f"{reply['kind']}: {reply['message']}")
        self.kind: str = reply["kind"]
        self.errno: int | None = reply["errno"]
        self.message: str = reply["message"]


class ScriptProcess:
    """A Python process that runs the lines it is given, with this library imported unless `prologue` says otherwise."""

    def __init__(self, prologue: str = PROLOGUE) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", STAGE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.run(prologue)

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self, script: str) -> None:
        """Start `script` in the process, without waiting."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(script) + "\n")
        self.process.stdin.flush()

    def result(self) -> Any:
        """Wait for the end of the script; returns its `answer`. Raises `ScriptError` with its exception."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the script ended with {self.process.wait()}")
        reply = json.loads(line)
        if "kind" in reply:
            raise ScriptError(reply)
        return reply["answer"]

    def run(self, script: str) -> Any:
        """Run `script`; returns its `answer`."""
        self.start(script)
        return self.result()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def finish(self) -> int:
        """Close its input, so that it ends as a script does; returns its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(timeout=30)

    def __enter__(self) -> ScriptProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                # Unwritten input is lost.
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
