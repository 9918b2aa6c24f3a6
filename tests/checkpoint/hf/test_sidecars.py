"""Everything of an export but its weights."""

from __future__ import annotations

import copy
import json
import os
import shutil
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

from tundish.checkpoint import Checkpointer
from tundish.checkpoint.hf.stager import make_hf_stager
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
    plan = make_hf_stager(WEIGHTS, source_dir=source)
    assert plan.checkpoint_bytes == sum(fact.size for fact in facts)
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


def test_what_objects_write_replaces_what_the_source_has(source: Path, tmp_path: Path) -> None:
    export(tmp_path / "hf", WEIGHTS, source_dir=source, config=LlamaConfig(**SMALL), tokenizer=tokenizer())
    written = files(tmp_path / "hf")
    assert json.loads(written["config.json"])["hidden_size"] == SMALL["hidden_size"]
    assert "a" in json.loads(written["tokenizer.json"])["model"]["vocab"]
    assert written["README.md"] == COPIED["README.md"]
    assert (source / "config.json").read_text() == "config.json"


def test_tokenizer_and_config_write_what_they_write_themselves(tmp_path: Path) -> None:
    config = LlamaConfig(**SMALL)
    export(tmp_path / "hf", WEIGHTS, config=config, tokenizer=tokenizer())
    config.save_pretrained(tmp_path / "own")
    tokenizer().save_pretrained(tmp_path / "own")
    assert files(tmp_path / "hf") == files(tmp_path / "own")
    assert "chat_template.jinja" in files(tmp_path / "hf")


def test_a_config_that_is_given_goes_before_the_models(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    given = copy.deepcopy(model.config)
    given.rms_norm_eps = 0.125
    export(tmp_path / "hf", model, config=given, dtype=torch.bfloat16)
    written = json.loads(files(tmp_path / "hf")["config.json"])
    assert (written["rms_norm_eps"], written["dtype"]) == (0.125, "bfloat16")
    assert given.dtype != torch.bfloat16


def test_settings_are_those_of_the_call(tmp_path: Path) -> None:
    config = LlamaConfig(**SMALL)
    with staged(make_hf_stager(WEIGHTS, config=config)) as save:
        config.rms_norm_eps = 0.125
        write(save, tmp_path / "hf")
    assert json.loads(files(tmp_path / "hf")["config.json"])["rms_norm_eps"] != 0.125


class OwnConfig:
    """A config that is none of transformers, which changes and writes a file of its own."""

    def __init__(self) -> None:
        self.value = 1

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "own.txt").write_text(str(self.value))


def test_any_config_that_can_be_saved(tmp_path: Path) -> None:
    config = OwnConfig()
    with staged(make_hf_stager(WEIGHTS, config=config)) as save:
        config.value = 2
        write(save, tmp_path / "hf")
    assert files(tmp_path / "hf") == {"own.txt": b"1"}


class Linking:
    """Writes links as well: to what it wrote, and to what it found elsewhere; `circle`: and one to a folder above."""

    def __init__(self, elsewhere: Path, *, circle: bool = False) -> None:
        self.elsewhere = elsewhere
        self.circle = circle

    def save_pretrained(self, folder: str) -> None:
        here = Path(folder)
        (here / "vocab.txt").write_text("a b")
        (here / "deep").mkdir()
        (here / "deep" / "same.txt").symlink_to("../vocab.txt")
        (here / "again.txt").symlink_to("deep/same.txt")
        (here / "found").symlink_to(self.elsewhere)
        (here / "nowhere").symlink_to("missing")
        if self.circle:
            (here / "deep" / "circle").symlink_to("..")


@pytest.mark.parametrize("name", ["config", "tokenizer"])
def test_links_that_objects_write_become_what_they_lead_to(name: str, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "more").mkdir(parents=True)
    (elsewhere / "more" / "merges.txt").write_text("a b c")
    (elsewhere / "lost").symlink_to("missing")
    arguments: dict[str, Any] = {name: Linking(elsewhere)}
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        path = checkpointer.save_hf(1, WEIGHTS, **arguments).result(60)
        checkpointer.verify(path)
    shutil.rmtree(elsewhere)
    found = {"vocab.txt", "deep/same.txt", "again.txt"}
    expected = {**dict.fromkeys(found, b"a b"), "found/more/merges.txt": b"a b c"}
    assert {key: value for key, value in files(path).items() if key != "tundish.json"} == expected
    assert not [entry for entry in path.rglob("*") if entry.is_symlink()]


def test_links_in_a_circle_that_objects_write_are_refused(tmp_path: Path) -> None:
    objects = Linking(tmp_path / "missing", circle=True)
    with pytest.raises(InvalidInputError, match="'deep/circle', a link that leads in a circle"):
        make_hf_stager(WEIGHTS, config=objects)
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        save = checkpointer.save_hf(1, WEIGHTS, tokenizer=objects)
        with pytest.raises(InvalidInputError, match="'deep/circle', a link that leads in a circle"):
            save.result(60)
        with pytest.raises(InvalidInputError):
            checkpointer.wait(60)


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


def test_files_of_others_are_not_taken_for_ours(tmp_path: Path) -> None:
    class Meanwhile(OwnConfig):
        def save_pretrained(self, folder: str) -> None:
            super().save_pretrained(folder)
            # Another rank makes its files at the same time.
            (Path(folder) / "model.safetensors").write_text("x")

    with staged(make_hf_stager(WEIGHTS, config=Meanwhile())) as save:
        (tmp_path / "of somebody else").write_text("x")
        assert [fact.name for fact in save.write_other_files(tmp_path)] == ["own.txt"]


def test_links_that_lead_in_a_circle_are_refused(source: Path) -> None:
    (source / "assets" / "again").symlink_to(source)
    with pytest.raises(InvalidInputError, match="assets/again links to a folder that it lies in"):
        make_hf_stager(WEIGHTS, source_dir=source)
    (source / "assets" / "again").unlink()
    (source / "self").symlink_to("self")
    with pytest.raises(InvalidInputError, match="self is a link that leads to itself"):
        make_hf_stager(WEIGHTS, source_dir=source)


def test_a_source_that_is_no_folder(source: Path) -> None:
    for path in (source / "config.json", source / "missing"):
        with pytest.raises(NotFoundError) as caught:
            make_hf_stager(WEIGHTS, source_dir=path)
        assert caught.value.filename == str(path)


@pytest.mark.parametrize("name", ["config", "tokenizer"])
def test_what_cannot_be_saved_is_refused(name: str) -> None:
    arguments: dict[str, Any] = {name: object()}
    with pytest.raises(InvalidTypeError, match=f"{name} is a object, which has no save_pretrained"):
        make_hf_stager(WEIGHTS, **arguments)


def test_a_config_that_fails_is_refused_at_once() -> None:
    class Failing(OwnConfig):
        def save_pretrained(self, folder: str) -> None:
            raise KeyError("half a config")

    with pytest.raises(KeyError, match="half a config"):
        make_hf_stager(WEIGHTS, config=Failing())


def test_links_that_lead_nowhere_are_left_out_whatever_they_say(source: Path, tmp_path: Path) -> None:
    (source / "through a file").symlink_to("config.json/inside")
    (source / "too long").symlink_to("x" * 300)
    export(tmp_path / "hf", WEIGHTS, source_dir=source)
    assert files(tmp_path / "hf") == COPIED


def test_a_source_that_is_taken_away_after_the_call_is_copied(source: Path, tmp_path: Path) -> None:
    with staged(make_hf_stager(WEIGHTS, source_dir=source)) as save:
        (source / "config.json").unlink()
        (source / "assets" / "deep").rename(tmp_path / "elsewhere")
        (source / "new").write_text("too late")
        os.replace(source / "tokenizer.json", source / "tokenizer.old")
        write(save, tmp_path / "hf")
    assert files(tmp_path / "hf") == COPIED


def test_names_in_a_source_that_are_no_text_are_refused(source: Path) -> None:
    Path(os.fsdecode(os.fsencode(source / "assets") + b"/caf\xe9.txt")).write_text("x")
    with pytest.raises(InvalidInputError, match=r"assets/caf.*is no UTF-8"):
        make_hf_stager(WEIGHTS, source_dir=source)


@pytest.mark.parametrize("given", [5, ["folder"]])
def test_a_source_of_another_type_is_refused(given: Any) -> None:
    with pytest.raises(InvalidTypeError, match="source_dir is"):
        make_hf_stager(WEIGHTS, source_dir=given)


def test_nothing_of_a_source_stays_open(source: Path, tmp_path: Path) -> None:
    def opened() -> list[str]:
        links = (Path("/proc/self/fd") / number for number in os.listdir("/proc/self/fd"))
        return [
            os.readlink(link) for link in links if link.is_symlink() and str(tmp_path) in os.readlink(link)
        ]

    plan = make_hf_stager(WEIGHTS, source_dir=source)
    assert opened()
    plan.release()
    assert not opened()
    with staged(make_hf_stager(WEIGHTS, source_dir=source)):
        assert opened()
    assert not opened()
    (source / "self").symlink_to("self")
    with pytest.raises(InvalidInputError):
        make_hf_stager(WEIGHTS, source_dir=source)
    assert not opened()
