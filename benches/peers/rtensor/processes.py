"""Starts the owner and the consumer of a contestant, and measures their memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from processes import Program

_HERE = Path(__file__).resolve().parent


class Process(Program):
    """`child.py`, or another program that answers each line of JSON with a line."""

    def __init__(self, program: str = "child.py") -> None:
        # For processes that it starts itself.
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_HERE.parent)}
        super().__init__(_HERE / program, environment=environment)

    def memory(self) -> int:
        """Bytes of memory that no file on a disk stands behind, those of one segment counted once."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
        files = {}
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if str(entry.readlink()).startswith("/memfd:"):
                    found = entry.stat()
                    files[found.st_ino] = found.st_blocks * 512
        return int(line.split()[1]) * 1024 + sum(files.values())


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
            # It takes leave of the other one.
            stack.callback(processes[-1].close, patience=5.0)
        owner, consumer = processes
        place = owner.ask("own", contestant, list(cases))
        consumer.ask("consume", contestant, place)
        yield owner, consumer
