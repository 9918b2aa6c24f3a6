"""Writers that share a node, fork, run out of room, are interrupted, stopped or killed."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.interrupts import until_it_waits

MIB = 1 << 20
PRELUDE = """
import os, signal, sys, time
from pathlib import Path
from tundish._native import FileImage, ShardWriter
folder = Path(sys.argv[1])
MIB = 1 << 20

def image_of(size, byte=0):
    image = FileImage(size)
    view = memoryview(image)
    view[:] = bytes([byte]) * size
    return image

def writer_of(name, size):
    return ShardWriter(folder, [(name, size)], checksum=True, writers_per_node=1)
"""


@contextlib.contextmanager
def started(script: str, folder: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `script`; killed at the end of the block, if it has not ended."""
    with subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script), str(folder), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def run(script: str, folder: Path, *arguments: object) -> str:
    with started(script, folder, *arguments) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None and process.stderr is not None
    return process.stdout.readline() or process.stderr.read()


@contextlib.contextmanager
def slot_taken(root: Path) -> Iterator[None]:
    """The only slot of the writers to folders in `root` is held by this process."""
    status = root.stat()
    name = f"tundish-writer-{os.geteuid()}-{status.st_dev:x}-{status.st_ino:x}-0"
    slot = Path("/dev/shm") / name
    with slot.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            slot.unlink()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / ".hf-1.incomplete"
    folder.mkdir()
    return folder


def test_ctrl_c_ends_the_wait_and_the_writing_goes_on(folder: Path) -> None:
    script = """
    writer = writer_of("a", MIB)
    writer.write("a", 0, image_of(MIB, 1), 0, MIB)
    print("waiting", flush=True)
    try:
        writer.finish()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    sys.stdin.readline()
    print(writer.finish()[0].size, flush=True)
    """
    with started(script, folder) as process:
        with slot_taken(folder.parent):
            assert next_line(process) == "waiting\n"
            until_it_waits(process.pid)
            process.send_signal(signal.SIGINT)
            # Nothing can be written as long as the slot is taken.
            assert next_line(process) == "interrupted\n"
        out, err = process.communicate("\n", timeout=60)
    assert out == f"{MIB}\n", err
    assert (folder / "a").read_bytes() == b"\1" * MIB


def test_an_abort_does_not_wait_for_a_slot(folder: Path) -> None:
    script = """
    writer = writer_of("a", MIB)
    writer.write("a", 0, image_of(MIB), 0, MIB)
    time.sleep(0.2)
    print(writer.progress())
    start = time.monotonic()
    writer.abort()
    assert time.monotonic() - start < 1
    """
    with slot_taken(folder.parent):
        assert run(script, folder) == f"(0, {MIB})\n"


def test_threads_stand_back_and_the_caller_does_not(folder: Path) -> None:
    script = """
    import ctypes, platform
    ioprio_get = {"x86_64": 252, "aarch64": 31}[platform.machine()]
    writer = writer_of("a", 64 * MIB)
    writer.write("a", 0, image_of(64 * MIB), 0, 64 * MIB)
    time.sleep(0.2)
    for task in Path("/proc/self/task").iterdir():
        name, rest = (task / "stat").read_text().rsplit(")", 1)
        priority = ctypes.CDLL(None).syscall(ioprio_get, 1, int(task.name))
        print(name.partition("(")[2].startswith("tundish-write"), rest.split()[16], hex(priority))
    writer.abort()
    """
    with slot_taken(folder.parent):
        lines = run(script, folder).splitlines()
    own = [line for line in lines if line.startswith("True")]
    # The lowest level, 7, of the class "best effort", 2.
    assert own == [f"True {min(19, os.nice(0) + 10)} 0x4007"] * 4
    assert [line for line in lines if line.startswith(f"False {os.nice(0)} ")]


WRITE_AND_TIME = """
size = 150 * MIB
image = image_of(size)
# With checksums bytes count once summed, maybe after another writer began; without them, once written.
writer = ShardWriter(folder, [(sys.argv[2], size)], checksum=False, writers_per_node=int(sys.argv[3]))
print("ready", flush=True)
sys.stdin.readline()
writer.write(sys.argv[2], 0, image, 0, size)
begun, unfinished = None, None
while (done := writer.progress()[0]) < size:
    now = time.monotonic()
    if done and begun is None:
        begun = now
    unfinished = now
    time.sleep(0.0005)
writer.finish()
print(begun or time.monotonic(), unfinished, flush=True)
"""


@pytest.mark.parametrize("writers_per_node", [1, 3])
def test_as_many_write_at_once_as_may(folder: Path, writers_per_node: int) -> None:
    other = folder.parent / ".dcp-1.incomplete"
    other.mkdir()
    times = []
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(started(WRITE_AND_TIME, one, number, writers_per_node))
            for number, one in enumerate([folder, other, folder])
        ]
        for process in processes:
            assert next_line(process) == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        for process in processes:
            begun, unfinished = map(float, next_line(process).split())
            times.append((begun, unfinished))
    times.sort()
    overlaps = [before[1] > after[0] for before, after in itertools.pairwise(times)]
    assert any(overlaps) == (writers_per_node > 1), times
    status = folder.parent.stat()
    assert not list(Path("/dev/shm").glob(f"tundish-writer-*-{status.st_dev:x}-{status.st_ino:x}-*"))


def test_a_killed_writer_frees_its_slot(folder: Path) -> None:
    script = """
    writer = writer_of("a", 2000 * MIB)
    image = FileImage(2000 * MIB)
    for offset in range(0, 2000 * MIB, 8 * MIB):
        writer.write("a", offset, image, 0, 8 * MIB)
    while writer.progress()[0] == 0:
        time.sleep(0.001)
    print("writing", flush=True)
    time.sleep(60)
    """
    with started(script, folder) as process:
        assert next_line(process) == "writing\n"
        process.kill()
    begin = time.monotonic()
    run('w = writer_of("b", 5); w.write("b", 0, image_of(5), 0, 5); w.finish()', folder)
    # time: a writer that holds its slot and stands still is passed over after 15 s
    assert time.monotonic() - begin < 14
    status = folder.parent.stat()
    assert not list(Path("/dev/shm").glob(f"tundish-writer-*-{status.st_dev:x}-{status.st_ino:x}-*"))


def test_a_forked_child_has_no_part_in_a_writer(folder: Path) -> None:
    script = """
    import warnings
    warnings.simplefilter("ignore")  # Python warns of forks with threads; that is what is tried.
    image = image_of(64 * MIB, 5)
    writer = writer_of("a", 64 * MIB)
    writer.write("a", 0, image, 0, 32 * MIB)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for call in (writer.finish, lambda: writer.write("a", 0, image, 0, 1)):
                try:
                    call()
                except ValueError as error:
                    assert "forked" in str(error), error
                else:
                    raise AssertionError("not refused")
            writer.abort()
            del writer
            # The parent's memory is not shared: neither keeps a second copy of what the other writes.
            assert bytes(memoryview(image)[:3]) == bytes(3)
            del image
            own = writer_of("child", 5)
            own.write("child", 0, image_of(5, 6), 0, 5)
            own.finish()
            code = 0
        finally:
            os._exit(code)
    assert bytes(memoryview(image)[:3]) == bytes([5] * 3)
    writer.write("a", 32 * MIB, image, 32 * MIB, 32 * MIB)
    # While the child may still live.
    writer.finish()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """
    run(script, folder)
    assert (folder / "a").read_bytes() == bytes([5]) * (64 * MIB)
    assert (folder / "child").read_bytes() == bytes([6]) * 5


def test_a_slot_is_given_back_though_a_child_inherited_it(folder: Path) -> None:
    script = """
    import warnings
    warnings.simplefilter("ignore")
    writer = writer_of("a", 400 * MIB)
    writer.write("a", 0, image_of(400 * MIB), 0, 400 * MIB)
    while writer.progress()[0] == 0:
        time.sleep(0.001)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    writer.finish()
    start = time.monotonic()
    second = writer_of("b", 5)
    second.write("b", 0, image_of(5), 0, 5)
    second.finish()
    took = time.monotonic() - start
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert took < 2, took
    """
    run(script, folder)


def test_a_limit_on_the_size_of_files_shows_before_the_first_byte(folder: Path) -> None:
    script = """
    import resource
    from tundish.errors import StorageError
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
    try:
        ShardWriter(folder, [("small", 5), ("large", MIB + 1)], checksum=True, writers_per_node=1)
    except StorageError as error:
        print(error.errno, error.filename)
    """
    assert run(script, folder) == f"27 {folder / 'large'}\n"


@pytest.mark.usefixtures("tmp_path_of_all")
def test_a_folder_that_may_not_be_written_is_refused(folder: Path) -> None:
    script = """
    from tundish.errors import StorageError
    os.setgid(65534)
    os.setuid(65534)
    try:
        writer_of("a", 5)
    except StorageError as error:
        print(error.errno, error.filename)
    """
    if os.geteuid() != 0:
        folder.chmod(0o500)
        pytest.skip("needs another user to be")
    assert run(script, folder) == f"13 {folder / 'a'}\n"


def test_the_interpreter_ends_though_a_writer_is_at_work(folder: Path) -> None:
    script = """
    writer = writer_of("a", 400 * MIB)
    writer.write("a", 0, image_of(400 * MIB), 0, 400 * MIB)
    """
    run(script, folder)
