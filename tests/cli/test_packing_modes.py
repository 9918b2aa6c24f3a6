"""`tundish pack --mode` and `tundish plan compare`, run as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import tundish

import tundish as td
from tundish import cli


def answer(*words: object, code: int = 0, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The output of `--json`, in this process: quicker than a process of its own."""
    assert cli.main([*map(str, words), "--json"]) == code
    parsed = json.loads(capsys.readouterr().out)
    assert isinstance(parsed, dict)
    return parsed


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.npy"
    np.save(path, np.random.default_rng(0).integers(1, 900, 2000, dtype=np.int32))
    return path


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--mode", "best_fit"], {"mode": "best_fit"}),
        (
            ["--mode", "ordered", "--window", 8, "--max-samples", 3, "--align", 4, "--seed", 3],
            {"mode": "ordered", "window": 8, "max_samples": 3, "align": 4, "seed": 3},
        ),
        (["--mode", "sequential", "--global-pack"], {"mode": "sequential"}),
        (
            ["--mode", "sequential", "--multiple-of", 64, "--remainder", "repeat"],
            {"mode": "sequential", "multiple_of": 64, "remainder": "repeat"},
        ),
    ],
)
def test_modes_of_whole_samples(
    words: list[str],
    options: dict[str, Any],
    lengths: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "plan"
    pack = ("pack", lengths, "--max-length", 512, *words, "--out", out)
    refused = answer(*pack, code=2, capsys=capsys)["error"]["message"]
    assert "longer than max_length" in refused and "split" in refused
    facts = answer(*pack, "--overlong", "split", capsys=capsys)
    pack_one: Any = td.pack if "--global-pack" not in words else td.pack_datasets
    array = np.load(lengths)
    arrays, more = (array, {}) if "--global-pack" not in words else ([array], {"global_pack": True})
    expected = pack_one(arrays, 512, overlong="split", **options, **more)
    assert facts["fingerprint"] == expected.fingerprint
    for name in ("mode", "overlong", "window", "max_samples", "align", "multiple_of", "remainder"):
        assert facts[name] == getattr(expected, name)
    assert "drop_last" not in facts
    assert facts["bytes"] == sum(column.nbytes for column in expected._columns)
    assert answer("plan", "verify", out, lengths, capsys=capsys)["verified"] is True
    picture = tmp_path / "fill.svg"
    shown = answer("plan", "show", out, "--plot", picture, capsys=capsys)
    assert shown["samples_overlong"] == (array > 512).sum()
    assert picture.stat().st_size > 1000


def test_compare_prints_a_row_for_each_mode(lengths: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "compare", lengths, "--max-length", 512, "--window", 8, "--max-samples", 3, "--seed", 1)
    found = answer(*words, capsys=capsys)
    expected = td.packing.compare(np.load(lengths), 512, window=8, max_samples=3, seed=1)
    assert found["max_length"] == 512 and list(found["modes"]) == list(expected)
    for mode, row in expected.items():
        assert {**found["modes"][mode], "seconds": 0} == {**row, "seconds": 0}
    printed = tundish(*words)
    assert (printed.returncode, printed.stderr) == (0, "")
    head, *rows = printed.stdout.splitlines()
    for name in ("mode", "packs", "fill", "samples cut", "tokens dropped", "padding", "seconds"):
        assert name in head
    assert [row.split()[:2] for row in rows] == [
        [mode, f"{row['packs']:,}"] for mode, row in expected.items()
    ]
    assert len({len(line) for line in (head, *rows)}) == 1
    refused = answer(*words, "--overlong", "error", code=2, capsys=capsys)["error"]["message"]
    assert "longer than max_length" in refused


def test_costs_come_from_files(lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = np.load(lengths) % 4
    np.save(tmp_path / "costs.npy", costs)
    limit = ("--mode", "ordered", "--max-cost", 5, "--costs", tmp_path / "costs.npy")
    facts = answer("pack", lengths, "--max-length", 1024, *limit, "--out", tmp_path / "plan", capsys=capsys)
    expected = td.pack(np.load(lengths), 1024, mode="ordered", costs=costs, max_cost=5)
    assert (facts["fingerprint"], facts["max_cost"]) == (expected.fingerprint, 5)
    verify = ("plan", "verify", tmp_path / "plan", lengths)
    assert answer(*verify, "--costs", tmp_path / "costs.npy", capsys=capsys)["verified"] is True
    assert "pass the same" in answer(*verify, code=2, capsys=capsys)["error"]["message"]
