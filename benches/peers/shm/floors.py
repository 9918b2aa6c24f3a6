"""Lower bounds for every pool, measured in the same run: copies, tasks without a pool, a byte to a process and back."""

from __future__ import annotations

import mmap
import os
import time
from typing import Any

import numpy as np

from shm import tasks

_CALLS = 100_000
_TRIPS = 2_000


def copy_to_fresh_pages(array: np.ndarray) -> float:
    """Seconds of one copy, by one thread, into fresh shared pages."""
    descriptor = os.memfd_create("bench")
    try:
        os.ftruncate(descriptor, array.nbytes)
        with mmap.mmap(descriptor, array.nbytes) as mapping:
            target = np.frombuffer(mapping, array.dtype)
            begin = time.perf_counter()
            np.copyto(target, array)
            seconds = time.perf_counter() - begin
            # Else the mapping could not be closed.
            del target
            return seconds
    finally:
        os.close(descriptor)


def floors(request: dict[str, Any], array: np.ndarray) -> dict[str, list[float]]:
    """Seconds of each, as often as the request says."""
    buffers = {size: _shared(size) for size in (tasks.SMALL, tasks.LARGE)}
    found: dict[str, list[float]] = {name: [] for name in ("fresh", "small", "large", "call", "trip")}
    for _ in range(request["repeats"]):
        found["fresh"].append(copy_to_fresh_pages(array))
        for name, size in (("small", tasks.SMALL), ("large", tasks.LARGE)):
            found[name].append(_copy(array[: size // array.itemsize], buffers[size]))
        found["call"].append(_calls(array))
        found["trip"].append(_trips())
    return found


def _shared(size: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, size), np.int64)


def _copy(source: np.ndarray, target: np.ndarray) -> float:
    np.copyto(target, source)
    begin = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - begin


def _calls(array: np.ndarray) -> float:
    begin = time.perf_counter()
    results = [tasks.empty(item, array) for item in range(_CALLS)]
    return (time.perf_counter() - begin) / len(results)


def _trips() -> float:
    """Seconds of a byte through a pipe to another process and one back; both processes sleep while they wait."""
    (their_end, our_end), (back, answer) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(our_end)
        while byte := os.read(their_end, 1):
            os.write(answer, byte)
        os._exit(0)
    os.close(their_end)
    os.close(answer)
    begin = time.perf_counter()
    for _ in range(_TRIPS):
        os.write(our_end, b"x")
        os.read(back, 1)
    seconds = time.perf_counter() - begin
    os.close(our_end)
    os.close(back)
    os.waitpid(child, 0)
    return seconds / _TRIPS
