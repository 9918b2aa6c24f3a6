"""Everything of an export but its weights."""

from __future__ import annotations

import copy
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoint.exports import export, staged, write
from support.checkpoint.sharded_models import SMALL
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tundish.checkpoint.hf.export import HfExport
from tundish.checkpoint.root import DiskDraft
from tundish.errors import InvalidInputError, InvalidTypeError, NotFoundError

WEIGHTS = {"w": torch.ones(2)}


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", chat_template="{{ messages }}")


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".safetensors"
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder as it is downloaded: links into a cache, folders, weights in every form, a link to nowhere."""
    folder = tmp_path / "source"
    blobs = tmp_path / "blobs"
    (folder / "assets" / "deep").mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1").write_text("linked")
    (blobs / "1").chmod(0o444)
    (blobs / "more").mkdir()
    (blobs / "more" / "inside.txt").write_text("in a linked folder")
    (folder / "README.md").symlink_to(blobs / "1")
    (folder / "linked folder").symlink_to(blobs / "more")
    (folder / "nowhere").symlink_to(tmp_path / "missing")
    for name in (
        "config.json",
        "tokenizer.json",
        ".gitattributes",
        "assets/picture.png",
        "assets/deep/notes.txt",
        "modeling_own.py",
    ):
        (folder / name).write_text(name)
    for name in (
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "assets/consolidated.00.pth",
        "optimizer.pt",
        "model.gguf",
        "tf_model.h5",
        "tundish.json",
    ):
        (folder / name).write_text("weights")
    for name in (".git/objects/pack", ".cache/huggingface/download"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("weights under another name")
    os.mkfifo(folder / "pipe")
    return folder


COPIED = {
    "README.md": b"linked",
    "linked folder/inside.txt": b"in a linked folder",
    "config.json": b"config.json",
    "tokenizer.json": b"tokenizer.json",
    ".gitattributes": b".gitattributes",
    "assets/picture.png": b"assets/picture.png",
    "assets/deep/notes.txt": b"assets/deep/notes.txt",
    "modeling_own.py": b"modeling_own.py",
}


def test_a_source_folder_is_copied_without_its_weights(source: Path, tmp_path: Path) -> None:
    facts = export(tmp_path / "hf", WEIGHTS, source_dir=source)
    plan = HfExport(WEIGHTS, source_dir=source)
    assert plan.write_plan().checkpoint_bytes == sum(fact.size for fact in facts)
    plan.release()
    assert files(tmp_path / "hf") == COPIED
    assert sorted(fact.name for fact in facts) == sorted([*COPIED, "model.safetensors"])
    sizes = {fact.name: fact.size for fact in facts}
    assert all(sizes[name] == len(contents) for name, contents in COPIED.items())
    assert not any(path.is_symlink() for path in (tmp_path / "hf").rglob("*"))


@pytest.fixture
def umask() -> Iterator[Callable[[int], None]]:
    before = os.umask(0o022)
    yield lambda mask: os.umask(mask) and None
    os.umask(before)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_modes_follow_the_umask(
    mask: int, mode: int, source: Path, tmp_path: Path, umask: Callable[[int], None]
) -> None:
    umask(mask)
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    export(tmp_path / "hf", model, source_dir=source, tokenizer=tokenizer(), shard_bytes=20_000)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "hf").rglob("*")}
    assert {modes[path] for path in modes if path.is_file()} == {mode}
    assert {modes[path] for path in modes if path.is_dir()} == {0o777 & ~mask}


def test_files_of_objects_replace_source_files(source: Path, tmp_path: Path) -> None:
    export(tmp_path / "hf", WEIGHTS, source_dir=source, config=LlamaConfig(**SMALL), tokenizer=tokenizer())
    written = files(tmp_path / "hf")
    assert json.loads(written["config.json"])["hidden_size"] == SMALL["hidden_size"]
    assert "a" in json.loads(written["tokenizer.json"])["model"]["vocab"]
    assert written["README.md"] == COPIED["README.md"]
    assert (source / "config.json").read_text() == "config.json"


def test_tokenizer_and_config_are_saved_as_by_themselves(tmp_path: Path) -> None:
    config = LlamaConfig(**SMALL)
    export(tmp_path / "hf", WEIGHTS, config=config, tokenizer=tokenizer())
    config.save_pretrained(tmp_path / "own")
    tokenizer().save_pretrained(tmp_path / "own")
    assert files(tmp_path / "hf") == files(tmp_path / "own")
    assert "chat_template.jinja" in files(tmp_path / "hf")


def test_a_given_config_replaces_the_models_own(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    given = copy.deepcopy(model.config)
    given.rms_norm_eps = 0.125
    export(tmp_path / "hf", model, config=given, dtype=torch.bfloat16)
    written = json.loads(files(tmp_path / "hf")["config.json"])
    assert (written["rms_norm_eps"], written["dtype"]) == (0.125, "bfloat16")
    assert given.dtype != torch.bfloat16


def test_configs_are_saved_as_they_were_at_the_call(tmp_path: Path) -> None:
    config = LlamaConfig(**SMALL)
    with staged(HfExport(WEIGHTS, config=config)) as save:
        config.rms_norm_eps = 0.125
        write(save, tmp_path / "hf")
    assert json.loads(files(tmp_path / "hf")["config.json"])["rms_norm_eps"] != 0.125


class OwnConfig:
    """A config of another library, which can change and writes its own file."""

    def __init__(self) -> None:
        self.value = 1

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "own.txt").write_text(str(self.value))


def test_any_object_with_save_pretrained_is_a_config(tmp_path: Path) -> None:
    config = OwnConfig()
    with staged(HfExport(WEIGHTS, config=config)) as save:
        config.value = 2
        write(save, tmp_path / "hf")
    assert files(tmp_path / "hf") == {"own.txt": b"1"}


def test_the_same_save_gives_the_same_bytes(source: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    for name in ("first", "second"):
        export(tmp_path / name, model, source_dir=source, tokenizer=tokenizer(), shard_bytes=20_000)
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / name).rglob("*") if path.is_file()}
        for name in ("first", "second")
    )
    assert first == second
    assert len(first) > len(COPIED)


def test_files_of_other_ranks_are_not_reported(tmp_path: Path) -> None:
    with staged(HfExport(WEIGHTS, tokenizer=OwnConfig())) as save:
        (tmp_path / "model-00002-of-00002.safetensors").write_text("x")
        assert [fact.name for fact in save.write_late_files(DiskDraft(tmp_path), [])] == ["own.txt"]


def test_a_circle_of_links_is_refused(source: Path) -> None:
    (source / "assets" / "again").symlink_to(source)
    with pytest.raises(
        InvalidInputError, match="assets/again is a link to a folder that source_dir has already"
    ):
        HfExport(WEIGHTS, source_dir=source)


def test_a_source_has_to_be_a_folder(source: Path) -> None:
    for path in (source / "config.json", source / "missing"):
        with pytest.raises(NotFoundError) as caught:
            HfExport(WEIGHTS, source_dir=path)
        assert caught.value.filename == str(path)


@pytest.mark.parametrize("name", ["config", "tokenizer"])
def test_objects_without_save_pretrained_are_refused(name: str) -> None:
    arguments: dict[str, Any] = {name: object()}
    with pytest.raises(InvalidTypeError, match=f"{name} is an object, which has no save_pretrained: give"):
        HfExport(WEIGHTS, **arguments)


def test_an_error_of_a_config_is_raised_at_once() -> None:
    class Failing(OwnConfig):
        def save_pretrained(self, folder: str) -> None:
            raise KeyError("half a config")

    with pytest.raises(KeyError, match="half a config"):
        HfExport(WEIGHTS, config=Failing())


def test_broken_links_are_left_out(source: Path, tmp_path: Path) -> None:
    (source / "through a file").symlink_to("config.json/inside")
    (source / "self").symlink_to("self")
    export(tmp_path / "hf", WEIGHTS, source_dir=source)
    assert files(tmp_path / "hf") == COPIED


def test_a_source_that_is_removed_after_the_call_is_copied(source: Path, tmp_path: Path) -> None:
    with staged(HfExport(WEIGHTS, source_dir=source)) as save:
        (source / "config.json").unlink()
        (source / "assets" / "deep").rename(tmp_path / "elsewhere")
        (source / "new").write_text("too late")
        os.replace(source / "tokenizer.json", source / "tokenizer.old")
        write(save, tmp_path / "hf")
    assert files(tmp_path / "hf") == COPIED


def test_source_names_that_are_not_utf8_are_refused(source: Path) -> None:
    Path(os.fsdecode(os.fsencode(source / "assets") + b"/caf\xe9.txt")).write_text("x")
    with pytest.raises(InvalidInputError, match=r"assets/caf.*is no UTF-8"):
        HfExport(WEIGHTS, source_dir=source)


@pytest.mark.parametrize("given", [5, ["folder"]])
def test_a_source_of_another_type_is_refused(given: Any) -> None:
    with pytest.raises(InvalidTypeError, match="source_dir is"):
        HfExport(WEIGHTS, source_dir=given)


def test_source_files_are_closed(source: Path, tmp_path: Path) -> None:
    def opened() -> list[str]:
        links = (Path("/proc/self/fd") / number for number in os.listdir("/proc/self/fd"))
        return [
            os.readlink(link) for link in links if link.is_symlink() and str(tmp_path) in os.readlink(link)
        ]

    plan = HfExport(WEIGHTS, source_dir=source)
    assert opened()
    plan.release()
    assert not opened()
    with staged(HfExport(WEIGHTS, source_dir=source)):
        assert opened()
    assert not opened()
    (source / "again").symlink_to(source)
    with pytest.raises(InvalidInputError):
        HfExport(WEIGHTS, source_dir=source)
    assert not opened()
