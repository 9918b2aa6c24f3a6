"""Ctrl-C at any moment of the command `tundish`: one line, exit code 130, nothing left, never a traceback."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tundish as td

# Sends itself SIGINT as the import number {0} begins: a moment that does not depend on how fast the machine is.
AT_IMPORT = """
import os, signal, sys
import tundish.__main__ as entry
count = 0
begin = entry._restore_ctrl_c
def counted():
    begin()
    if {0} < 0:
        sys.stderr.write(f"imports={{count}}")
entry._restore_ctrl_c = counted
def hook(event, _):
    global count
    if event == "import":
        if count == {0}:
            os.kill(os.getpid(), signal.SIGINT)
        count += 1
sys.addaudithook(hook)
sys.exit(entry.main())
"""


def run(at: int, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", AT_IMPORT.format(at), *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def yard(tmp_path: Path) -> Path:
    np.save(tmp_path / "lengths.npy", np.array([5, 3, 9, 2]))
    td.pack([5, 3, 9, 2], 8, out=tmp_path / "plan")
    return tmp_path


def test_ctrl_c_during_startup_prints_one_line(yard: Path) -> None:
    words = ("pack", "lengths.npy", "--max-length", "8", "--out", "new", "--json")
    whole = run(-1, *words, folder=yard)
    imports = int(whole.stderr.rpartition("imports=")[2])
    # numpy's alone are over a hundred.
    assert whole.returncode == 0 and imports > 100
    (yard / "new").rename(yard / "whole")
    before = sorted(yard.rglob("*"))
    for at in [*range(0, imports - 1, imports // 25), imports - 1]:
        ran = run(at, *words, folder=yard)
        assert (ran.returncode, ran.stderr) == (130, "tundish: interrupted\n"), at
        assert json.loads(ran.stdout)["error"]["exit_code"] == 130, at
        assert sorted(yard.rglob("*")) == before, at


def test_ctrl_c_before_the_handler_is_installed_prints_one_line(yard: Path) -> None:
    # `enum` comes with `signal`, which has to be imported before it can say what Ctrl-C does.
    script = """
import os, sys
assert "enum" not in sys.modules
sys.addaudithook(lambda event, what: event == "import" and what[0] == "enum" and os.kill(os.getpid(), 2))
from tundish.__main__ import main
sys.exit(main())
"""
    ran = subprocess.run(
        [sys.executable, "-c", script, "plan", "show", "plan"],
        cwd=yard,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "tundish: interrupted\n")


def test_ctrl_c_without_json_prints_nothing_to_standard_output(yard: Path) -> None:
    ran = run(3, "plan", "show", "plan", folder=yard)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "tundish: interrupted\n")


def test_an_ignored_ctrl_c_stays_ignored(yard: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", AT_IMPORT.format(40), "plan", "show", "plan"],
        cwd=yard,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert ran.returncode == 0 and "fingerprint" in ran.stdout


def test_python_m_tundish_runs_the_command(yard: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tundish", "plan", "show", "plan", "--json"],
        cwd=yard,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout)["packs"] == 2
