"""Packing takes the memory that docs/guides/plan-files.md says, whatever the number of samples, and gives it back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20
SAMPLES = 16_000_000

# In a process of its own. The kernel keeps the most that was ever resident, and begins anew where it is told to.
PROGRAM = """
import sys, numpy as np, tundish as td
from pathlib import Path

def resident(key):
    status = Path("/proc/self/status").read_text()
    return int(status.partition(key + ":")[2].split()[0]) << 10

folder, samples, threads = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
lengths = np.tile(np.arange(1, 2001, dtype=np.int32), samples // 2000)
options = {
    "seed": {"seed": 1},
    "order": {"order": np.arange(samples - 1, -1, -1)},
    "best_fit": {"mode": "best_fit", "seed": 1},
    "ordered": {"mode": "ordered"},
}.get(sys.argv[4], {})
td.pack(lengths[:1000], 4096, threads=threads, out=folder / "first")
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
plan = td.pack(lengths, 4096, threads=threads, out=folder / "plan", **options)
assert len(plan) >= int(lengths.sum(dtype=np.int64)) // 4096
print(resident("VmHWM") - before)
"""


@pytest.mark.parametrize(
    ("how", "threads", "more"),
    [
        ("nothing", 1, 0),
        ("nothing", 4, 0),
        # A bit a sample that each of the threads marks.
        ("order", 2, 2 * SAMPLES // 8),
        # An index a sample.
        ("seed", 2, 4 * SAMPLES),
        # And an index a pack, of four samples.
        ("best_fit", 2, 4 * SAMPLES + SAMPLES),
        ("ordered", 2, 0),
    ],
)
def test_working_memory_is_bounded(how: str, threads: int, more: int, tmp_path: Path) -> None:
    arguments = [str(tmp_path), str(SAMPLES), str(threads), how]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 16 * MIB + threads * 8 * MIB + more


REPEATED = """
import ctypes, sys, numpy as np, tundish as td
from pathlib import Path

def resident():
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) << 10

samples, is_trimmed = int(sys.argv[2]), sys.argv[3] == "trimmed"
give_back = ctypes.CDLL(None).malloc_trim if is_trimmed else lambda _: None
random = np.random.default_rng(0)
lengths = np.minimum(random.lognormal(6, 1, samples), 60_000).astype(np.int32)
options = {"seed": {"seed": 1}, "order": {"order": random.permutation(len(lengths))}}.get(sys.argv[1], {})
td.pack(lengths[:1000], 1024, **options if "seed" in options else {})
fields = ["dataset_id", "indices", "indices_cu_len", "start_offset", "end_offset", "longest"]
give_back(0)
before = resident()
for _ in range(6):
    plan = td.pack(lengths, 1024, threads=2, **options)
    held = resident() - before
    assert held > 16 << 20
    size = sum(getattr(plan, name).nbytes for name in fields)
    del plan
    give_back(0)
    print(resident() - before, held, size)
"""


def left_by_plans(
    how: str, samples: int, *, trimmed: bool = False, **settings: str
) -> tuple[list[int], int, int]:
    """Bytes that stay of one plan, of two, ... of six that were made one after the other; what one takes; its arrays.

    `trimmed` asks the allocator for what it keeps, after each plan.
    """
    others = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", REPEATED, how, str(samples), "trimmed" if trimmed else "kept"],
        env=others | settings,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    left, held, sizes = zip(*(map(int, line.split()) for line in done.stdout.splitlines()), strict=True)
    return list(left), held[0], sizes[0]


@pytest.mark.parametrize("how", ["nothing", "order", "seed"])
def test_the_memory_of_large_plans_that_are_gone_is_given_back(how: str) -> None:
    left, _, _ = left_by_plans(how, 8_000_000)
    assert max(left) < 8 * MIB


@pytest.mark.parametrize("how", ["nothing", "order", "seed"])
def test_the_allocator_keeps_at_most_what_one_small_plan_took(how: str) -> None:
    """The allocator is asked to give memory back first: on its own it keeps what lies below memory in use."""
    left, held, _ = left_by_plans(how, 3_000_000)
    assert max(left) < held + 8 * MIB
    left, _, _ = left_by_plans(how, 3_000_000, trimmed=True)
    assert max(left) < 8 * MIB


def test_a_process_that_is_told_to_keep_memory_keeps_that_of_large_plans() -> None:
    settings = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
    (first, *_, fifth, sixth), _, size = left_by_plans("order", 8_000_000, **settings)
    # Without the column that is written only where there are several datasets.
    assert first > size // 2
    # The smaller things in between may part the memory of one plan, not of each.
    assert sixth < min(fifth + 8 * MIB, 2 * size)
