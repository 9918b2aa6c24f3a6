"""Packing under kills, signals, full and vanished disks, forks and inputs that change."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.interrupts import wait_after_interrupt
from support.packing.small_disk import small_disk

import tundish as td
from tundish.errors import AlreadyExistsError, InvalidInputError, StorageError

SAMPLES = 3_000_000
BUILD = """
import sys, numpy as np, tundish as td
lengths = np.load({lengths!r}, mmap_mode="r")
print("ready", flush=True)
plan = td.pack(lengths, 512, seed=1, {destination})
print(plan.fingerprint, flush=True)
"""


@pytest.fixture(scope="module")
def lengths_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("inputs") / "lengths.npy"
    np.save(file, np.random.default_rng(0).integers(0, 2000, SAMPLES))
    return file


def start(lengths: Path, destination: str) -> subprocess.Popen[str]:
    code = BUILD.format(lengths=str(lengths), destination=destination)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_sigkill_leaves_a_whole_plan_or_none(lengths_file: Path, tmp_path: Path) -> None:
    """Killed at many instants; what is visible is whole, and the next builder clears the rest away."""
    lengths = np.load(lengths_file, mmap_mode="r")
    begun = time.monotonic()
    finished = start(lengths_file, f"out={str(tmp_path / 'first')!r}")
    finished.communicate(timeout=60)
    assert finished.returncode == 0
    duration = time.monotonic() - begun
    whole = td.PackPlan.load(tmp_path / "first")
    seen_leftovers = 0
    for step in range(8):
        cache = tmp_path / "cache"
        builder = start(lengths_file, f"cache_dir={str(cache)!r}")
        time.sleep(duration * step / 8)
        builder.kill()
        builder.communicate(timeout=60)
        for entry in cache.iterdir() if cache.exists() else ():
            if entry.name.startswith("."):
                seen_leftovers += 1
                continue
            plan = td.PackPlan.load(entry, lengths)
            assert plan.fingerprint == whole.fingerprint
            assert np.array_equal(plan.longest, whole.longest)
            for file in entry.iterdir():
                file.unlink()
            entry.rmdir()
    assert seen_leftovers > 0, "no kill met a folder half-written; the test shows nothing"
    plan = td.pack(lengths, 512, seed=1, cache_dir=cache)
    plan.verify()
    assert [entry.name for entry in cache.iterdir()] == [f"plan-{whole.fingerprint}"]


def test_two_builders_at_once_end_with_one_plan(lengths_file: Path, tmp_path: Path) -> None:
    builders = [start(lengths_file, f"cache_dir={str(tmp_path / 'cache')!r}") for _ in range(3)]
    answers = [builder.communicate(timeout=100) for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0, 0], answers
    assert len({answer[0] for answer in answers}) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize("where", ["memory", "files"])
def test_ctrl_c_ends_the_work_within_100_ms(lengths_file: Path, tmp_path: Path, where: str) -> None:
    lengths = np.tile(np.load(lengths_file), 5)
    destination = {} if where == "memory" else {"out": tmp_path / "plan"}
    waits = []
    for delay in (0.05, 0.1, 0.15, 0.2):
        waits.append(wait_after_interrupt(delay, lambda: td.pack(lengths, 512, seed=0, **destination)))
        assert list(tmp_path.iterdir()) == []
    # time: the shortest of several waits; the whole call takes many times as long
    assert min(waits) < 0.1, waits


def test_ctrl_c_does_not_wait_for_the_room_of_large_files(tmp_path: Path) -> None:
    """They are removed when the call ends; to give their room back takes the kernel longer than that."""
    destination = tmp_path / "plan"
    waits = []
    for _ in range(3):
        waits.append(wait_after_interrupt(0.4, lambda: td.pack([10**8], 1, out=destination)))
        assert list(tmp_path.iterdir()) == []
    # time: the shortest of several waits; the whole call takes many times as long
    assert min(waits) < 0.1, waits


def test_ctrl_c_ends_the_order_of_an_epoch_within_100_ms() -> None:
    sampler = td.PackedBatchSampler(td.pack([30_000_000], 1), 1, 0, 1)
    waits = []
    for _ in range(3):
        # Counted from when the interrupt is due: it is not sent while other code keeps the interpreter to itself.
        due = time.monotonic() + 0.05
        wait_after_interrupt(0.05, lambda: next(iter(sampler)))
        waits.append(time.monotonic() - due)
    # time: the shortest of several waits; the whole call takes many times as long
    assert min(waits) < 0.1, waits


def test_ctrl_c_ends_a_look_up_and_a_check_within_100_ms() -> None:
    many = np.broadcast_to(np.int64(0), 40_000_000)
    one = td.pack([8], 8)
    # Packs of one piece each, and one pack of all pieces.
    calls = {
        "many packs": lambda: one.lookup(many),
        "a large pack": lambda: large[0],
        "verify": lambda: large.verify(),
        "sample_index": lambda: tail.sample_index(),
    }
    lengths = np.ones(40_000_000, dtype=np.int8)
    large = td.pack(lengths, len(lengths))
    # An empty sample on a boundary, and a tail that begins behind nearly all samples.
    tail = td.pack(np.concatenate((np.zeros(1, dtype=np.int8), lengths)), len(lengths) - 1)
    for name, call in calls.items():
        waits = [wait_after_interrupt(delay, call) for delay in (0.02, 0.05, 0.08)]
        # time: the shortest of several waits; the whole call takes many times as long
        assert min(waits) < 0.1, (name, waits)


@pytest.mark.parametrize(
    ("disk_options", "options"),
    [
        # Of an order that leaves out half of the samples nobody knows before that it names the longest.
        ("size=2m", {"order": np.arange(250_000)}),
        # It cannot have as many files.
        ("size=64m,nr_inodes=7", {}),
    ],
    ids=["few bytes", "few files"],
)
def test_a_full_disk_is_an_error_and_leaves_nothing(
    disk_options: str, options: dict[str, Any], tmp_path: Path
) -> None:
    lengths = np.full(500_000, 300)
    plan = td.pack(lengths, 512, **options)
    with small_disk(tmp_path / "disk", disk_options) as disk:
        for write in (
            lambda: td.pack(lengths, 512, out=disk / "plan", **options),
            lambda: plan.save(disk / "plan"),
            lambda: td.pack(lengths, 512, cache_dir=disk, **options),
        ):
            with pytest.raises(StorageError, match="plan") as caught:
                write()
            assert caught.value.errno == 28
            assert list(disk.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [{}, {"seed": 1}, {"drop_last": False}, {"order": np.arange(10_000, 1_000_000)}],
    ids=["in order", "shuffled", "with the tail", "in a given order"],
)
def test_a_plan_of_short_samples_is_refused_for_its_pieces(options: dict[str, Any], tmp_path: Path) -> None:
    """Its packs would fit the disk; it is its pieces that do not."""
    lengths = np.ones(1_000_000, np.int32)
    plan = td.pack(lengths, 4096, **options)
    with small_disk(tmp_path / "disk", "size=2m") as disk:
        before = disk.stat().st_mtime_ns
        for write in (
            lambda: td.pack(lengths, 4096, out=disk / "plan", **options),
            lambda: plan.save(disk / "plan"),
            lambda: td.pack(lengths, 4096, cache_dir=disk, **options),
        ):
            with pytest.raises(
                StorageError, match=r"takes \d+ bytes or more .* has \d+ bytes free"
            ) as caught:
                write()
            assert caught.value.errno == 28
            needed, free = re.search(r"takes (\d+) .* has (\d+) bytes free", str(caught.value)).groups()
            assert 0.95 * 4 * len(plan.indices) < int(needed) <= files_bytes(plan, tmp_path)
            assert 1 << 20 < int(free) <= 2 << 20
            assert disk.stat().st_mtime_ns == before, "nothing was ever made in it"


def files_bytes(plan: td.PackPlan, folder: Path) -> int:
    if not (folder / "elsewhere").exists():
        plan.save(folder / "elsewhere")
    return sum(file.stat().st_size for file in (folder / "elsewhere").iterdir())


def test_save_knows_to_the_byte_what_it_takes(tmp_path: Path) -> None:
    plan = td.pack(np.ones(1_000_000, np.int32), 4096)
    with small_disk(tmp_path / "disk", "size=2m") as disk, pytest.raises(StorageError) as caught:
        plan.save(disk / "plan")
    assert f"takes {files_bytes(plan, tmp_path)} bytes" in str(caught.value)


# The kernel ends it, as a kill would, at the byte where a file becomes too large.
KILLED_WRITER = """
import resource, signal, sys, numpy as np, tundish as td
plan = td.pack(np.ones(300_000, np.int32), 64)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (1_150_000, 1_150_000))
plan.save(sys.argv[1] + "/plan")
"""


def test_what_a_killed_writer_left_makes_room(tmp_path: Path) -> None:
    """A plan is not refused for lack of room that the writing of it would make."""
    plan = td.pack(np.ones(300_000, np.int32), 64)
    with small_disk(tmp_path / "disk", "size=2m") as disk:
        writer = subprocess.run(
            [sys.executable, "-c", KILLED_WRITER, str(disk)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert writer.returncode == -signal.SIGXFSZ, writer.stderr
        (leftover,) = disk.iterdir()
        assert sum(file.stat().st_size for file in leftover.iterdir()) > 1 << 20
        plan.save(disk / "plan")
        assert [path.name for path in disk.iterdir()] == ["plan"]


def test_a_plan_that_is_there_is_saved_again_without_room(tmp_path: Path) -> None:
    plan = td.pack(np.ones(300_000, np.int32), 64)
    with small_disk(tmp_path / "disk", "size=2m") as disk:
        plan.save(disk / "plan")
        plan.save(disk / "plan")
        with pytest.raises(AlreadyExistsError):
            td.pack(np.ones(300_000, np.int32), 32).save(disk / "plan")


def test_a_plan_that_the_disk_has_no_room_for_is_refused_before_any_work(tmp_path: Path) -> None:
    for destination in ({"out": tmp_path / "plan"}, {"cache_dir": tmp_path}):
        with pytest.raises(StorageError, match=r"takes \d+ bytes or more .* has \d+ bytes free") as caught:
            td.pack([2**50], 1, **destination)
        assert caught.value.errno == 28
        assert list(tmp_path.iterdir()) == []


def test_a_plan_that_is_there_needs_no_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=1m") as disk:
        # No plan is kept, as its files are mapped.
        first, again = (td.pack([25_000], 1, out=disk / "plan").fingerprint for _ in range(2))
        assert first == again


def test_a_read_only_disk_is_refused(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "ro") as disk:
        for write in (
            lambda: td.pack([5, 5], 2, out=disk / "plan"),
            lambda: td.pack([5, 5], 2).save(disk / "plan"),
            lambda: td.pack([5, 5], 2, cache_dir=disk / "cache"),
        ):
            with pytest.raises(StorageError, match="disk") as caught:
                write()
            assert caught.value.errno == 30


def test_packing_works_in_a_forked_child() -> None:
    """The parent's pool has threads that a child does not inherit; a child that waited for them would hang."""
    lengths = np.random.default_rng(0).integers(0, 50, 500_000)
    expected = td.pack(lengths, 64, threads=2).fingerprint
    busy = threading.Thread(target=lambda: [td.pack(lengths, 64, threads=2) for _ in range(20)])
    busy.start()
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(60)
                code = 0 if td.pack(lengths, 64, threads=2).fingerprint == expected else 2
            finally:
                os._exit(code)
        children.append(child)
        time.sleep(0.02)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    busy.join()


def test_inputs_that_change_meanwhile_never_crash() -> None:
    """The arrays are read without the GIL; anyone who writes to them gets an error or a wrong plan, no more."""
    code = """
import threading, numpy as np, tundish as td
lengths = np.random.default_rng(0).integers(0, 2000, 300_000)
order = np.random.default_rng(1).permutation(len(lengths))
stop = threading.Event()
def disturb():
    random = np.random.default_rng(2)
    while not stop.is_set():
        lengths[random.integers(0, len(lengths), 1000)] = random.choice([0, 1, -5, 2**40, 2**62, 700])
        order[random.integers(0, len(order), 100)] = random.choice([0, -1, 2**50, 17, len(order)])
        lengths[:] = np.clip(lengths, 0, 5000)
writers = [threading.Thread(target=disturb) for _ in range(2)]
for writer in writers: writer.start()
errors = plans = 0
for attempt in range(150):
    np.copyto(order, np.random.default_rng(1).permutation(len(lengths)))
    try:
        plan = td.pack(lengths, 64, order=order if attempt % 2 else None, threads=1 + attempt % 2)
        plans += 1
    except td.TundishError:
        errors += 1
stop.set()
for writer in writers: writer.join()
print(plans, errors)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, (done.returncode, done.stderr)
    _, errors = map(int, done.stdout.split())
    assert errors > 0, "nothing ever changed while it was read; the test shows nothing"


def test_lengths_that_grow_beyond_any_sum_meanwhile_never_panic() -> None:
    """64-bit arithmetic, with lengths that overflow it as soon as they are changed."""
    code = """
import threading, time, numpy as np, tundish as td
small = np.zeros(200_000, np.int64)
small[0] = 2**31 + 5
large = np.full(200_000, 2**62)
lengths = small.copy()
stop = threading.Event()
def disturb():
    while not stop.is_set():
        lengths[:] = large
        lengths[:] = small
        time.sleep(0.0002)
writer = threading.Thread(target=disturb)
writer.start()
attempt = errors = 0
begun = time.monotonic()
# On a busy machine the writer may hardly be let run.
while attempt < 600 or (not errors and time.monotonic() - begun < 60):
    attempt += 1
    try:
        td.pack(lengths, (2**40, 2**62)[attempt % 2], threads=1 + attempt // 2 % 2)
    except td.TundishError:
        errors += 1
stop.set()
writer.join()
print(errors)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert int(done.stdout) > 0, "nothing ever changed while it was read; the test shows nothing"


def test_a_cache_that_was_tampered_with_is_not_used(tmp_path: Path) -> None:
    plan = td.pack([5, 5, 5], 4, cache_dir=tmp_path)
    other = td.pack([5, 5, 6], 4, cache_dir=tmp_path)
    assert plan.path is not None and other.path is not None
    for file in plan.path.iterdir():
        file.write_bytes((other.path / file.name).read_bytes())
    with pytest.raises(FileExistsError, match="another plan"):
        td.pack([5, 5, 5], 4, cache_dir=tmp_path)
    (plan.path / "plan.json").unlink()
    with pytest.raises(FileExistsError):
        td.pack([5, 5, 5], 4, cache_dir=tmp_path)


def test_bad_input_leaves_no_folder(tmp_path: Path) -> None:
    for arguments in ({"order": [0, 0]}, {"order": [7]}):
        with pytest.raises(InvalidInputError):
            td.pack([5, 5], 2, out=tmp_path / "plan", **arguments)
        with pytest.raises(InvalidInputError):
            td.pack([5, 5], 2, cache_dir=tmp_path, **arguments)
    assert list(tmp_path.iterdir()) == []


# In a process of its own, which gets no more than it has and `room` bytes from there on.
STARVED = """
import re, resource, sys, numpy as np, tundish as td
from tundish.errors import OutOfMemoryError
ones = np.ones(20_000_000, np.int8)
plan = td.pack(ones, 1, threads=1)
size = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (size + (16 << 20), resource.RLIM_INFINITY))
try:
    eval(sys.argv[1])
except OutOfMemoryError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        ("td.pack(ones, 1, threads=1)", "out= or cache_dir="),
        # Each has an index a sample.
        ("td.pack(ones, 4096, threads=1, seed=0, out=sys.argv[2] + '/plan')", None),
        ("td.pack(ones, 4096, threads=1, seed=0)", "out= or cache_dir="),
        ("plan.arrays()", "attributes"),
    ],
)
def test_running_out_of_memory_is_told_as_that(call: str, advice: str | None, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARVED, call, tmp_path],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "bytes of memory" in done.stdout
    assert advice in done.stdout if advice else "out=" not in done.stdout
    assert list(tmp_path.iterdir()) == []
