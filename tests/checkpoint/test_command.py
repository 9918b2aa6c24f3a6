"""The command `tundish checkpoint`: its results and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoint.checkpoint_roots import add_manifest_checksum

from tundish import cli
from tundish.checkpoint import Checkpointer
from tundish.errors import InvalidInputError
from tundish.packing import pack


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


def test_list(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = answer(capsys, "checkpoint", "list", root)["checkpoints"]
    assert names(listed) == ["dcp-30", "hf-10", "hf-20", "hf-30"]
    assert listed[0]["extra"] == {"tokens": 7}
    assert listed[2]["tag"] == "best"
    assert cli.main(["checkpoint", "list", str(root)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == names(listed)
    assert shown[2].endswith("best")


def test_list_shows_checkpoints_that_a_rollback_set_aside(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = sum(path.stat().st_size for path in (root / "hf-30").iterdir())
    with Checkpointer(root, on_failure="raise") as checkpointer:
        checkpointer.discard_after(20)
    told = answer(capsys, "checkpoint", "list", root)
    assert names(told["checkpoints"]) == ["hf-10", "hf-20"]
    assert names(told["set_aside"]) == ["discarded-dcp-30", "discarded-hf-30"]
    assert told["set_aside"][1]["size"] == size
    assert cli.main(["checkpoint", "list", str(root)]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("discarded-hf-30 ")
    assert "set aside by a rollback" in last


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


def test_verify_shows_a_line_for_each_checkpoint_and_the_remedy(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["checkpoint", "verify", str(root)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in shown] == [
        ["✓", name] for name in ("dcp-30", "hf-10", "hf-20", "hf-30")
    ]
    damage(root / "hf-10" / "model.safetensors")
    (root / "hf-30" / "tundish.json").unlink()
    assert cli.main(["checkpoint", "verify", str(root)]) == 1
    told = capsys.readouterr()
    shown = told.out.splitlines()
    assert [line.split()[:2] for line in shown] == [
        ["✓", "dcp-30"],
        ["✗", "hf-10"],
        ["✓", "hf-20"],
        ["✗", "hf-30"],
    ]
    assert "model.safetensors" in shown[1]
    assert "it has no tundish.json" in shown[3]
    assert "damaged: 2 of 4 checkpoints; move or delete them; step 30 can be resumed from" in told.err
    (root / "dcp-30" / "tundish.json").unlink()
    assert cli.main(["checkpoint", "verify", str(root)]) == 1
    assert "none of these can be resumed from" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["list", "verify", "repair"])
def test_the_folder_of_a_plan_is_called_that(
    tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pack([3, 4, 5], 8).save(tmp_path / "plan")
    error = answer(capsys, "checkpoint", verb, tmp_path / "plan", code=2)["error"]
    assert (
        f"is the folder of a packing plan: `tundish plan show {tmp_path / 'plan'}` shows it"
        in error["message"]
    )


def test_prune(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    removed = answer(capsys, "checkpoint", "prune", root, "--keep-last", 1)["removed"]
    assert names(removed) == ["hf-10"]
    assert not (root / "hf-10").exists()
    assert names(answer(capsys, "checkpoint", "list", root)["checkpoints"]) == ["dcp-30", "hf-20", "hf-30"]
    assert (
        answer(capsys, "checkpoint", "prune", root, "--keep-last", 0, code=2)["error"]["kind"]
        == "InvalidInputError"
    )


def damage(path: Path, *, cut: bool = False) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content[: -1 if cut else None])


def test_all_commands_name_folders_that_are_no_whole_checkpoint(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(root / "hf-30" / "model.safetensors", cut=True)
    (root / "dcp-30" / "tundish.json").unlink()
    listed = answer(capsys, "checkpoint", "list", root)
    assert names(listed["checkpoints"]) == ["hf-10", "hf-20"]
    assert names(listed["damaged"]) == ["dcp-30", "hf-30"]
    assert cli.main(["checkpoint", "list", str(root)]) == 0
    shown = capsys.readouterr().out
    assert "dcp-30              not a whole checkpoint: it has no tundish.json" in shown
    assert "hf-30               not a whole checkpoint: model.safetensors has " in shown
    for words in ([], ["--step", 30]):
        error = answer(capsys, "checkpoint", "verify", root, *words, code=1)["error"]
        assert "hf-30 is not a whole checkpoint: model.safetensors has " in error["message"]
        assert "dcp-30 is not a whole checkpoint: it has no tundish.json" in error["message"]
    answer(capsys, "checkpoint", "verify", root, "--step", 20)
    assert (
        answer(capsys, "checkpoint", "verify", root, "--step", 40, code=3)["error"]["kind"] == "NotFoundError"
    )
    assert cli.main(["checkpoint", "repair", str(root)]) == 0
    shown = capsys.readouterr().out
    assert f"ignored: {root / 'dcp-30'}: it has no tundish.json" in shown


@pytest.mark.parametrize("cut", [False, True])
def test_prune_removes_nothing_if_a_kept_checkpoint_is_damaged(
    root: Path, cut: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with Checkpointer(root, on_failure="raise") as checkpointer:
        for step in (31, 32, 33):
            checkpointer.save_dcp(step, {"weight": torch.ones(2000)}, blocking=True)
    damage(root / "dcp-33" / "__0_0.distcp", cut=cut)
    before = sorted(path.name for path in root.iterdir())
    if cut:
        # It is none, and so not counted among those to keep.
        removed = answer(capsys, "checkpoint", "prune", root, "--keep-last", 1)["removed"]
        assert names(removed) == ["dcp-30", "dcp-31", "hf-10"]
        assert (root / "dcp-33").exists()
        return
    error = answer(capsys, "checkpoint", "prune", root, "--keep-last", 1, code=1)["error"]
    assert error["kind"] == "CorruptCheckpointError"
    assert "nothing was removed" in error["message"]
    assert "dcp-33" in error["message"]
    assert sorted(path.name for path in root.iterdir()) == before
    (root / "dcp-33").rename(root / "bad")
    answer(capsys, "checkpoint", "prune", root, "--keep-last", 1)
    assert not (root / "dcp-31").exists()
    with Checkpointer(root, on_failure="raise") as checkpointer:
        checkpointer.load_dcp({"weight": torch.ones(2000)}, 32)


def test_prune_does_not_report_checkpoints_set_aside_as_removed(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # As a rollback leaves it that was cut short.
    (root / ".discard-after-20").touch()
    assert answer(capsys, "checkpoint", "prune", root, "--keep-last", 1)["removed"] == []
    assert all((root / f"discarded-{kind}-30").is_dir() for kind in ("dcp", "hf"))


def test_prune_keeps_the_steps_it_is_told(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["checkpoint", "prune", root, "--keep-last", 1]
    error = answer(capsys, *words, "--keep", 10, "--keep", 15, code=3)["error"]
    assert "step 15" in error["message"]
    assert answer(capsys, *words, "--keep", 10, "--keep", 30)["removed"] == []
    assert names(answer(capsys, *words)["removed"]) == ["hf-10"]


def test_foreign_text_is_escaped(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = json.loads((root / "hf-20" / "tundish.json").read_text())
    del manifest["checksum"]
    evil = "\x1b[2J\x1b]0;title\x07\u202enext\nhf-99"
    (root / "hf-20" / "tundish.json").write_text(add_manifest_checksum(json.dumps(manifest | {"tag": evil})))
    manifest["files"][0]["name"] = evil
    (root / "hf-10" / "tundish.json").write_text(add_manifest_checksum(json.dumps(manifest | {"step": 10})))
    assert cli.main(["checkpoint", "list", str(root)]) == 0
    assert cli.main(["checkpoint", "verify", str(root)]) == 1
    assert cli.main(["checkpoint", "repair", str(root)]) == 0
    told = capsys.readouterr()
    assert all(sign.isprintable() or sign == "\n" for sign in told.out + told.err)
    # Of the tag, and of the name of a file.
    escaped = "\\x1b[2J\\x1b]0;title\\x07\\u202enext\\nhf-99"
    assert sum(escaped in line for line in told.out.splitlines()) >= 2
    assert answer(capsys, "checkpoint", "list", root)["checkpoints"][1]["tag"] == evil


def test_repair_mends_links_from_the_folders(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert not any(answer(capsys, "checkpoint", "repair", root).values())


def test_a_root_in_use_is_left_to_its_owner(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Checkpointer(root, on_failure="raise"):
        for words in (["prune", root, "--keep-last", 1], ["repair", root]):
            error = answer(capsys, "checkpoint", *words, code=3)["error"]
            assert error["kind"] == "RootInUseError"
        answer(capsys, "checkpoint", "list", root)


@pytest.mark.parametrize("verb", ["list", "verify", "prune", "repair"])
def test_a_folder_that_is_not_there_is_not_made(
    tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--keep-last", 1] if verb == "prune" else []
    error = answer(capsys, "checkpoint", verb, tmp_path / "nowhere", *words, code=3)["error"]
    assert (error["kind"], "nowhere: no such folder" in error["message"]) == ("NotFoundError", True)
    error = answer(capsys, "checkpoint", verb, "", *words, code=2)["error"]
    assert "the path is empty" in error["message"]
    assert list(tmp_path.iterdir()) == []


def everything_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("name", ["dcp-30", "hf-latest"])
@pytest.mark.parametrize("verb", ["list", "verify", "prune", "repair"])
def test_a_checkpoint_is_no_root(
    root: Path, verb: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything_in(root)
    words = ["--keep-last", 1] if verb == "prune" else []
    error = answer(capsys, "checkpoint", verb, root / name, *words, code=2)["error"]
    assert error["kind"] == "InvalidInputError"
    step = name.replace("latest", "30")
    assert f"{name} is itself a checkpoint: give {root}, the root that {step} lies in" in error["message"]
    with pytest.raises(InvalidInputError, match="is itself a checkpoint"):
        Checkpointer(root / name, on_failure="raise")
    assert everything_in(root) == before
    answer(capsys, "checkpoint", "verify", root)


@pytest.mark.parametrize("verb", ["verify", "prune", "repair"])
def test_a_folder_where_nothing_was_saved_is_refused_and_left(
    tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hf-models").mkdir()
    (tmp_path / "precious.txt").touch()
    before = everything_in(tmp_path)
    words = ["--keep-last", 1] if verb == "prune" else []
    error = answer(capsys, "checkpoint", verb, tmp_path, *words, code=2)["error"]
    assert error["kind"] == "InvalidInputError"
    assert f"{tmp_path}: no checkpoint was ever saved here" in error["message"]
    assert everything_in(tmp_path) == before
