"""How a bench measures and writes down, and that one without its peers fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

PEERS = Path(__file__).resolve().parents[2] / "benches" / "peers"


def test_a_contestant_whose_result_changes_is_refused(bench: SimpleNamespace) -> None:
    results = iter([1, 2])
    contestant = bench.measure.Contestant(lambda: next(results), int)
    with pytest.raises(bench.measure.OutputsDiffer, match="wandering"):
        bench.measure.race({"wandering": contestant}, 2)


@pytest.mark.parametrize("to_files", [False, True])
def test_a_child_reports_time_and_peak(bench: SimpleNamespace, tmp_path: Path, to_files: bool) -> None:
    np.save(tmp_path / "lengths.npy", np.full(200_000, 100, dtype=np.int32))
    reply = bench.measure.run_child(
        {
            "lengths": str(tmp_path / "lengths.npy"),
            "order": None,
            "seed": 0,
            "mode": "hard",
            "max_length": 4096,
            "threads": 1,
            "out": str(tmp_path / "plan") if to_files else None,
            "rounds": 2,
        }
    )
    assert reply["packs"] == 200_000 * 100 // 4096
    assert reply["seconds"] > 0
    assert reply["peak"] < 64 * 2**20
    assert not (tmp_path / "plan").exists()


def test_results_outside_the_markers_of_a_part_stay(bench: SimpleNamespace, tmp_path: Path) -> None:
    results = tmp_path / "RESULTS.md"
    results.write_text("above\n")
    bench.report.write(results, "packing", "first\n")
    bench.report.write(results, "checkpoint", "other\n")
    results.write_text(results.read_text() + "below\n")
    bench.report.write(results, "packing", "second\n")
    (begin, end), (others_begin, others_end) = map(bench.report.markers, ("packing", "checkpoint"))
    assert results.read_text() == (
        f"above\n\n{begin}\nsecond\n{end}\n\n{others_begin}\nother\n{others_end}\nbelow\n"
    )


def test_the_results_have_no_part_twice_or_in_half(bench: SimpleNamespace) -> None:
    # A part is there from its first full run on.
    results = (PEERS.parent / "RESULTS.md").read_text()
    for part in ("packing", "checkpoint", "shm", "scatter"):
        begin, end = map(results.count, bench.report.markers(part))
        assert begin == end <= 1


@pytest.mark.parametrize(
    ("missing", "measure"),
    [
        ("megatron", "shuffle"),
        ("orbax", "large"),
        ("joblib", "tasks"),
        ("tensordict", "peers"),
    ],
)
def test_a_missing_peer_fails_the_bench(missing: str, measure: str) -> None:
    without = (
        f"import runpy, sys; sys.modules[{missing!r}] = None; "
        f"sys.argv = ['run.py', '--quick', '--only', {measure!r}]; "
        f"sys.path.insert(0, {str(PEERS)!r}); runpy.run_path({str(PEERS / 'run.py')!r}, run_name='__main__')"
    )
    ran = subprocess.run(
        [sys.executable, "-c", without], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 1
    assert "a peer is missing" in ran.stderr
