"""The example `examples/finetune_with_trl.py`: a model learns from packs of chats, and the run resumes."""

from __future__ import annotations

import re
from pathlib import Path

from support.distributed.programs import run

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_with_trl.py"


def train(folder: Path, *options: str) -> tuple[float, float, int]:
    """The first loss, the last, and the last step."""
    ran = run([EXAMPLE, "--out", folder, *options], timeout=110)
    assert ran.returncode == 0, ran.stderr
    filled = re.search(r"2000 chats in \d+ packs, filled to ([\d.]+)%", ran.stdout)
    assert filled is not None and float(filled[1]) > 99, ran.stdout
    found = re.search(r"loss (\S+) -> (\S+) at step (\d+)", ran.stdout)
    assert found is not None, ran.stdout
    return float(found[1]), float(found[2]), int(found[3])


def test_a_model_learns_and_the_run_resumes(tmp_path: Path) -> None:
    first, last, step = train(tmp_path / "out", "--steps", "40")
    assert last < first * 0.8 and step == 40
    _, later, step = train(tmp_path / "out", "--steps", "50", "--resume")
    assert later < first * 0.8 and step == 50
