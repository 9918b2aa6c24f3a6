"""Checkpoints without checksums: verify and load say that only sizes were compared."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from tundish import cli
from tundish.checkpoint import Checkpointer, open_readonly, verify

# Small files, such as torch's own `.metadata`, still have a checksum.
FILES = {"dcp-1": ["__0_0.distcp"], "hf-1": ["model.safetensors"]}


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """A root of two checkpoints without checksums, in each of which a byte was changed; and one that has them."""
    root = tmp_path / "root"
    tensors = {"weight": torch.ones(2000)}
    with Checkpointer(root, on_failure="raise", checksum=None) as checkpointer:
        checkpointer.save_hf(1, tensors, blocking=True)
        checkpointer.save_dcp(1, tensors, blocking=True)
    for path in (root / "hf-1" / "model.safetensors", root / "dcp-1" / "__0_0.distcp"):
        data = bytearray(path.read_bytes())
        data[4000] ^= 1
        path.write_bytes(data)
    with Checkpointer(root, on_failure="raise") as checkpointer:
        checkpointer.save_hf(2, tensors, blocking=True)
    return root


def test_verify_names_files_without_checksums(changed: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, files in FILES.items():
        caplog.clear()
        assert verify(changed / name) == files
        assert f"{name}: no checksum of 1 file was recorded" in caplog.text
        assert "only the sizes were compared" in caplog.text
    caplog.clear()
    assert open_readonly(changed).verify("hf-2") == []
    assert caplog.text == ""


def test_the_command_says_it_and_never_that_every_byte_holds(
    changed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["checkpoint", "verify", str(changed)]) == 0
    lines = {line.split()[1]: line for line in capsys.readouterr().out.splitlines()}
    for name, line in lines.items():
        assert ("all bytes match" in line) is (name == "hf-2")
        assert ("only the sizes were compared of" in line) is (name in FILES)
    assert cli.main(["checkpoint", "verify", str(changed), "--json"]) == 0
    verified = json.loads(capsys.readouterr().out)["verified"]
    assert {Path(one["path"]).name: one["without_checksum"] for one in verified} == FILES | {"hf-2": []}


def test_loading_warns_that_nothing_could_be_verified(
    changed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(changed, on_failure="raise") as checkpointer:
        for step in (1, None):
            caplog.clear()
            checkpointer.load_dcp({"weight": torch.zeros(2000)}, step)
            (told,) = [one for one in caplog.records if "no checksum of" in one.getMessage()]
            assert told.levelno == logging.WARNING
            assert "dcp-1" in told.getMessage()
        caplog.clear()
        checkpointer.load_dcp({"weight": torch.zeros(2000)}, verify=False)
        assert "checksum" not in caplog.text
