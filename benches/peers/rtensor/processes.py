"""Starts the owner and the consumer of a contestant, and talks to them.

A process that fails or takes too long ends the run. Nothing of its process group stays behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Process", "pair", "peaks_of"]

_HERE = Path(__file__).resolve().parent
# A request that takes longer hangs.
_LONGEST_SECONDS = 300.0


class Process:
    """`child.py`, or another program that answers each line with a line."""

    def __init__(self, program: str = "child.py") -> None:
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by close)
        self._child = subprocess.Popen(
            [sys.executable, str(_HERE / program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            # To end its children, too, when it fails.
            start_new_session=True,
            # For processes that it starts itself.
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_HERE.parent)},
        )

    def ask(self, what: str, *arguments: Any) -> Any:
        """Sends a request; returns the answer. Raises `RuntimeError` with the end of the output if there is none."""
        assert self._child.stdin is not None and self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(json.dumps([what, arguments]).encode() + b"\n")
            self._child.stdin.flush()
        if select.select([self._child.stdout], [], [], _LONGEST_SECONDS)[0]:
            line = self._child.stdout.readline()
            if line:
                return json.loads(line)
        self._said.seek(0)
        raise RuntimeError(f"no answer to {what} {arguments}:\n{self._said.read()[-3000:]}")

    def memory(self) -> int:
        """Bytes of memory that no file on a disk stands behind, those of one segment counted once."""
        status = Path(f"/proc/{self._child.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
        files = {}
        for entry in Path(f"/proc/{self._child.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if str(entry.readlink()).startswith("/memfd:"):
                    found = entry.stat()
                    files[found.st_ino] = found.st_blocks * 512
        return int(line.split()[1]) * 1024 + sum(files.values())

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            assert self._child.stdin is not None
            self._child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        assert self._child.stdout is not None
        self._child.stdout.close()
        self._said.close()


@contextlib.contextmanager
def peaks_of(processes: Sequence[Process]) -> Iterator[list[int]]:
    """The peak memory of each process within the block, above its memory before; filled in at the end."""
    before = [process.memory() for process in processes]
    most = [0] * len(processes)
    is_over = threading.Event()

    def look() -> None:
        while True:
            for place, (process, had) in enumerate(zip(processes, before, strict=True)):
                most[place] = max(most[place], process.memory() - had)
            if is_over.wait(0.001):
                return

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        is_over.set()
        thread.join()


@contextlib.contextmanager
def pair(contestant: str, cases: Iterable[str]) -> Iterator[tuple[Process, Process]]:
    """An owner of these cases and a consumer, connected."""
    with contextlib.ExitStack() as stack:
        processes = []
        for _ in range(2):
            processes.append(Process())
            stack.callback(processes[-1].close)
        owner, consumer = processes
        place = owner.ask("own", contestant, list(cases))
        consumer.ask("consume", contestant, place)
        yield owner, consumer
