"""A save takes as much memory as the bytes that it stages, and little more."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.distributed.programs import run

SAVE = """
import sys
from pathlib import Path

import torch

import tundish as td
from tundish import _native


def peak():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line]
    return int(line.split()[1]) * 1024


kind, staging, root = sys.argv[1:]
state = {f"layers.{number}.weight": torch.full((8 << 20,), number, dtype=torch.bfloat16) for number in range(16)}
size = sum(tensor.nbytes for tensor in state.values())
optimizer = torch.optim.SGD(list(state.values()), lr=1)
options = {"staging": "lazy", "optimizer": optimizer} if staging == "lazy" else {}
with td.Checkpointer(root, on_failure="raise") as checkpointer:
    save = checkpointer.save_hf if kind == "hf" else checkpointer.save_dcp
    # Modules and threads of a first save do not count for the second.
    save(1, {"layers.0.weight": torch.zeros(8)}).result()
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    for step in (2, 3, 4):
        save(step, state, **options).result()
stats = _native.staging_stats()
print((peak() - before) / size, stats["peak"] / size)
assert stats["in_use"] == stats["cached"] == 0, "kept with no checkpointer left to need it"
"""


@pytest.mark.parametrize(("kind", "staging"), [("hf", "eager"), ("hf", "lazy"), ("dcp", "eager")])
def test_a_save_takes_as_much_memory_as_it_stages(kind: str, staging: str, path_in_memory: Path) -> None:
    done = run(["-c", SAVE, kind, staging, path_in_memory / "root"])
    assert done.returncode == 0, done.stderr
    taken, staged = map(float, done.stdout.split())
    assert 1 <= staged <= 1.05
    assert 0.9 <= taken <= 1.05
