"""The child processes of the bench: Python programs that take a request as JSON and answer with lines.

When a program is closed, fails or takes too long, all processes that it started are killed with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

# A program that takes longer to answer has hung.
LONGEST_SECONDS = 300.0


class Program:
    """`python program *words` in a process group of its own. A context manager, which closes it.

    Args:
        program: the script.
        words: its arguments.
        environment: variables that it has beside those of this process.
        prefix: what its command begins with: a program that becomes it, as `nice` does.
    """

    def __init__(
        self,
        program: Path,
        *words: str,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self._name = program.name
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by close)
        self._child = subprocess.Popen(
            [*prefix, sys.executable, str(program), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            # Its children are in its process group.
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        self._unread = b""

    @property
    def pid(self) -> int:
        return self._child.pid

    def status(self) -> int | None:
        """With what it ended; None while it runs."""
        return self._child.poll()

    def say(self, line: str) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(line.encode() + b"\n")
            self._child.stdin.flush()

    def hear(self, what: str, meanwhile: Callable[[], object] = lambda: None, every: float = 1.0) -> str:
        """Return its next line, the answer to `what`; calls `meanwhile` at intervals of `every` seconds.

        Raises:
            RuntimeError: it ended, or said nothing for too long; with the end of what it said otherwise.
        """
        until = time.monotonic() + LONGEST_SECONDS
        while b"\n" not in self._unread:
            # Its children may hold the pipe open when it is gone.
            if not self._read(every) and (self.status() is not None or time.monotonic() > until):
                raise self.failure(f"no answer to {what}")
            meanwhile()
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def expect(self, word: str, meanwhile: Callable[[], object] = lambda: None, every: float = 1.0) -> None:
        line = self.hear(word, meanwhile, every)
        if line.strip() != word:
            raise self.failure(f"said {line!r} and not {word!r}")

    def ask(self, what: str, *arguments: Any) -> Any:
        """Send a request to a program that answers each line of JSON with one; return the answer."""
        self.say(json.dumps([what, arguments]))
        return json.loads(self.hear(f"{what} {arguments}"))

    def output(self) -> str:
        """All that it has written and nobody has heard; a program that ended wrote all."""
        while self._read(0.0):
            pass
        return self._unread.decode()

    def _read(self, seconds: float) -> bytes:
        """Read what comes within so many seconds."""
        assert self._child.stdout is not None
        if not select.select([self._child.stdout], [], [], seconds)[0]:
            return b""
        part = os.read(self._child.stdout.fileno(), 1 << 16)
        self._unread += part
        return part

    def wait(self) -> None:
        """Wait for its end; RuntimeError where it failed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(LONGEST_SECONDS)
        if self.status() != 0:
            raise self.failure("failed")

    def failure(self, what: str) -> RuntimeError:
        self._said.seek(0)
        status = self.status()
        ended = "" if status is None else f", ended with {status}"
        return RuntimeError(f"{self._name}: {what}{ended}:\n{self._said.read()[-3000:]}")

    def close(self, patience: float = 0.0) -> None:
        """Kill it and all that it started, after so many seconds to end by itself."""
        assert self._child.stdin is not None and self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        self._child.stdout.close()
        self._said.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def rank_environments(ranks: int, *, threads: int = 1) -> list[dict[str, str]]:
    """The environment that torchrun gives so many ranks of one node."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(threads),
        }
        for rank in range(ranks)
    ]


def run_programs(
    program: Path,
    request: Mapping[str, Any],
    environments: Sequence[Mapping[str, str]] = ({},),
    prefixes: Sequence[Sequence[str]] = (),
) -> list[Any]:
    """The replies of one program in each environment: the last line that it writes, as JSON.

    Raises:
        RuntimeError: one failed, or took too long; with the end of what it said.
    """
    until = time.monotonic() + LONGEST_SECONDS
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(Program(program, json.dumps(request), environment=environment, prefix=prefix))
            for environment, prefix in zip(environments, prefixes or [()] * len(environments), strict=True)
        ]
        while any(child.status() is None for child in children):
            for child in children:
                child.output()
            failed = [child for child in children if child.status()]
            if failed or time.monotonic() > until:
                raise (*failed, *children)[0].failure(f"no reply to {request}")
            time.sleep(0.01)
        for child in children:
            child.wait()
        return [json.loads(child.output().splitlines()[-1]) for child in children]
