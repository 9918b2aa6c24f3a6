"""How a bench measures and writes down, and that one without its peers fails."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.distributed.programs import run

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


def test_the_seconds_of_a_contestant_are_the_least_and_have_a_spread(bench: SimpleNamespace) -> None:
    seconds = bench.measure.Seconds.least([3.0, 2.0, 2.5])
    assert (seconds, seconds.spread) == (2.0, 0.5)
    row = bench.report.compared("case", seconds, "peer", 5.0, samples=10**9)
    assert (row.ours, row.peers, row.figure, row.spread) == ("2 s (2 ns)", "5 s", "2.5×", "50%")


def rendered(bench: SimpleNamespace, part: str, *rows: tuple[str, str, str, float]) -> str:
    sections = [
        bench.report.Section(title=title, note="", rows=[bench.report.compared(case, 1.0, peer, theirs)])
        for title, case, peer, theirs in rows
    ]
    return bench.report.render(part, sections, [("Processor", f"that of {part}")], "")


def test_a_part_is_written_anew_and_others_stay(bench: SimpleNamespace, tmp_path: Path) -> None:
    results = tmp_path / "RESULTS.md"
    felt = "Best fit, whole plan", "text, 10⁶, 100% full", "TRL pack_dataset, 99% full"
    other = "Arrays as results, 2 workers", "16 MiB", "two-queue pool"
    bench.report.write(results, "shm", rendered(bench, "shm", (*other, 7.0), ("Other", "case", "peer", 9.0)))
    for figure in (2.0, 3.0):
        bench.report.write(results, "packing", rendered(bench, "packing", (*felt, figure)))
    text = results.read_text()
    table, _, sections = text.partition("<!-- rows that users feel: end -->")
    # The first table has the rows that users feel, in its own order, from the latest run of each part.
    assert [line for line in table.splitlines() if "×" in line] == [
        f"| {' | '.join(felt)} | 3 s | 3× |".replace("| TRL", "| 1 s | TRL"),
        f"| {' | '.join(other)} | 7 s | 7× |".replace("| two", "| 1 s | two"),
    ]
    assert "Shm: that of shm; Packing: that of packing." in table
    for part in ("packing", "shm"):
        assert [sections.count(marker) for marker in bench.report.markers(part)] == [1, 1]
    assert "2×" not in text and "9×" in sections and "9×" not in table


def test_each_row_of_the_first_table_is_in_the_results(bench: SimpleNamespace) -> None:
    assert len(bench.report.FELT) <= 25
    table = bench.report.felt((PEERS.parent / "RESULTS.md").read_text())
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + len(bench.report.FELT)


def test_the_results_have_no_part_twice_or_in_half(bench: SimpleNamespace) -> None:
    # A part is there from its first full run on.
    results = (PEERS.parent / "RESULTS.md").read_text()
    for part in ("packing", "checkpoint", "shm", "scatter"):
        begin, end = map(results.count, bench.report.markers(part))
        assert begin == end <= 1


@pytest.mark.parametrize(("missing", "measure"), [("megatron", "shuffle"), ("orbax", "large")])
def test_a_missing_peer_fails_the_bench(missing: str, measure: str) -> None:
    without = (
        f"import runpy, sys; sys.modules[{missing!r}] = None; "
        f"sys.argv = ['run.py', '--quick', '--only', {measure!r}]; "
        f"sys.path.insert(0, {str(PEERS)!r}); runpy.run_path({str(PEERS / 'run.py')!r}, run_name='__main__')"
    )
    ran = run(["-c", without])
    assert ran.returncode == 1
    assert "a peer is missing" in ran.stderr
