"""Ctrl-C in the middle of an eager copy ends it at once, leaves nothing and closes the checkpointer."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from support.distributed.programs import PIPE, Program
from support.waiting import NOTICED

from tundish.checkpoint import open_readonly

MIB = 1 << 20
STATE_BYTES = 512 * MIB

# As a user's own loop: nothing but the checkpointer knows of signals. Half of the state has to be rearranged, which
# is another way of copying.
PROGRAM = f"""
import os, signal, sys, threading, time
import torch
import tundish as td
from tundish._native import staging_stats, trim_staging
state = {{"plain": torch.ones({STATE_BYTES} // 8), "turned": torch.ones(4096, {STATE_BYTES} // 8 // 4096).t()}}
if sys.argv[2] == "turned":
    state.pop("plain")
kind = sys.argv[3]
known = {{thread.name for thread in threading.enumerate()}}
checkpointer = td.Checkpointer(sys.argv[1], on_failure="raise")
save = getattr(checkpointer, "save_" + kind)
def copies_begin():
    while staging_stats()["in_use"] == 0:
        time.sleep(0.0005)
    print("copying", flush=True)
threading.Thread(target=copies_begin).start()
try:
    save(1, state)
    print("was not interrupted", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
try:
    save(2, state)
except td.errors.InvalidInputError as error:
    print("was interrupted" in str(error), flush=True)
checkpointer.close()
print(checkpointer.stats()["staging_in_use_bytes"], staging_stats()["in_use"], flush=True)
print(sorted(name for name in os.listdir(sys.argv[1]) if name != ".owner"), flush=True)
with td.Checkpointer(sys.argv[1], on_failure="raise") as checkpointer:
    getattr(checkpointer, "save_" + kind)(2, {{"w": torch.ones(10)}}).result(60)
"""


@pytest.mark.parametrize("kind", ["hf", "dcp"])
@pytest.mark.parametrize("layout", ["plain", "turned"])
def test_ctrl_c_ends_a_copy_at_once_and_leaves_nothing(layout: str, kind: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Program(["-c", PROGRAM, root, layout, kind], stdout=PIPE, stderr=PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == "copying\n"
            process.send_signal(signal.SIGINT)
            pressed = time.monotonic()
            assert process.stdout.readline() == "interrupted\n"
            took = time.monotonic() - pressed
            said, told = process.stdout.read(), process.stderr.read()
            process.wait(60)
        finally:
            process.kill()
    assert took < NOTICED, took
    assert said.splitlines() == ["True", "0 0", "[]"], told
    assert process.returncode == 0, told
    assert [one.path.name for one in open_readonly(root).list()] == [f"{kind}-2"]
    open_readonly(root).verify(f"{kind}-latest")
