"""`tundish shm` lists and sweeps named segments."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.shm.private_shm import folder as folder

from tundish import cli
from tundish.errors import InvalidTypeError
from tundish.shm import SharedArray, sweep

LEAVE = """
import os, signal, sys
import numpy as np
from tundish.shm import SharedArray
held = SharedArray.from_array(np.zeros(1000), name=sys.argv[1])
os.kill(os.getpid(), signal.SIGKILL)
"""


def leave(name: str) -> None:
    """Kill a process that has a segment."""
    ran = subprocess.run([sys.executable, "-c", LEAVE, name], check=False)
    assert ran.returncode == -signal.SIGKILL


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.main(["shm", *words, "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_a_folder_without_segments(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "ls") == {"segments": [], "failed": []}
    nothing = {"removed": [], "live": [], "failed": []}
    assert answer(capsys, "sweep") == {"dry_run": False, **nothing}
    for words, line in ((["ls"], "no named segments\n"), (["sweep"], "nothing to remove\n")):
        assert cli.main(["shm", *words]) == 0
        assert capsys.readouterr().out == line


def test_living_and_dead(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with SharedArray.create(1000, np.int64, name="living"):
        leave("dead")
        listed = {one["name"]: one for one in answer(capsys, "ls")["segments"]}
        assert (listed["living"]["state"], listed["living"]["made_by"]) == ("held", os.getpid())
        assert listed["dead"]["state"] == "dead"
        # A header's page and the numbers, in whole pages.
        assert listed["dead"]["bytes"] == 3 * 4096
        assert Path(listed["dead"]["path"]).exists()
        dry = answer(capsys, "sweep", "--dry-run")
        assert [one["name"] for one in dry["removed"]] == ["dead"]
        assert dry["dry_run"]
        assert Path(listed["dead"]["path"]).exists()
        assert cli.main(["shm", "sweep", "--dry-run"]) == 0
        assert capsys.readouterr().out.startswith("would remove dead: ")
        swept = answer(capsys, "sweep")
        assert [one["name"] for one in swept["removed"]] == ["dead"]
        assert [one["name"] for one in swept["live"]] == ["living"]
        assert not Path(listed["dead"]["path"]).exists()
        assert answer(capsys, "sweep")["removed"] == []


def test_a_dry_run_is_asked_for_by_a_bool() -> None:
    with pytest.raises(InvalidTypeError, match="dry_run must be"):
        sweep("x")  # type: ignore[arg-type]


def test_torch_is_not_imported(folder: Path) -> None:
    code = (
        "import sys; from tundish.cli import main; main(['shm', 'ls']); main(['shm', 'sweep']);"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "['numpy']"
