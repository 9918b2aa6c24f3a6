"""`tundish plan export`, run as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.command_line import tundish

import tundish as td
from tundish import cli

SAMPLES = [[7] * length for length in (5, 3, 9, 2)]


def answer(*words: object, code: int = 0, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The output of `--json`, in this process: quicker than a process of its own."""
    assert cli.main([*map(str, words), "--json"]) == code
    parsed = json.loads(capsys.readouterr().out)
    assert isinstance(parsed, dict)
    return parsed


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"tokens": SAMPLES}), path)
    return path


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            "xtuner-preset",
            ["--lengths", "SOURCE", "--column", "tokens", "--paths", "a.jsonl", "--pack-order", "ORDER"],
        ),
        (
            "megatron",
            ["--lengths", "SOURCE", "--column", "tokens", "--prefix", "ab-", "--pack-order", "ORDER"],
        ),
        ("trl", ["--samples", "SOURCE", "--column", "tokens"]),
        ("nemo-parquet", ["--samples", "SOURCE", "--column", "tokens"]),
    ],
)
def test_the_folder_is_that_of_the_function(
    target: str, words: list[str], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = td.pack([5, 3, 9, 2], 8)
    plan.save(tmp_path / "plan")
    np.save(tmp_path / "order.npy", [1, 0])
    files = {"SOURCE": source, "ORDER": tmp_path / "order.npy"}
    out = tmp_path / "out"
    given = [files.get(word, word) for word in words]
    facts = answer(
        "plan", "export", tmp_path / "plan", "--format", target, "--out", out, *given, capsys=capsys
    )
    assert facts == {
        "plan": str(tmp_path / "plan"),
        "format": target,
        "out": str(out),
        "packs": 2,
        "fingerprint": plan.fingerprint,
    }
    options: dict[str, Any] = {
        "xtuner-preset": {"paths": ["a.jsonl"], "pack_order": [1, 0]},
        "megatron": {"prefix": "ab-", "pack_order": [1, 0]},
    }.get(target, {"samples": SAMPLES})
    td.packing.export(plan, tmp_path / "expected", target, **options)
    assert files_of(out) == files_of(tmp_path / "expected")
    if target == "trl":
        assert datasets.load_from_disk(out)["input_ids"][:] == [[7] * 8, [7] * 8]


def test_several_data_sets_and_their_errors(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    td.pack_datasets([[5, 3], [5, 3, 9, 2]], 8, mode="sequential", overlong="drop").save(tmp_path / "plan")
    np.save(tmp_path / "lengths.npy", [5, 3])
    words = ("plan", "export", tmp_path / "plan", "--format", "xtuner-preset", "--out", tmp_path / "out")
    refused = answer(*words, "--lengths", source, "--paths", "a", code=1, capsys=capsys)["error"]["message"]
    assert refused == "the plan was made for 2 datasets, and 1 SOURCE was given"
    refused = answer(*words, code=2, capsys=capsys)["error"]["message"]
    assert "needs paths=" in refused
    np.save(tmp_path / "others.npy", [5, 3, 9, 2])
    counted = (tmp_path / "lengths.npy", tmp_path / "others.npy")
    printed = tundish(*words, "--lengths", *counted, "--paths", "a", "b")
    assert (printed.returncode, printed.stderr) == (0, "")
    assert printed.stdout.startswith(f"{tmp_path / 'out'}: 3 packs as xtuner-preset (fingerprint ")
    assert np.load(tmp_path / "out" / "samples.npy")[:, :2].tolist() == [
        [0, 0],
        [0, 1],
        [1, 0],
        [1, 1],
        [1, 3],
    ]
