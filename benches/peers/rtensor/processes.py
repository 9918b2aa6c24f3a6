"""Starts the owner and the consumer of a contestant."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from processes import Program

_HERE = Path(__file__).resolve().parent


class Process(Program):
    """`child.py`, or another program that answers each line of JSON with a line."""

    def __init__(self, program: str = "child.py") -> None:
        # For processes that it starts itself.
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_HERE.parent)}
        super().__init__(_HERE / program, environment=environment)


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
