"""Each figure of README.md is that of a row in benches/RESULTS.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
README = " ".join((CHECKOUT / "README.md").read_text(encoding="utf-8").split())
RATIO = re.compile(r"([\d.]+) times as fast as")
VALUE = re.compile(r"(?<![\d.])([\d.]+ (?:ms|%))")
# What stands after a ratio, and texts of its row in the results.
RATIOS = {
    "TRL's `pack_dataset`": ("Best fit, whole plan | text, 10⁶,", "| TRL pack_dataset,"),
    "Accelerate's `DataLoaderDispatcher`": ("| VLM, 4 ranks |", "| Accelerate's DataLoaderDispatcher |"),
    "with torch's `dcp.async_save`": ("| durable, tundish save_dcp |", "| DCP async_save, process,"),
    "a `ProcessPoolExecutor`": ("| 16 MiB |", "| ProcessPoolExecutor, array in initargs |"),
    "AReaL's HTTP path": ("| 256 × 64 KB |", "| AReaL's HTTP path |"),
}
# Values, as README writes them before and after a text, and texts of their row in the results.
SAVE = ("| stall, tundish save_dcp |", "| DCP async_save, process,")
VALUES = {
    "documents fill their packs to": ("Best fit, whole plan | text, 10⁶,", "| TRL pack_dataset,"),
    "holds up training for": SAVE,
    "where torch's `dcp.async_save` takes": SAVE,
}


def row_with(texts: tuple[str, ...]) -> str:
    results = (CHECKOUT / "benches" / "RESULTS.md").read_text(encoding="utf-8").splitlines()
    return next(line for line in results if all(text in line for text in texts))


def test_readme_has_no_other_figures() -> None:
    assert len(RATIO.findall(README)) == len(RATIOS)
    assert len(VALUE.findall(README)) == len(VALUES)


@pytest.mark.parametrize("beside", RATIOS)
def test_a_ratio_is_in_the_results(beside: str) -> None:
    row = row_with(RATIOS[beside])
    (ratio,) = re.findall(r"\| ([\d.]+)× \|", row)
    stated = RATIO.findall(README[: README.index(beside)])[-1]
    # README rounds.
    assert abs(float(stated) - float(ratio)) <= 0.5 / 10 ** len(stated.partition(".")[2]) + 1e-9, row


@pytest.mark.parametrize("before", VALUES)
def test_a_value_is_in_the_results(before: str) -> None:
    stated = VALUE.search(README, README.index(before))
    assert stated is not None
    assert stated[1].replace(" %", "%") in row_with(VALUES[before])


def test_readme_counts_the_tests_that_need_a_gpu() -> None:
    marked = sum(
        len(re.findall(r"^@pytest\.mark\.needs_gpu\b", path.read_text(encoding="utf-8"), re.MULTILINE))
        for path in (CHECKOUT / "tests").rglob("test_*.py")
    )
    assert f"{marked} tests are marked `needs_gpu`" in README
