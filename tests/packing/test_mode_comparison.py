"""`td.packing.compare` against the plans of each mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tundish as td
from tundish.errors import InvalidInputError


@pytest.mark.parametrize("overlong", ["split", "truncate", "drop"])
def test_each_row_is_that_of_the_plan(overlong: str) -> None:
    lengths = np.random.default_rng(0).integers(0, 300, 1000)
    options: dict[str, Any] = {"overlong": overlong, "max_samples": 5, "align": 4}
    table = td.packing.compare(lengths, 256, seed=3, window=8, **options)
    assert list(table) == ["hard", "best_fit", "ordered", "sequential"]
    for mode, row in table.items():
        own = {} if mode == "hard" else {**options, "window": 8} if mode == "ordered" else options
        stats = td.pack(lengths, 256, seed=3, mode=mode, **own).stats()
        seconds = row.pop("seconds")
        assert seconds > 0
        assert row == {name: stats[name] for name in row}
        assert {"packs", "fill", "samples_cut", "tokens_dropped", "padding"} <= set(row)


@pytest.mark.parametrize("lengths", [[300, 40, 5, 700], []], ids=["few", "none"])
def test_the_table_has_a_picture(lengths: list[int], tmp_path: Path) -> None:
    table = td.packing.compare(lengths, 256, plot=tmp_path / "modes.svg")
    drawn = (tmp_path / "modes.svg").read_text()
    for mode, row in table.items():
        assert mode in drawn and f"{row['packs']:,} packs" in drawn
    with pytest.raises(InvalidInputError, match=r"one of \.png"):
        td.packing.compare(lengths, 256, plot=tmp_path / "modes.jpg")


def test_costs_limit_the_modes_of_whole_samples() -> None:
    table = td.packing.compare([2, 2, 2], 8, overlong="drop", costs=[1, 1, 1], max_cost=1)
    assert {mode: row["packs"] for mode, row in table.items()} == {
        "hard": 0,
        "best_fit": 3,
        "ordered": 3,
        "sequential": 3,
    }


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="window is 0"):
        td.packing.compare([5, 3], 8, window=0)
    with pytest.raises(InvalidInputError, match="no multiple of align=3"):
        td.packing.compare([5, 3], 8, align=3)
    with pytest.raises(InvalidInputError, match="longer than max_length"):
        td.packing.compare([5, 30], 8, overlong="error")
    assert callable(td.packing.compare)
