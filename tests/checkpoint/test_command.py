"""`tundish checkpoint`: what it lists, verifies, removes and mends, and what it says when it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tundish import cli
from tundish.checkpoint import Checkpointer


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "checkpoints"
    with Checkpointer(root, on_failure="raise") as checkpointer:
        for step, tag in ((10, None), (20, "best"), (30, None)):
            checkpointer.save_hf(step, {"weight": torch.full((2000,), step)}, tag=tag, blocking=True)
        checkpointer.save_dcp(30, {"weight": torch.ones(2000)}, extra={"tokens": 7}, blocking=True)
    return root


def answer(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> dict[str, Any]:
    assert cli.main([*map(str, words), "--json"]) == code
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def names(entries: list[dict[str, Any]]) -> list[str]:
    return [Path(entry["path"]).name for entry in entries]


def test_ls(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = answer(capsys, "checkpoint", "ls", root)["checkpoints"]
    assert names(listed) == ["dcp-30", "hf-10", "hf-20", "hf-30"]
    assert listed[0]["extra"] == {"tokens": 7}
    assert listed[2]["tag"] == "best"
    assert cli.main(["checkpoint", "ls", str(root)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == names(listed)
    assert shown[2].endswith("best")


def test_verify_names_every_damaged_file(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(answer(capsys, "checkpoint", "verify", root)["verified"]) == 4
    assert names(answer(capsys, "checkpoint", "verify", root, "--step", 20)["verified"]) == ["hf-20"]
    for step in (10, 30):
        weights = root / f"hf-{step}" / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-5] ^= 4
        weights.write_bytes(content)
    error = answer(capsys, "checkpoint", "verify", root, code=1)["error"]
    assert error["kind"] == "CorruptCheckpointError"
    assert "hf-10" in error["message"]
    assert "hf-30" in error["message"]
    assert "hf-20" not in error["message"]
    answer(capsys, "checkpoint", "verify", root, "--step", 20)
    assert (
        answer(capsys, "checkpoint", "verify", root, "--step", 7, code=3)["error"]["kind"] == "NotFoundError"
    )


def test_prune(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    removed = answer(capsys, "checkpoint", "prune", root, "--keep-last", 1)["removed"]
    assert names(removed) == ["hf-10"]
    assert not (root / "hf-10").exists()
    assert names(answer(capsys, "checkpoint", "ls", root)["checkpoints"]) == ["dcp-30", "hf-20", "hf-30"]
    assert (
        answer(capsys, "checkpoint", "prune", root, "--keep-last", 0, code=2)["error"]["kind"]
        == "InvalidInputError"
    )


def test_repair_mends_registry_and_links_from_the_folders(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "checkpoints.json").write_text("{")
    (root / "hf-latest").unlink()
    (root / "hf-latest").symlink_to("hf-999")
    leftover = root / ".hf-40.incomplete"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    report = answer(capsys, "checkpoint", "repair", root)
    assert report["removed"]
    assert report["repaired"]
    assert not leftover.exists()
    assert (root / "hf-latest").resolve() == root / "hf-30"
    registry = json.loads((root / "checkpoints.json").read_text())
    assert {(one["kind"], one["step"]) for one in registry["checkpoints"]} >= {("hf", 30), ("dcp", 30)}
    assert not any(answer(capsys, "checkpoint", "repair", root).values())


def test_a_root_in_use_is_left_to_its_owner(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Checkpointer(root, on_failure="raise"):
        for words in (["prune", root, "--keep-last", 1], ["repair", root]):
            error = answer(capsys, "checkpoint", *words, code=3)["error"]
            assert error["kind"] == "RootInUseError"
        answer(capsys, "checkpoint", "ls", root)


@pytest.mark.parametrize("verb", ["ls", "verify", "repair"])
def test_a_folder_that_is_not_there_is_not_made(
    tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(capsys, "checkpoint", verb, tmp_path / "nowhere", code=2)
    assert list(tmp_path.iterdir()) == []
