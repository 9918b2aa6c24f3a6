"""Checkpoints, registries and pointers that are damaged, of another version, or changed by a person.

Whatever lies there: what is wrong is found and named, what is whole is used, nothing that a person may still want is
deleted, and saving goes on.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoint.checkpoint_roots import add_manifest_checksum
from support.soak import IS_SOAK
from transformers import LlamaConfig, LlamaForCausalLM

from tundish.checkpoint import Checkpointer, open_readonly, verify
from tundish.errors import CorruptCheckpointError, NotFoundError, StateMismatchError

PAGE = 4096
PLACES = 480 if IS_SOAK else 10


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with an export of several shards, and DCP checkpoints of steps 1, 2 and 3."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    root = tmp_path_factory.mktemp("saved") / "root"
    with Checkpointer(root, on_failure="raise") as checkpointer:
        checkpointer.save_hf(3, LlamaForCausalLM(config), shard_bytes=40_000, blocking=True)
        for step in (1, 2, 3):
            state = {"w": torch.full((5000,), float(step)), "random": torch.randn(5000), "note": "text"}
            checkpointer.save_dcp(step, state, extra={"step": step}, rank_extra={"seen": step}, blocking=True)
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "root"
    shutil.copytree(saved, copy, symlinks=True)
    return copy


def flipped(data: bytes, place: int, draw: random.Random) -> bytes:
    return data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]


def zeroed(data: bytes, place: int, draw: random.Random) -> bytes:
    start = place // PAGE * PAGE
    page = data[start : start + PAGE]
    return data[:start] + bytes(len(page)) + data[start + PAGE :]


def cut(data: bytes, place: int, draw: random.Random) -> bytes:
    return data[:place]


def test_flipped_bits_zeroed_pages_and_truncations_anywhere_are_found(root: Path) -> None:
    """144 of 144: 48 places of each sort, over all files of an export and of a DCP checkpoint."""
    draw = random.Random(20261121)
    folders = [root / "hf-3", root / "dcp-3"]
    files = sorted(path for folder in folders for path in folder.iterdir())
    names = {path.name for path in files}
    assert {
        "tundish.json",
        "config.json",
        "model.safetensors.index.json",
        ".metadata",
        "__0_0.distcp",
    } <= names
    assert sum(name.endswith(".safetensors") for name in names) > 2
    found = 0
    for damage in (flipped, zeroed, cut):
        # Every file is damaged about as often, whatever its size.
        for number in range(PLACES):
            path = files[number % len(files)]
            whole = path.read_bytes()
            damaged = damage(whole, draw.randrange(len(whole)), draw)
            assert damaged != whole
            path.write_bytes(damaged)
            with pytest.raises(CorruptCheckpointError, match=re.escape(path.name)) as told:
                verify(path.parent)
            assert path.name in told.value.paths
            path.write_bytes(whole)
            found += 1
    assert found == 3 * PLACES
    for folder in folders:
        verify(folder)


@pytest.mark.parametrize("damage", [flipped, zeroed, cut])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "rank_extra-00000.json", "tundish.json"])
def test_a_wrong_byte_in_the_newest_means_the_one_before_and_is_told(
    root: Path, damage: Callable[..., bytes], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (3, 2):
        path = root / f"dcp-{step}" / name
        whole = path.read_bytes()
        path.write_bytes(damage(whole, len(whole) // 2, random.Random(0)))
        state: dict[str, Any] = {"w": torch.zeros(5000)}
        with Checkpointer(root, on_failure="raise") as checkpointer:
            extra, rank_extras = checkpointer.load_dcp(state)
            assert (extra, rank_extras) == ({"step": step - 1}, {0: {"seen": step - 1}})
            assert torch.equal(state["w"], torch.full((5000,), step - 1.0))
            # A step that is named raises, and nothing is loaded.
            with pytest.raises((CorruptCheckpointError, NotFoundError)):
                checkpointer.load_dcp(state, step)
            assert torch.equal(state["w"], torch.full((5000,), step - 1.0))
        assert f"step {step} cannot be loaded, the one before is tried: " in caplog.text
        # It is still there, for anyone who wants to look at it.
        assert path.exists()


def test_a_foreign_file_is_named_and_costs_nothing(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "dcp-3" / "eval").mkdir()
    (root / "dcp-3" / "eval" / "results.json").write_text("{}")
    state: dict[str, Any] = {"w": torch.zeros(5000)}
    with Checkpointer(root, on_failure="raise") as checkpointer:
        for step in (None, 3):
            assert checkpointer.load_dcp(state, step) == ({"step": 3}, {0: {"seen": 3}})
            assert torch.equal(state["w"], torch.full((5000,), 3.0))
            assert "files that no save wrote, which are not read: eval/results.json" in caplog.text
            caplog.clear()
    with pytest.raises(CorruptCheckpointError, match="is foreign: it is in no manifest") as told:
        verify(root / "dcp-3")
    assert told.value.paths == ("eval/results.json",)
    # Beside it a file of the checkpoint's own is still missed.
    weights = root / "dcp-3" / "__0_0.distcp"
    weights.write_bytes(flipped(weights.read_bytes(), 100, random.Random(0)))
    with Checkpointer(root, on_failure="raise") as checkpointer:
        assert checkpointer.load_dcp(state)[0] == {"step": 2}


def test_a_rank_extra_that_the_manifest_does_not_list_is_not_read(root: Path) -> None:
    path = root / "dcp-3" / "rank_extra-00000.json"
    manifest = json.loads((root / "dcp-3" / "tundish.json").read_text())
    del manifest["checksum"]
    manifest["files"] = [one for one in manifest["files"] if one["name"] != path.name]
    (root / "dcp-3" / "tundish.json").write_text(add_manifest_checksum(json.dumps(manifest)))
    with Checkpointer(root, on_failure="raise") as checkpointer:
        assert checkpointer.load_dcp({}, 3) == ({"step": 3}, {0: None})


@pytest.mark.parametrize("extra", ['"text"', "[" * 5000 + "]" * 5000, '{"a": ' + "1" * 5000 + "}"])
def test_facts_that_no_save_gives_are_in_nobodys_way(root: Path, extra: str) -> None:
    manifest = json.loads((root / "dcp-3" / "tundish.json").read_text())
    del manifest["checksum"]
    manifest["extra"] = "@"
    text = json.dumps(manifest).replace('"@"', extra)
    (root / "dcp-3" / "tundish.json").write_text(add_manifest_checksum(text))
    with Checkpointer(root, on_failure="raise", keep_last=2) as checkpointer:
        assert [dict(one.extra) for one in checkpointer.list("dcp")] == [{"step": 1}, {"step": 2}, {}]
        with pytest.raises(CorruptCheckpointError, match="has an extra that no save writes"):
            checkpointer.load_dcp({})
        assert checkpointer.load_dcp({}, 2)[0] == {"step": 2}
        checkpointer.save_dcp(4, {"w": torch.ones(3)}, blocking=True)
        assert [one.step for one in checkpointer.list("dcp")] == [3, 4]


def test_no_whole_checkpoint_is_an_error_and_no_fresh_start(root: Path) -> None:
    for step in (1, 2, 3):
        path = root / f"dcp-{step}" / "__0_0.distcp"
        path.write_bytes(flipped(path.read_bytes(), 100, random.Random(0)))
    with (
        Checkpointer(root, on_failure="raise") as checkpointer,
        pytest.raises(CorruptCheckpointError, match=r"no DCP checkpoint under .* is whole"),
    ):
        checkpointer.load_dcp({"w": torch.zeros(5000)})


def pointer_leads_nowhere(root: Path) -> None:
    (root / "dcp-latest").unlink()
    (root / "dcp-latest").symlink_to("dcp-99")


def pointer_leads_outside(root: Path) -> None:
    (root / "hf-latest").unlink()
    (root / "hf-latest").symlink_to("/")


def pointer_leads_to_itself(root: Path) -> None:
    (root / "hf-latest").unlink()
    (root / "hf-latest").symlink_to("hf-latest")


def pointer_is_gone(root: Path) -> None:
    (root / "dcp-latest").unlink()


def leftovers_of_before(root: Path) -> None:
    # As saves that died left them, of this version and of one with other files.
    for name in (".hf-9.incomplete", ".dcp-9.incomplete", ".hf-1.removed-0", ".dcp-2.removed-7"):
        (root / name / "deep" / "er").mkdir(parents=True)
        (root / name / "deep" / "er" / "file").write_bytes(b"old")
        (root / name / "way out").symlink_to("/")
        (root / name / "tundish.json").write_text('{"format_version": 0}')
    (root / ".hf-latest.incomplete").symlink_to("hf-9")


@pytest.mark.parametrize(
    "change",
    [
        pointer_leads_nowhere,
        pointer_leads_outside,
        pointer_leads_to_itself,
        pointer_is_gone,
        leftovers_of_before,
    ],
)
def test_the_next_start_repairs_the_links_from_the_folders(
    root: Path, saved: Path, change: Callable[[Path], None]
) -> None:
    change(root)
    # A reader sees the folders, too.
    assert open_readonly(root).latest("dcp") == root / "dcp-3"
    assert [one.step for one in open_readonly(root).list("dcp")] == [1, 2, 3]
    with Checkpointer(root, on_failure="raise", keep_last=3) as checkpointer:
        assert sorted(os.listdir(root)) == sorted(os.listdir(saved))
        assert (os.readlink(root / "hf-latest"), os.readlink(root / "dcp-latest")) == ("hf-3", "dcp-3")
        assert checkpointer.load_dcp({})[0] == {"step": 3}
        checkpointer.save_dcp(4, {"w": torch.ones(1)}, blocking=True)
        assert [one.step for one in checkpointer.list("dcp")] == [2, 3, 4]
        for one in checkpointer.list():
            checkpointer.verify(one.path)


def another_version(root: Path) -> None:
    """The newest was saved by a version of this library that is not this one."""
    manifest = json.loads((root / "dcp-3" / "tundish.json").read_text())
    (root / "dcp-3" / "tundish.json").write_text(json.dumps(manifest | {"format_version": 2}))


def no_manifest(root: Path) -> None:
    """The newest was saved by torch itself, before this library was used here."""
    (root / "dcp-3" / "tundish.json").unlink()


def another_step(root: Path) -> None:
    shutil.rmtree(root / "dcp-3")
    (root / "dcp-2").rename(root / "dcp-3")
    shutil.copytree(root / "dcp-3", root / "dcp-2")


def a_missing_file(root: Path) -> None:
    (root / "dcp-3" / "__0_0.distcp").unlink()


@pytest.mark.parametrize("change", [another_version, no_manifest, another_step, a_missing_file])
def test_a_folder_that_is_no_whole_checkpoint_counts_for_nothing_and_stays(
    root: Path, change: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    change(root)
    kept = sorted(os.listdir(root / "dcp-3"))
    with Checkpointer(root, on_failure="raise", keep_last=2) as checkpointer:
        assert f"{root / 'dcp-3'} is named like a checkpoint and is none; it stays as it is" in caplog.text
        assert checkpointer.latest("dcp") == root / "dcp-2"
        assert checkpointer.load_dcp({})[0]["step"] == 2
        with pytest.raises((StateMismatchError, CorruptCheckpointError, NotFoundError)):
            checkpointer.load_dcp({}, 3)
        # Not saved over, and not counted: two whole ones are kept beside it.
        with pytest.raises(FileExistsError):
            checkpointer.save_dcp(3, {"w": torch.ones(1)})
        for step in (4, 5):
            checkpointer.save_dcp(step, {"w": torch.ones(1)}, blocking=True)
        assert [one.step for one in checkpointer.list("dcp")] == [4, 5]
    assert sorted(os.listdir(root / "dcp-3")) == kept


def test_checkpoints_that_a_person_renamed_or_deleted_while_saving_goes_on(root: Path) -> None:
    with Checkpointer(root, on_failure="raise", keep_last=2) as checkpointer:
        (root / "dcp-3").rename(root / "dcp-3-keep-this")
        assert checkpointer.latest("dcp") == root / "dcp-2"
        assert checkpointer.load_dcp({})[0] == {"step": 2}
        checkpointer.save_dcp(4, {"w": torch.ones(1)}, blocking=True)
        assert [one.step for one in checkpointer.list("dcp")] == [2, 4]
        shutil.rmtree(root / "dcp-4")
        assert checkpointer.latest("dcp") == root / "dcp-2"
        checkpointer.save_dcp(5, {"w": torch.ones(1)}, blocking=True)
        (root / "dcp-3-keep-this").rename(root / "dcp-3")
        # Renamed back it counts again; retention takes it for its own from the next start on.
        assert [one.step for one in checkpointer.list("dcp")] == [2, 3, 5]
        shutil.rmtree(root / "hf-3")
        assert checkpointer.latest("hf") is None
        checkpointer.save_hf(3, {"w": torch.ones(1)}, blocking=True)
    with Checkpointer(root, on_failure="raise", keep_last=2) as checkpointer:
        assert [one.step for one in checkpointer.list("dcp")] == [2, 3, 5]
        assert os.readlink(root / "hf-latest") == "hf-3"
