"""Shared arrays among processes: how they are found, and when their memory is used again."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.shm.array_tasks import METHODS, Child
from support.shm.leftovers import mapped

import tundish as td
from tundish.shm import SharedArray, set_cache_limit

NUMBERS = np.arange(50_000)
SUM = int(NUMBERS.sum())


@pytest.fixture(params=METHODS)
def context(request: pytest.FixtureRequest) -> Any:
    return multiprocessing.get_context(request.param)


def inode(shared: SharedArray) -> int:
    return os.stat(f"/proc/self/fd/{shared.handle.descriptor}").st_ino


def test_a_child_attaches_to_a_handle_and_maps_it_once(context: Any) -> None:
    with SharedArray.from_array(NUMBERS) as shared, Child(context) as child:
        places = {child.ask("attach", shared.handle) for _ in range(3)}
        assert len(places) == 1
        assert places.pop()[0] == SUM
        # A child made by fork has its parent's descriptors and mappings too.
        own, maps = child.ask("segments")
        assert own >= 1 and maps >= 1
        if context.get_start_method() != "fork":
            assert (own, maps) == (1, 1)


def test_an_array_is_passed_to_a_child_as_its_argument(context: Any) -> None:
    with (
        SharedArray.create(50_000, np.int64) as shared,
        Child(context, shared, shared.handle, shared) as child,
    ):
        shared.array[:] = NUMBERS
        total, writable = child.ask("sum_of_given")
        assert total == SUM
        # A child that inherits the owner by fork may write too.
        assert writable == (context.get_start_method() == "fork")
        shared.array[0] = 1
        assert child.ask("sums") == [SUM + 1]


def test_a_spawned_child_cannot_attach_after_the_owner_closed() -> None:
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        shared = SharedArray.from_array(NUMBERS)
        first = inode(shared)
        with Child(context, shared.handle, shared.handle) as child:
            child.ask("pid")
            shared.close()
            # No process has a lease: the memory is used again, and the child gets an error.
            with pytest.raises(td.errors.SegmentGoneError, match="its owner has given it back"):
                child.ask("attach_given")
            child.ask("close_all")
            assert child.ask("segments")[0] == 0
        with SharedArray.from_array(NUMBERS) as again:
            assert inode(again) == first


def test_a_descriptor_that_was_used_is_closed_once(tmp_path: Path) -> None:
    """The descriptor number may belong to another file when the next handle of the segment is unpickled."""
    for method in ("spawn", "forkserver"):
        shared = SharedArray.from_array(NUMBERS)
        with Child(multiprocessing.get_context(method), shared, shared.handle, shared) as child:
            opened = child.ask("open_files", tmp_path / "file", 20)
            assert child.ask("attach_given", 1)[0] == SUM
            child.ask("close_all")
            assert child.ask("are_open", opened)
        shared.close()


def test_many_arrays_are_passed_at_once() -> None:
    arrays = [SharedArray.from_array(np.full(10, number)) for number in range(200)]
    for method in ("spawn", "forkserver"):
        with Child(multiprocessing.get_context(method), *arrays, *arrays) as child:
            assert child.ask("sum_of_given") == (0, False)
    for shared in arrays:
        shared.close()


class Measured:
    """Records the size of a handle's pickle while a process is spawned."""

    sizes: list[int] = []  # noqa: RUF012 - noted by the class itself

    def __init__(self, shared: SharedArray) -> None:
        self.shared = shared

    def __reduce__(self) -> Any:
        self.sizes.append(len(ForkingPickler.dumps(self.shared.handle)))
        return (int, ())


def test_a_handle_stays_small_on_its_way_to_a_child(context: Any) -> None:
    Measured.sizes.clear()
    with SharedArray.from_array(NUMBERS) as shared, Child(context, Measured(shared)) as child:
        child.ask("pid")
        Measured(shared).__reduce__()
        assert max(Measured.sizes) < 300
        assert len(pickle.dumps(shared.handle)) < 300


def test_memory_is_used_again_only_when_no_process_has_a_view(context: Any) -> None:
    shared = SharedArray.from_array(NUMBERS)
    first = inode(shared)
    with Child(context) as child:
        child.ask("attach", shared.handle)
        shared.close()
        assert td.shm.stats()["escaped_bytes"] > 0
        with SharedArray.from_array(-NUMBERS) as other:
            assert inode(other) != first
        assert child.ask("sums") == [SUM]
        child.ask("close_all")
        assert td.shm.stats()["escaped_bytes"] == 0
        with SharedArray.from_array(-NUMBERS) as one, SharedArray.from_array(-NUMBERS) as another:
            assert first in (inode(one), inode(another))


def test_memory_is_used_again_when_its_last_reader_was_killed(context: Any) -> None:
    shared = SharedArray.from_array(NUMBERS)
    with Child(context) as child:
        child.ask("attach", shared.handle)
        shared.close()
        assert td.shm.stats()["escaped_bytes"] > 0
        child.kill()
        assert td.shm.stats()["escaped_bytes"] == 0


@pytest.mark.parametrize("of_owner", [True, False], ids=["of create", "of from_array"])
def test_views_that_a_child_inherited_keep_the_memory(of_owner: bool) -> None:
    shared = SharedArray.create(NUMBERS.shape, NUMBERS.dtype) if of_owner else SharedArray.from_array(NUMBERS)
    view = shared.array
    if of_owner:
        view[:] = NUMBERS
    first = inode(shared)
    with Child(multiprocessing.get_context("fork"), view) as child:
        child.ask("pid")
        del view
        shared.close()
        assert td.shm.stats()["escaped_bytes"] > 0
        with SharedArray.from_array(-NUMBERS) as other:
            assert inode(other) != first
        child.stop()
    assert td.shm.stats()["escaped_bytes"] == 0


def test_the_peak_counts_what_a_process_attached_to() -> None:
    one, two = SharedArray.from_array(NUMBERS), SharedArray.from_array(-NUMBERS)
    with one, two, Child(multiprocessing.get_context("spawn")) as child:
        for shared in (one, two, one):
            child.ask("attach", shared.handle)
        both = child.ask("stats")
        assert both["mapped_bytes"] >= 2 * NUMBERS.nbytes
        assert both["peak_bytes"] == both["mapped_bytes"]
        child.ask("close_all")
        # What was closed counts no more, and is part of no later peak.
        child.ask("share", 1, 1)
        after = child.ask("stats")
        assert after["mapped_bytes"] < NUMBERS.nbytes
        assert after["peak_bytes"] == both["peak_bytes"]


def test_a_child_neither_recycles_nor_frees_inherited_segments() -> None:
    set_cache_limit(1 << 30)
    kept = SharedArray.from_array(NUMBERS)
    idle = SharedArray.from_array(NUMBERS)
    first = inode(idle)
    idle.close()
    with Child(multiprocessing.get_context("fork"), kept) as child:
        assert child.ask("stats") == {
            "mapped_bytes": 0,
            "cached_bytes": 0,
            "escaped_bytes": 0,
            "peak_bytes": 0,
        }
        # The child drops the idle segment, whose memory it would keep alive.
        assert child.ask("segments") == (1, 1)
        handle = child.ask("share", 50_000, 3)
        assert SharedArray.attach(handle).array.sum() == 150_000
        child.ask("close_all")
        assert kept.array.sum() == SUM
        with SharedArray.from_array(NUMBERS) as again:
            assert inode(again) == first
    assert kept.array.sum() == SUM
    kept.close()


def test_a_forked_child_keeps_no_memory_of_its_parent_alive() -> None:
    # In an interpreter of its own, which asks for no statistics and sets no limit.
    script = """
import os, time
import numpy as np
import tundish as td
from tundish import _native
td.shm.SharedArray.from_array(np.ones(100_000)).close()
def segments():
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith("/memfd:tundish") for link in links if os.path.islink(link))
print(segments(), flush=True)
if os.fork() == 0:
    print(segments(), flush=True)
    os._exit(0)
os.wait()
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.split() == ["1", "0"], ran.stderr


def test_siblings_find_each_other_and_go_on_without_the_owner(context: Any) -> None:
    with Child(context) as owner, Child(context) as one, Child(context) as other:
        handle = owner.ask("share", 1000, 2)
        assert one.ask("attach", handle)[0] == 2000
        through = one.ask("handle")
        owner.kill()
        assert one.ask("sums") == [2000]
        with pytest.raises(
            td.errors.SegmentGoneError, match=r"its owner has to live and to keep it open\. Tried: "
        ):
            other.ask("attach", handle)
        assert other.ask("attach", through)[0] == 2000
        assert SharedArray.attach(through).array.sum() == 2000


def test_a_tensor_of_a_reader_is_its_own_from_the_first_write_on(context: Any) -> None:
    with SharedArray.from_array(NUMBERS) as shared, Child(context) as child:
        assert child.ask("write_tensor", shared.handle, 1) == [len(NUMBERS), SUM]
        assert np.array_equal(shared.array, NUMBERS)


def test_children_are_forked_while_threads_share() -> None:
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            with SharedArray.from_array(np.ones(300_000)) as shared:
                SharedArray.attach(shared.handle).array.sum()
            td.shm.stats()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(20):
            with SharedArray.from_array(np.full(10, number)) as shared:
                pid = os.fork()
                if pid == 0:
                    mine = SharedArray.from_array(shared.array * 2)
                    os._exit(
                        int(SharedArray.attach(shared.handle).array.sum() + mine.array.sum() != 30 * number)
                    )
                assert os.waitpid(pid, 0)[1] == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_private_pages_are_taken_only_where_a_tensor_is_written() -> None:
    with SharedArray.create(8 << 20, np.uint8) as shared:
        shared.array[:] = 1
        tensor = SharedArray.attach(shared.handle).tensor()
        assert int(tensor[::4096].sum()) == 2048
        assert private_kibibytes() == 0
        tensor[: 1 << 20] = 2
        assert private_kibibytes() == 1024
        assert shared.array.max() == 1
        # Pages that were not written are still shared.
        shared.array[2 << 20] = 9
        assert tensor[2 << 20] == 9


def private_kibibytes() -> int:
    """Return the bytes of private copies in mappings of segments."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            counts = "memfd:tundish" in line
        elif counts and line.startswith("Anonymous:"):
            total += int(line.split()[1])
    return total


def test_mappings_end_with_the_last_view() -> None:
    before = len(mapped())
    with SharedArray.from_array(NUMBERS) as shared:
        tensor, array = shared.tensor(), shared.array
        assert len(mapped()) > before
    set_cache_limit(0)
    assert len(mapped()) > before
    del tensor, array
    set_cache_limit(0)
    assert len(mapped()) == before
