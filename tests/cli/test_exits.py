"""How the command `tundish` ends where something comes between: a reader that goes, a full disk, no memory, Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support.command_line import COMMAND, tundish

import tundish as td

# Buffered, as a user's output is: what cannot be written shows late.
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    td.pack(np.array([5, 3, 9, 2]), 8, out="plan")
    return tmp_path / "plan"


@pytest.mark.parametrize("words", [["--help"], ["plan", "show", "plan"], ["plan", "show", "plan", "--json"]])
def test_a_closed_pipe_prints_no_traceback(words: list[str], plan: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        run = subprocess.run(
            [*COMMAND, *words],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            env=BUFFERED,
            check=False,
            timeout=60,
        )
    finally:
        os.close(writer)
    assert (run.returncode, run.stderr) == (141, "")


def test_standard_output_on_a_full_disk_exits_with_3(plan: Path) -> None:
    with Path("/dev/full").open("w") as full:
        run = subprocess.run(
            [*COMMAND, "plan", "show", "plan"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=BUFFERED,
            check=False,
            timeout=60,
        )
    assert (run.returncode, run.stderr) == (3, "tundish: standard output: No space left on device\n")


def test_a_closed_standard_output_exits_with_3(plan: Path) -> None:
    run = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, "plan", "show", "plan"],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == 3
    assert run.stderr.startswith("tundish: standard output: ") and run.stderr.count("\n") == 1


def test_out_of_memory_exits_with_3(tmp_path: Path) -> None:
    # A file of nothing but zeros takes no room; the order of its samples takes 400 MB of memory.
    np.lib.format.open_memmap(tmp_path / "lengths.npy", "w+", np.int16, (100_000_000,)).flush()
    command = [
        *COMMAND,
        "pack",
        "lengths.npy",
        "--max-length",
        "4096",
        "--seed",
        "0",
        "--out",
        "plan",
        "--threads",
        "1",
    ]
    run = subprocess.run(
        ["sh", "-c", 'ulimit -v 500000; exec "$@"', "sh", *command],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.returncode, run.stderr) == (3, "tundish: cannot allocate 400000000 bytes of memory\n")
    assert [path.name for path in tmp_path.iterdir()] == ["lengths.npy"]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Enough to work on that a signal arrives in the middle of it.
    path = tmp_path_factory.mktemp("many") / "lengths.npy"
    np.save(path, np.full(20_000_000, 3, dtype=np.uint8))
    return path


def test_ctrl_c_exits_with_130_and_leaves_no_files(many: Path, tmp_path: Path) -> None:
    running = subprocess.Popen(
        [
            *(*COMMAND, "pack", many, "--max-length", "8", "--seed", "0", "--threads", "1", "--json"),
            *("--out", tmp_path / "plan"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        # The folder being written shows that the work has begun.
        while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.002)
        assert list(tmp_path.iterdir()) != [tmp_path / "plan"]
        running.send_signal(signal.SIGINT)
        out, line = running.communicate(timeout=60)
    finally:
        running.kill()
        running.communicate()
    assert running.returncode == 130
    assert line == "tundish: interrupted\n"
    assert json.loads(out)["error"]["exit_code"] == 130
    assert not list(tmp_path.iterdir())


def on_a_terminal(*words: object) -> str:
    """Standard error of a run whose standard error is a terminal (of 0 columns, as those of containers are)."""
    main, other = pty.openpty()
    running = subprocess.Popen(
        [*COMMAND, *map(str, words)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=other
    )
    os.close(other)
    shown = b""
    try:
        while running.poll() is None or select.select([main], [], [], 0)[0]:
            if select.select([main], [], [], 0.05)[0]:
                try:
                    shown += os.read(main, 65536)
                except OSError:
                    # A terminal whose other side is closed reads as an input/output error on Linux.
                    break
        assert running.wait(timeout=60) == 0
    finally:
        running.kill()
        running.communicate()
        os.close(main)
    return shown.decode()


def test_progress_is_shown_on_a_terminal_only(many: Path, tmp_path: Path) -> None:
    words = ["pack", many, "--max-length", "64", "--seed", "0", "--threads", "1", "--out"]
    assert "shuffling" in on_a_terminal(*words, tmp_path / "one")
    assert on_a_terminal(*words, tmp_path / "two", "--no-progress") == ""
    run = tundish(*words, tmp_path / "three", "--json")
    assert (run.returncode, run.stderr) == (0, "")
    assert json.loads(run.stdout)["packs"] == 20_000_000 * 3 // 64


def test_an_error_of_the_progress_bar_does_not_fail_the_command(
    many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

        def flush(self) -> None:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Broken())
    assert len(td.pack(np.load(many, mmap_mode="r"), 64, seed=0)) == 20_000_000 * 3 // 64
