"""Writers that share a node, fork, run out of room, are interrupted, stopped or killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from support.checkpoint.failpoints import SystemCall, environment
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
    return ShardWriter(folder, [(name, size)], checksum=True)
"""


@contextlib.contextmanager
def started(
    script: str, folder: Path, *arguments: object, setting: Mapping[str, str] = {}
) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `script`; killed at the end of the block, if it has not ended."""
    with subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script), str(folder), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **setting},
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
    slow = environment(SystemCall("write", str(folder / "a"), 0), "slow 4000")
    with started(script, folder, setting=slow) as process:
        assert next_line(process) == "waiting\n"
        until_it_waits(process.pid)
        process.send_signal(signal.SIGINT)
        assert next_line(process) == "interrupted\n"
        out, err = process.communicate("\n", timeout=60)
    assert out == f"{MIB}\n", err
    assert (folder / "a").read_bytes() == b"\1" * MIB


def test_threads_stand_back_and_the_caller_does_not(folder: Path) -> None:
    script = """
    import ctypes, platform
    ioprio_get = {"x86_64": 252, "aarch64": 31}[platform.machine()]
    writer = writer_of("a", 64 * MIB)
    writer.write("a", 0, image_of(32 * MIB), 0, 32 * MIB)
    # The threads wait for the rest.
    while writer.progress()[0] < 32 * MIB:
        time.sleep(0.001)
    for task in Path("/proc/self/task").iterdir():
        name, rest = (task / "stat").read_text().rsplit(")", 1)
        priority = ctypes.CDLL(None).syscall(ioprio_get, 1, int(task.name))
        print(name.partition("(")[2].startswith("tundish-write"), rest.split()[16], hex(priority))
    writer.abort()
    """
    lines = run(script, folder).splitlines()
    own = [line for line in lines if line.startswith("True")]
    # The lowest level, 7, of the class "best effort", 2.
    assert own == [f"True {min(19, os.nice(0) + 10)} 0x4007"] * 4
    assert [line for line in lines if line.startswith(f"False {os.nice(0)} ")]


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


def test_a_limit_on_the_size_of_files_shows_before_the_first_byte(folder: Path) -> None:
    script = """
    import resource
    from tundish.errors import StorageError
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
    try:
        ShardWriter(folder, [("small", 5), ("large", MIB + 1)], checksum=True)
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
