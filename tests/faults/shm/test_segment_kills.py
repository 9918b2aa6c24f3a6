"""Processes that read shared arrays are killed at random while their owner uses the memory again and again.

With a fixed seed; 200 times under `make soak`. Whatever was killed when: who reads an array reads what was shared, its
memory is used again when its last reader is dead, and in the end nothing is left.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))

from actors import PROLOGUE, Actor, Refused
from soak import IS_SOAK

import tundish as td
from tundish.shm import SharedArray

KILLS = 200 if IS_SOAK else 40
READERS = 3

READ = (
    PROLOGUE
    + """
from tundish.shm import Handle
held = {}
def look():
    for value, array in held.items():
        assert (array == value).all(), f"torn: {value} became {set(array.tolist())}"
"""
)


def reads(handle: Any, value: int) -> str:
    return f"held[{value}] = SharedArray.attach(Handle.from_json({handle.to_json()})).array; look()"


@pytest.mark.timeout(120 + 2 * KILLS)
def test_readers_are_killed_while_memory_is_used_again() -> None:
    draw = random.Random(20261121)
    readers = [Actor(READ) for _ in range(READERS)]
    try:
        kills = value = 0
        while kills < KILLS:
            value += 1
            shared = SharedArray.from_array(np.full(draw.choice([3000, 50_000]), value))
            reader = draw.randrange(READERS)
            if draw.random() < 0.5:
                readers[reader].does(reads(shared.handle, value))
                shared.close()
            else:
                # Killed on the way to the array, or anywhere behind.
                readers[reader].tell(reads(shared.handle, value))
                time.sleep(draw.choice([0, draw.uniform(0, 0.002)]))
                readers[reader].kill()
                kills += 1
                shared.close()
                readers[reader].__exit__(None, None, None)
                readers[reader] = Actor(READ)
            if draw.random() < 0.3:
                readers[draw.randrange(READERS)].does("look(); held.clear()")
        for one in readers:
            one.does("look()")
    finally:
        for one in readers:
            one.__exit__(None, None, None)
    assert td.shm.stats()["escaped"] == 0


@pytest.mark.parametrize("everybody", [False, True], ids=["owner", "all at once"])
def test_the_owner_is_killed_while_others_map(everybody: bool) -> None:
    with Actor(READ) as owner, Actor(READ) as reader, Actor(READ) as late:
        numbers = owner.does(
            "shared = SharedArray.from_array(np.full(100_000, 7)); answer = shared.handle.to_json()"
        )
        read = f"held[7] = SharedArray.attach(Handle.from_json({numbers})).array; look()"
        reader.does(read)
        owner.kill()
        if everybody:
            reader.kill()
            late.kill()
            return
        reader.does("look()")
        with pytest.raises(Refused) as caught:
            late.does(read)
        assert caught.value.kind == "SegmentGoneError"
        assert "its owner has to live and to keep it open. Tried: " in caught.value.message


def test_memory_of_the_killed_is_free_at_once() -> None:
    with Actor(READ) as owner, Actor(READ) as reader:
        before = shared_bytes()
        numbers = owner.does(
            "shared = SharedArray.create(200 << 20, np.uint8); shared.array[:] = 1; answer = shared.handle.to_json()"
        )
        reader.does(f"held[1] = SharedArray.attach(Handle.from_json({numbers})).array; look()")
        assert shared_bytes() > before + (150 << 20)
        owner.kill()
        # The reader has it.
        assert shared_bytes() > before + (150 << 20)
        reader.kill()
        end = time.monotonic() + 1
        while shared_bytes() > before + (50 << 20):
            assert time.monotonic() < end, "the memory is still there after a second"
            time.sleep(0.01)


def shared_bytes() -> int:
    """Of the whole machine, where others may share a little at the same time."""
    (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("Shmem:"))
    return int(line.split()[1]) << 10
