"""Interpreters end during saves or after errors: nothing hangs, and no error is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from support.checkpoint.failpoints import SystemCall, environment
from support.distributed.programs import PIPE, Program

from tundish.checkpoint import Checkpointer, open_readonly

PRELUDE = """
import sys, threading, time
from pathlib import Path
import torch
import tundish as td
root = Path(sys.argv[1])
tensors = {"w": torch.ones(1 << 18)}
"""


@contextlib.contextmanager
def started(program: str, root: Path, setting: Mapping[str, str] = {}) -> Iterator[Program]:
    words = ["-c", PRELUDE + textwrap.dedent(program), root]
    with Program(words, stdout=PIPE, stderr=PIPE, env={**os.environ, **setting}) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_second_ctrl_c_gives_a_save_up_within_seconds(tmp_path: Path) -> None:
    root = tmp_path / "root"
    program = """
    checkpointer = td.Checkpointer(root)
    # Each takes eight seconds to be written.
    large = {"w": torch.ones(64 << 20)}
    checkpointer.save_hf(1, large)
    checkpointer.save_dcp(1, large)
    # Called before what was registered earlier, which waits for the saves.
    threading._register_atexit(print, "exiting", flush=True)
    print("saving", flush=True)
    # A signal that comes just before a long sleep does not end it.
    while True:
        time.sleep(0.05)
    """
    slow = environment(SystemCall("write", "*", 0), "slow 1000")
    with started(program, root, slow) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "saving\n"
        process.send_signal(signal.SIGINT)
        # The first ends the loop; then the exit waits for the save.
        assert process.stderr.readline().startswith("Traceback")
        lines = iter(process.stderr.readline, "")
        assert any(line.startswith("KeyboardInterrupt") for line in lines)
        assert process.stdout.readline() == "exiting\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.send_signal(signal.SIGINT)
        # Nobody may write: a save that were waited for would never be over.
        told = process.stderr.read()
        process.wait(30)
        assert "were given up; the next start removes what they left" in told
        assert process.returncode not in (0, -signal.SIGSEGV, -signal.SIGABRT)
    with Checkpointer(root, on_failure="raise") as checkpointer:
        assert checkpointer.list() == []
        assert os.listdir(root) == [".owner"]


def test_a_failing_callback_is_told_though_nobody_asks_the_future(tmp_path: Path) -> None:
    root = tmp_path / "root"
    program = """
    def upload(path):
        raise RuntimeError("the bucket is gone")
    checkpointer = td.Checkpointer(root, on_published=[upload])
    checkpointer.save_hf(1, tensors)
    checkpointer.save_dcp(1, tensors)
    """
    with started(program, root) as process:
        _, told = process.communicate(timeout=60)
    assert process.returncode == 0
    for kind in ("hf", "dcp"):
        assert f"save_{kind} of step 1 is published, but a callback failed" in told
        open_readonly(root).verify(f"{kind}-latest")
    assert "RuntimeError: the bucket is gone" in told


def test_an_exception_in_the_loop_is_raised_and_saves_under_way_are_finished(tmp_path: Path) -> None:
    root = tmp_path / "root"
    # A lazy save copies in the background when the loop fails, and a callback waits for what never comes in time.
    program = """
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = td.Checkpointer(root, on_published=[lambda path: time.sleep(0.3)])
    checkpointer.save_dcp(1, model.state_dict())
    checkpointer.save_hf(1, model, staging="lazy", optimizer=optimizer)
    raise KeyError("the loss is no number")
    """
    with started(program, root) as process:
        _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert told.rstrip().endswith("KeyError: 'the loss is no number'")
    for kind in ("hf", "dcp"):
        open_readonly(root).verify(f"{kind}-1")


def test_a_failing_save_ends_a_loop_that_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "root"
    program = """
    import resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    checkpointer = td.Checkpointer(root)
    checkpointer.save_hf(1, tensors, blocking=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, resource.RLIM_INFINITY))
    print("saving", flush=True)
    checkpointer.save_hf(2, tensors)
    time.sleep(600)
    """
    with started(program, root) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "saving\n"
        # The loop takes ten minutes.
        _, told = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert "save_hf of step 2 failed" in told
    assert "File too large" in told
    assert [one.step for one in open_readonly(root).list()] == [1]
