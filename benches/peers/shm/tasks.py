"""Tasks for workers.

A task takes its item and the bound array. Its result carries the item and the worker's process id; all else in it is
known in advance. The module imports only numpy, since spawned workers import it and their memory is measured.
"""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection

import numpy as np

# Process ids of Linux have at most so many bits.
_PROCESS_BITS = 22
# Bytes of a result.
LARGE = 16 << 20
SMALL = 400 << 10
# Elements between the parts of two items, so that no result equals the one before.
_STRIDE = 4097
# A worker that has read the array pauses so long, so that the other workers get their tasks.
_PAUSE_SECONDS = 0.2


def _stamp(item: int) -> int:
    return item << _PROCESS_BITS | os.getpid()


def item_of(stamp: int) -> int:
    return stamp >> _PROCESS_BITS


def worker_of(stamp: int) -> int:
    """The id of the process that made a result."""
    return stamp & ((1 << _PROCESS_BITS) - 1)


def empty(item: int, array: np.ndarray) -> int:
    """Return a stamp of the item and the worker."""
    return item << _PROCESS_BITS | os.getpid()


def ends(item: int, array: np.ndarray) -> tuple[int, int, int]:
    """Return the first and the last element."""
    return _stamp(item), int(array[0]), int(array[-1])


def reading(item: int, array: np.ndarray) -> tuple[int, int]:
    """The sum of all elements."""
    total = int(array.sum())
    time.sleep(_PAUSE_SECONDS)
    return _stamp(item), total


def begin_of(item: int, array: np.ndarray, size: int) -> int:
    """The element where the part of the array that belongs to `item` begins."""
    return item * _STRIDE % (len(array) - size // array.itemsize)


def _part(item: int, array: np.ndarray, size: int) -> np.ndarray:
    begin = begin_of(item, array, size)
    result = array[begin : begin + size // array.itemsize].copy()
    result[0] = _stamp(item)
    return result


def large(item: int, array: np.ndarray) -> np.ndarray:
    """A part of the array, its first element replaced by the stamp."""
    return _part(item, array, LARGE)


def small(item: int, array: np.ndarray) -> np.ndarray:
    return _part(item, array, SMALL)


def hold(connection: Connection) -> None:
    """Run a process that has imported numpy only, until the other end is closed."""
    connection.send(os.getpid())
    connection.poll(None)
