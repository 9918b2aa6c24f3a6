"""`rollouts.py`: a job of reinforcement learning in four processes, and nothing is left in any."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
from support.distributed.programs import run

EXAMPLE = Path(__file__).with_name("rollouts.py")


def test_a_model_learns_and_memory_stays_flat() -> None:
    ran = run([EXAMPLE, "--steps", 60, "--report", 20], timeout=110)
    assert ran.returncode == 0, ran.stderr
    # No step left anything, and no tensor escaped.
    assert "still has" not in ran.stderr and "escaped" not in ran.stderr, ran.stderr
    found = re.search(r"reward (\S+) -> (\S+), memory ([+-][\d.]+)%, left over: (.*)", ran.stdout)
    assert found is not None, ran.stdout
    assert float(found[2]) > float(found[1])
    # Of 270 MiB, over 30 steps: one copy of the weights (344 KB) that each step left would be 3.8 %.
    assert float(found[3]) < 2.0
    assert found[4] == "[(0, 0), (0, 0), (0, 0)]"


@pytest.mark.parametrize("option", ["--steps", "--report"])
def test_invalid_options_are_refused_before_any_process_starts(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), option, "0"])
    example = runpy.run_path(str(EXAMPLE))
    with pytest.raises(SystemExit) as ended:
        example["main"]()
    assert ended.value.code == 2
    assert f"{option} must be at least 1" in capsys.readouterr().err
