"""A full `/dev/shm` is an error when a segment is made, with the sizes asked and free, and never a signal."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.shm.private_shm import private_shm
from support.shm.script_process import ScriptError, ScriptProcess

from tundish.errors import StorageError
from tundish.shm import SharedArray, sweep

ROOM = 8 << 20
PAGE = 4096


@pytest.fixture
def small() -> Iterator[Path]:
    with private_shm(ROOM) as folder:
        yield folder
        assert list(folder.iterdir()) == []


def free(folder: Path) -> int:
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize


def test_an_array_that_does_not_fit_is_refused_with_the_size_asked_and_the_size_free(small: Path) -> None:
    with SharedArray.create(3 << 20, np.uint8, name="first") as first:
        left = free(small)
        makes = (
            lambda: SharedArray.create(6 << 20, np.uint8, name="second"),
            lambda: SharedArray.from_array(np.ones(6 << 20, np.uint8), name="second"),
        )
        for make in makes:
            with pytest.raises(StorageError) as full:
                make()
            assert full.value.errno == errno.ENOSPC
            assert full.value.filename.endswith("-second")
            numbers = [int(number) for number in re.findall(r"\d{5,}", str(full.value))]
            assert numbers == [(6 << 20) + PAGE, left]
            assert free(small) == left, "nothing of it is kept"
        first.array[:] = 1
        # All of the free space can be used.
        with SharedArray.create(left - PAGE, np.uint8, name="second") as second:
            assert free(small) == 0
            second.array[:] = 2


def test_the_room_of_a_dead_segment_is_free_for_the_next(small: Path) -> None:
    with ScriptProcess() as script:
        script.run("held = SharedArray.create(6 << 20, np.uint8, name='large')")
        script.kill()
    with SharedArray.create(6 << 20, np.uint8, name="large") as large:
        large.array[:] = 1
    with ScriptProcess() as script:
        script.run("held = SharedArray.create(6 << 20, np.uint8, name='large')")
        script.kill()
    assert len(sweep().removed) == 1


# Makes segments, writes every page of them, and goes on until there is no room.
FILL = """
kept, answer = [], None
while answer is None:
    try:
        kept.append(SharedArray.create({size}, np.uint8, name=f"of{{os.getpid()}}-{{len(kept)}}"))
        kept[-1].array[:] = 7
    except OSError as error:
        answer = error.errno
"""


def test_processes_that_fill_it_together_get_errors_and_no_signal(small: Path) -> None:
    for _ in range(5):
        scripts = [ScriptProcess() for _ in range(3)]
        for number, script in enumerate(scripts):
            script.start(FILL.format(size=(100 << 10) * (number + 1)))
        for script in scripts:
            with script:
                assert script.result() == errno.ENOSPC
                assert script.run("answer = all(int(one.array.min()) == 7 for one in kept)")
                assert script.finish() == 0
        assert list(small.iterdir()) == []


def test_an_address_space_without_room_is_out_of_memory_and_nothing_is_kept() -> None:
    with ScriptProcess() as script:
        script.run("""
import gc, resource
from tundish.shm import stats
kept = SharedArray.from_array(np.full(1000, 7))
before = stats()["mapped_bytes"]
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (64 << 20), -1))
""")
        for make in (
            "SharedArray.create(1 << 28, np.uint8)",
            "SharedArray.create((1 << 28,), np.uint8, name='wide')",
        ):
            with pytest.raises(ScriptError, match="Cannot allocate memory") as refused:
                script.run(make)
            assert refused.value.kind == "OutOfMemoryError"
        assert script.run("answer = [stats()['mapped_bytes'] - before, int(kept.array.sum())]") == [0, 7000]
        assert script.finish() == 0
