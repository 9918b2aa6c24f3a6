"""Checks that a test leaves no names in /dev/shm, descriptors or children.

It checks only names of this user that begin with `PREFIX`, since other programs may share memory at the same time. What
the interpreter and the library start once in a process is started before the first check.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import TypeAlias

import numpy as np

import tundish as td
from support.distributed.rank_processes import end_idle
from tundish.shm import set_cache_limit

# Of the names that tests give to segments; no other run has it.
PREFIX = f"test-{os.getpid()}-"

# Some things end a moment after a test: a process that was killed, a thread that closes a connection.
PATIENCE = 20.0

# Names, descriptors, children, maps.
_State: TypeAlias = tuple[set[str], list[str], set[int], list[str]]

# As large as the arrays of the tests, so that it is kept.
_KEPT = 1 << 30


def names() -> set[str]:
    """Names in /dev/shm that tests of this process gave."""
    return {path.name for path in Path("/dev/shm").glob(f"tundish-{os.geteuid()}-{PREFIX}*")}


def descriptors() -> dict[int, str]:
    """The open descriptors of this process."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        # The descriptor of the listing itself is closed by now.
        with contextlib.suppress(FileNotFoundError):
            found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
    return found


def children() -> set[int]:
    """The children of this process, dead ones that were not waited for included."""
    multiprocessing.active_children()
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        # When a thread ends, another thread gets its children.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.update(map(int, (task / "children").read_text().split()))
    return found


def mapped(name: str = "memfd:tundish") -> list[str]:
    """The lines of this process's maps that name `name`."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if name in line]


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Fails if the block leaves anything."""
    forkserver.ensure_running()
    resource_tracker.ensure_running()
    with td.shm.SharedArray.from_array(np.zeros(1)) as first:
        pickle.dumps(first.handle)
    # Ranks that wait for their next job are not of this test.
    end_idle()
    # Memory of earlier tests is kept for a minute, and would be freed in the middle of this test.
    td.rtensor.clear_node()
    # Existing objects are not of this test, and collecting them again and again would take minutes.
    gc.collect()
    gc.freeze()
    before = _settled()
    set_cache_limit(_KEPT)
    yield
    end_idle()
    end = time.monotonic() + PATIENCE
    while any(left := _more(before, _state())) and time.monotonic() < end:
        time.sleep(0.01)
    set_cache_limit(_KEPT)
    assert left == ([], [], [], [])


def _more(before: _State, after: _State) -> tuple[list[object], ...]:
    """What is there now and was not before. What earlier tests left may go meanwhile."""
    return tuple(
        list((Counter(new) - Counter(old)).elements()) for old, new in zip(before, after, strict=True)
    )


def _settled() -> _State:
    """The present state, after the processes and threads of earlier tests have ended."""
    end = time.monotonic() + PATIENCE
    before = _state()
    while time.monotonic() < end:
        time.sleep(0.02)
        now = _state()
        if now == before:
            break
        before = now
    return before


def _state() -> _State:
    # This closes the descriptors of children that have ended.
    multiprocessing.active_children()
    gc.collect()
    set_cache_limit(0)
    # The numbers of descriptors do not matter.
    return names(), sorted(descriptors().values()), children(), mapped()
