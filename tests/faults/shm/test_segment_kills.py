"""Processes that read shared arrays are killed at random while their owner uses the memory again and again.

With a fixed seed; 200 times under `make soak`. Readers of an array read what was shared, its memory is used again when
its last reader is dead, and in the end nothing is left.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.shm.script_process import PROLOGUE, ScriptError, ScriptProcess
from support.soak import IS_SOAK

import tundish as td
from tundish.shm import SharedArray

KILLS = 200 if IS_SOAK else 10
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
    return f"held[{value}] = SharedArray.attach({handle!r}).array; look()"


@pytest.mark.timeout(120 + 2 * KILLS)
def test_readers_are_killed_while_memory_is_used_again() -> None:
    draw = random.Random(20261121)
    readers = [ScriptProcess(READ) for _ in range(READERS)]
    try:
        kills = value = 0
        while kills < KILLS:
            value += 1
            shared = SharedArray.from_array(np.full(draw.choice([3000, 50_000]), value))
            reader = draw.randrange(READERS)
            if draw.random() < 0.5:
                readers[reader].run(reads(shared.handle, value))
                shared.close()
            else:
                # The kill came before the array was there, or later.
                readers[reader].start(reads(shared.handle, value))
                time.sleep(draw.choice([0, draw.uniform(0, 0.002)]))
                readers[reader].kill()
                kills += 1
                shared.close()
                readers[reader].__exit__(None, None, None)
                readers[reader] = ScriptProcess(READ)
            if draw.random() < 0.3:
                readers[draw.randrange(READERS)].run("look(); held.clear()")
        for one in readers:
            one.run("look()")
    finally:
        for one in readers:
            one.__exit__(None, None, None)
    assert td.shm.stats()["escaped_bytes"] == 0


@pytest.mark.parametrize("everybody", [False, True], ids=["owner", "all at once"])
def test_the_owner_is_killed_while_others_map(everybody: bool) -> None:
    with ScriptProcess(READ) as owner, ScriptProcess(READ) as reader, ScriptProcess(READ) as late:
        handle = owner.run(
            "shared = SharedArray.from_array(np.full(100_000, 7)); answer = repr(shared.handle)"
        )
        read = f"held[7] = SharedArray.attach({handle}).array; look()"
        reader.run(read)
        owner.kill()
        if everybody:
            reader.kill()
            late.kill()
            return
        reader.run("look()")
        with pytest.raises(ScriptError) as caught:
            late.run(read)
        assert caught.value.kind == "SegmentGoneError"
        assert "its owner has to live and to keep it open. Tried: " in caught.value.message


def test_memory_of_the_killed_is_free_at_once() -> None:
    with ScriptProcess(READ) as owner, ScriptProcess(READ) as reader:
        handle, descriptor = owner.run(
            "shared = SharedArray.from_array(np.full(1 << 20, 1))\n"
            "answer = [repr(shared.handle), shared.handle.descriptor]"
        )
        file = os.stat(f"/proc/{owner.pid}/fd/{descriptor}")
        reader.run(f"held[1] = SharedArray.attach({handle}).array; look()")
        assert holders(file) == {owner.pid, reader.pid}
        owner.kill()
        # time: ten times the second in which the kernel frees it
        end = time.monotonic() + 10
        while holders(file) != {reader.pid}:
            assert time.monotonic() < end, f"{holders(file)} have it 10 s after its owner's death"
        reader.run("look()")
        reader.kill()
        # time: as above
        end = time.monotonic() + 10
        while holders(file):
            assert time.monotonic() < end, f"{holders(file)} have it 10 s after its last reader's death"


def holders(file: os.stat_result) -> set[int]:
    """Return the processes that have the file open or mapped. Without any, the kernel frees its memory."""
    return {int(process.name) for process in Path("/proc").glob("[0-9]*") if holds(process, file)}


def holds(process: Path, file: os.stat_result) -> bool:
    # Skip processes that end meanwhile or belong to another user.
    with contextlib.suppress(OSError):
        for mapped in (process / "maps").read_text().splitlines():
            _, _, _, device, inode, *_ = mapped.split()
            if (device, int(inode)) == (device_of(file), file.st_ino):
                return True
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(descriptor.stat(), file):
                    return True
    return False


def device_of(file: os.stat_result) -> str:
    """Return the device as the kernel lists it in maps."""
    return f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}"
