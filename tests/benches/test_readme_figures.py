"""Each figure in README's table is that of a row in benches/RESULTS.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
TABLE = [
    line
    for line in (CHECKOUT / "README.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ")
]
FIGURE = re.compile(r"([\d.]+) times as fast as|1/(\d+) as much as a save of")
# What stands after a figure, and texts of its row in the results.
ROWS = {
    "vectorised numpy": ("Hard plan in memory, order given | text, 10⁷ |", "| vectorised numpy |"),
    "TRL's `pack_dataset`": ("Best fit, whole plan | text, 10⁶,", "| TRL pack_dataset,"),
    "a pool on two `multiprocessing` queues": ("An empty task, 2 workers |", "| two-queue pool |"),
    "Accelerate's `DataLoaderDispatcher`": ("| VLM, 4 ranks |", "| Accelerate's DataLoaderDispatcher |"),
    "the best of five other libraries": ("| time lost, matrix products |", ", the best of them |"),
    "AReaL's HTTP path": ("| 256 × 64 KB |", "| AReaL's HTTP path |"),
    "pyzmq": ("| 256 × 64 KB |", "| pyzmq |"),
}


def test_the_table_has_no_other_figures() -> None:
    figures = [figure for line in TABLE for figure in FIGURE.finditer(line)]
    assert len(figures) == len(ROWS)


@pytest.mark.parametrize("beside", ROWS)
def test_a_figure_is_in_the_results(beside: str) -> None:
    results = (CHECKOUT / "benches" / "RESULTS.md").read_text(encoding="utf-8").splitlines()
    row = next(line for line in results if all(text in line for text in ROWS[beside]))
    (ratio,) = re.findall(r"\| ([\d.]+)× \|", row)
    (line,) = (line for line in TABLE if beside in line)
    times, part = FIGURE.findall(line[: line.index(beside)])[-1]
    stated = times or part
    # README rounds.
    assert abs(float(stated) - float(ratio)) <= 0.5 / 10 ** len(stated.partition(".")[2]) + 1e-9, row
