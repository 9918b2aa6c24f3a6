"""One process at a time holds the writer lock of a root, through kills, forks and exec."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.checkpoint.checkpoint_roots import Root, save, started
from support.waiting import NOTICED

from tundish.errors import RootInUseError

OWNER = """
import sys
from tundish import _native
root = _native.CheckpointRoot(sys.argv[1], wait_seconds=0)
root.begin("hf", 1, overwrite=False)
print("ready", flush=True)
sys.stdin.read()
"""


def test_junk_of_any_length_in_the_owners_file_keeps_nobody_out(tmp_path: Path) -> None:
    for length in (1, 100, 511, 512, 513, 600, 70_000):
        (tmp_path / ".owner").write_bytes(b"x" * length)
        for step in (1, 2):
            root = Root(tmp_path, wait_seconds=0)
            save(root, "hf", step, overwrite=True)
            if step == 2:
                root.remove("hf", 1)
            root.close()
            assert (tmp_path / ".owner").stat().st_size == 512
        shutil.rmtree(tmp_path / "hf-2")


def test_a_root_has_one_owner(root: Root) -> None:
    with pytest.raises(
        RootInUseError, match=r"this process \(\d+\) already: close the checkpointer"
    ) as caught:
        Root(root.path, wait_seconds=30)
    assert isinstance(caught.value, BlockingIOError)
    # Looking at the lock did not lose it.
    refused = f"""
import sys
from tundish import _native
from tundish.errors import RootInUseError
try:
    _native.CheckpointRoot(sys.argv[1], wait_seconds=0.2)
except RootInUseError as error:
    print("ready", flush=True)
    assert f"process {os.getpid()} on host {os.uname().nodename}" in str(error), error
"""
    with started(refused, root.path) as other:
        other.communicate()
        assert other.returncode == 0
    save(root, "hf", 1)


def test_the_root_of_a_killed_owner_is_taken_over_at_once(tmp_path: Path) -> None:
    with started(OWNER, tmp_path) as owner:
        with pytest.raises(RootInUseError, match=f"process {owner.pid} on host"):
            Root(tmp_path, wait_seconds=0)
        owner.kill()
        owner.wait()
        root = Root(tmp_path, wait_seconds=0)
    assert root.recovered["removed"] == [str(root.path / ".hf-1.incomplete")]
    root.close()


def test_a_dying_owner_is_waited_for(tmp_path: Path) -> None:
    with started(OWNER, tmp_path) as owner:
        timer = threading.Timer(1.0, owner.kill)
        timer.start()
        begun = time.monotonic()
        root = Root(tmp_path, wait_seconds=60)
        assert time.monotonic() - begun > 0.9
        timer.join()
    root.close()


def test_an_owner_that_copies_its_root_away_keeps_it(tmp_path: Path) -> None:
    """Closing any descriptor of a file costs a process its lock on it; the record still names a process that lives."""
    copying = "import shutil\nshutil.copytree(sys.argv[1], sys.argv[2])\n"
    with started(
        OWNER.replace("print(", copying + "print(", 1), tmp_path / "root", tmp_path / "copy"
    ) as owner:
        with pytest.raises(RootInUseError, match=f"process {owner.pid} "):
            Root(tmp_path / "root", wait_seconds=0)
        # The copy is nobody's to keep: its owner is none of it.
        owner.kill()
        owner.wait()
    Root(tmp_path / "copy", wait_seconds=0).close()


def test_an_owner_in_another_container_that_copies_its_root_away_keeps_it(tmp_path: Path) -> None:
    """The others cannot see whether its process lives: its heartbeat shows it, and that it takes its lock again."""
    if os.geteuid() != 0:
        pytest.skip("only root may make a container")
    repair = [sys.executable, "-m", "tundish", "checkpoint", "repair", str(tmp_path)]
    copying = "import pathlib\npathlib.Path(sys.argv[1], '.owner').read_bytes()\n"
    with started(OWNER.replace("print(", copying + "print(", 1), tmp_path) as owner:
        elsewhere = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *repair]
        refused = subprocess.run(elsewhere, capture_output=True, text=True, timeout=60)
        assert refused.returncode == 3, refused.stdout
        assert f"owned by process {owner.pid} " in refused.stderr
        owner.kill()
        owner.wait()
        assert subprocess.run(elsewhere, timeout=60).returncode == 0


def test_a_process_that_runs_its_program_anew_opens_its_root_again(tmp_path: Path) -> None:
    program = """
import os, sys
from tundish import _native
root = _native.CheckpointRoot(sys.argv[1], wait_seconds=0)
if sys.argv[2] == "1":
    root.begin("hf", 1, overwrite=False)
    os.execv(sys.executable, [sys.executable, "-c", sys.orig_argv[2], sys.argv[1], "2"])
print(*root.recovered["removed"])
"""
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), "1"], capture_output=True, text=True, timeout=60
    )
    assert (ran.stdout, ran.stderr) == (f"{tmp_path / '.hf-1.incomplete'}\n", "")


def test_an_orphan_of_a_killed_owner_does_not_keep_the_root(tmp_path: Path) -> None:
    """A data worker made by `fork` outlives a rank that is killed."""
    forking = """
import os, time
if os.fork() == 0:
    with open(sys.argv[2], "w") as file:
        file.write(f"{os.getpid()}.")
    time.sleep(60)
"""
    pid_file = tmp_path / "pid"
    with started(OWNER.replace("print(", forking + "print(", 1), tmp_path / "root", pid_file) as owner:
        while not pid_file.exists() or not pid_file.read_text().endswith("."):
            time.sleep(0.01)
        orphan = int(pid_file.read_text().rstrip("."))
        try:
            owner.kill()
            # Its output is kept open by the orphan.
            owner.wait(60)
            root = Root(tmp_path / "root", wait_seconds=5)
            # The orphan still holds the folder of the dead attempt, which nobody can tell from a live writer.
            assert root.recovered["live"] == [str(root.path / ".hf-1.incomplete")]
            save(root, "hf", 1)
            root.close()
        finally:
            os.kill(orphan, signal.SIGKILL)


def test_a_forked_child_leaves_its_parent_s_root_alone(tmp_path: Path) -> None:
    forking = """
import os
from tundish.errors import StorageError
child = os.fork()
if child == 0:
    code = 1
    try:
        root.close()
        root.begin("hf", 2, overwrite=False)
    except StorageError as error:
        code = 0 if "forked" in str(error) else 2
    finally:
        del root
        os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
root.abandon("hf", 1)
root.begin("hf", 3, overwrite=False)
"""
    with (
        started(OWNER.replace("print(", forking + "print(", 1), tmp_path),
        pytest.raises(RootInUseError),
    ):
        Root(tmp_path, wait_seconds=0)


def test_waiting_lets_other_threads_and_ctrl_c_through(tmp_path: Path) -> None:
    waiting = """
import sys, threading, time
from tundish import _native
ticks = []
threading.Thread(target=lambda: [ticks.append(time.sleep(0.01)) for _ in range(10**6)], daemon=True).start()
threading.Timer(0.3, lambda: print("ready", flush=True)).start()
try:
    _native.CheckpointRoot(sys.argv[1], wait_seconds=60)
except KeyboardInterrupt:
    assert len(ticks) > 10, ticks
    print("interrupted", flush=True)
"""
    with started(OWNER, tmp_path), started(waiting, tmp_path) as other:
        begun = time.monotonic()
        other.send_signal(signal.SIGINT)
        assert other.stdout is not None
        assert other.stdout.readline() == "interrupted\n"
        assert time.monotonic() - begun < NOTICED
