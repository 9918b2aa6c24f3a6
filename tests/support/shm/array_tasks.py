"""Calls on shared arrays that children of the tests make. A module of its own, so that spawned children import it."""

from __future__ import annotations

import os
import signal
import traceback
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

import tundish as td
from support.shm.leftovers import descriptors, mapped
from tundish.shm import Handle, SharedArray

METHODS = ["fork", "forkserver", "spawn"]


class Child:
    """A child that makes the calls it is asked for, and keeps the arrays that it attached to."""

    def __init__(self, context: BaseContext, *arrays: Any) -> None:
        self.line, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=serve, args=(theirs, *arrays), daemon=True)  # type: ignore[attr-defined]
        self.process.start()
        theirs.close()

    def ask(self, what: str, *arguments: Any) -> Any:
        """Call method `what` of `AttachedArrays` in the child; returns its result."""
        self.line.send((what, arguments))
        assert self.line.poll(60), "the child does not answer"
        answer, error = self.line.recv()
        if error is not None:
            raise error
        return answer

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self._end()

    def stop(self) -> None:
        self.line.send(None)
        self._end()

    def _end(self) -> None:
        self.process.join(60)
        assert self.process.exitcode is not None, "the child does not end"
        self.line.close()
        self.process.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *details: object) -> None:
        if self.line.closed:
            return
        self.stop()


def serve(line: Connection, *arrays: Any) -> None:
    attached = AttachedArrays(arrays)
    while (request := line.recv()) is not None:
        what, arguments = request
        try:
            line.send((getattr(attached, what)(*arguments), None))
        except Exception as error:
            error.add_note(traceback.format_exc())
            line.send((None, error))


class AttachedArrays:
    """The arrays of a child, and the methods that `Child.ask` calls."""

    def __init__(self, given: tuple[Any, ...]) -> None:
        self.given = list(given)
        self.arrays: list[np.ndarray[Any, Any]] = []
        self.shared: list[SharedArray] = []

    def pid(self) -> int:
        return os.getpid()

    def attach(self, handle: Handle) -> tuple[int, int]:
        """Attaches and looks at the array: its sum, and where it is."""
        shared = SharedArray.attach(handle)
        self.shared.append(shared)
        self.arrays.append(shared.array)
        return int(shared.array.sum()), shared.array.ctypes.data

    def attach_given(self, place: int = 0) -> tuple[int, int]:
        return self.attach(self.given[place])

    def open_files(self, path: Path, count: int) -> list[int]:
        """Descriptors of files that have nothing to do with shared memory."""
        return [os.open(path, os.O_CREAT | os.O_RDWR) for _ in range(count)]

    def are_open(self, numbers: list[int]) -> bool:
        for number in numbers:
            os.fstat(number)
            os.close(number)
        return True

    def sum_of_given(self) -> tuple[int, bool]:
        """The sum of a SharedArray that came as an argument, and whether it can be written."""
        self.arrays.append(self.given[0].array)
        return int(self.arrays[-1].sum()), self.arrays[-1].flags.writeable

    def write_given(self, value: int) -> None:
        self.given[0].array[...] = value

    def write_tensor(self, handle: Handle, value: int) -> list[int]:
        """Fills a tensor of a reader: its sum, and that of the reader's array."""
        shared = SharedArray.attach(handle)
        tensor = shared.tensor()
        tensor.fill_(value)
        return [int(tensor.sum()), int(shared.array.sum())]

    def sums(self) -> list[int]:
        return [int(array.sum()) for array in self.arrays]

    def share(self, length: int, value: int) -> Handle:
        """Makes an array, and keeps it."""
        shared = SharedArray.from_array(np.full(length, value))
        self.shared.append(shared)
        return shared.handle

    def handle(self) -> Handle:
        """A handle of the last attached array, through this process."""
        return self.shared[-1].handle

    def close_all(self) -> None:
        for shared in self.shared:
            shared.close()
        self.shared.clear()
        self.arrays.clear()
        self.given.clear()

    def segments(self) -> tuple[int, int]:
        """How many descriptors of segments, and how many mappings."""
        return sum("memfd:tundish" in target for target in descriptors().values()), len(mapped())

    def stats(self) -> Any:
        return td.shm.stats()
