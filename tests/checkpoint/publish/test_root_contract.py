"""The contract of `Root`, kept by the one on a disk and by the one in memory; and saves through either."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoint.checkpoint_roots import manifest
from support.checkpoint.memory_root import MemoryRoot

from tundish._native import FileImage
from tundish.checkpoint import Checkpointer, choose_checkpoint, load_chosen, start_new_run
from tundish.checkpoint.root import DiskRoot, Room, Root, WriteOptions
from tundish.errors import (
    CheckpointInUseError,
    CorruptCheckpointError,
    NotFoundError,
    RootInUseError,
    StepExistsError,
    StepOrderError,
)

OPTIONS = WriteOptions()


@pytest.fixture(params=["disk", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Root]:
    opened: Root = (
        DiskRoot(tmp_path / "root", owns=True, wait_seconds=0) if request.param == "disk" else MemoryRoot()
    )
    yield opened
    opened.close()


def save(root: Root, name: str, *, overwrite: bool = False, text: bytes = b"weights") -> Path:
    kind, step = name.split("-")
    root.begin(name, overwrite=overwrite)
    draft = root.draft(name)
    draft.write([("inner/weights", len(text), [(0, text)])], OPTIONS)
    draft.write_small("config.json", b"{}")
    sizes = {"inner/weights": len(text), "config.json": 2}
    return root.publish(name, manifest(kind, int(step), sizes), overwrite=overwrite)


def read(root: Root, name: str, file: str) -> bytes:
    with root.lock(name) as published, published.open(file) as opened:
        return opened.read()


def names(root: Root) -> list[str]:
    return [f"{one.kind}-{one.step}" for one in root.list()]


def test_what_is_published_is_listed_and_read(root: Root) -> None:
    for name in ("dcp-1", "hf-2", "hf-1000", "dcp-30"):
        if name == "hf-2":
            assert names(root) == ["dcp-1"]
        assert save(root, name) == root.path_of(name)
    assert set(names(root)) == {"hf-2", "hf-1000", "dcp-1", "dcp-30"}
    found = {f"{one.kind}-{one.step}": one for one in root.list()}["hf-2"]
    assert (found.size, found.files, found.path) == (9, 2, root.path_of("hf-2"))
    assert read(root, "hf-2", "inner/weights") == b"weights"
    assert root.latest("hf") == root.path_of("hf-1000")
    assert root.survey()[1] == []
    root.verify("hf-2")
    for missing in ("hf-3", "dcp-2"):
        with pytest.raises(NotFoundError):
            read(root, missing, "config.json")
    with pytest.raises(NotFoundError):
        read(root, "hf-2", "tokenizer.json")


def test_nothing_is_seen_before_it_is_published_nor_after_it_is_aborted(root: Root) -> None:
    save(root, "hf-1")
    root.begin("hf-2")
    root.draft("hf-2").write_small("config.json", b"{}")
    assert names(root) == ["hf-1"]
    with pytest.raises(StepExistsError):
        root.begin("hf-2")
    root.abort("hf-2")
    root.abort("hf-2")
    assert names(root) == ["hf-1"]
    save(root, "hf-2")
    assert names(root) == ["hf-1", "hf-2"]


def test_steps_rise_and_are_replaced_only_on_demand(root: Root) -> None:
    save(root, "hf-2")
    with pytest.raises(StepOrderError):
        root.begin("hf-1")
    with pytest.raises(StepExistsError):
        root.begin("hf-2")
    save(root, "hf-2", overwrite=True, text=b"other")
    assert read(root, "hf-2", "inner/weights") == b"other"
    # The other kind is counted by itself.
    save(root, "dcp-1")


def test_the_newest_the_read_and_the_protected_stay(root: Root) -> None:
    for step in (1, 2, 3, 4):
        save(root, f"hf-{step}")
    root.protect(1)
    with root.lock("hf-2") as published:
        assert published.path == root.path_of("hf-2")
        for name in ("hf-1", "hf-2", "hf-4"):
            with pytest.raises(CheckpointInUseError):
                root.remove(name)
        root.remove("hf-3")
    root.remove("hf-2")
    assert names(root) == ["hf-1", "hf-4"]
    assert root.protected == {1}
    with pytest.raises(NotFoundError):
        root.remove("hf-3")
    with pytest.raises(NotFoundError), root.lock("hf-3"):
        pass


def test_a_checkpoint_that_is_read_is_replaced_afterwards(root: Root) -> None:
    save(root, "hf-1")
    root.begin("hf-1", overwrite=True)
    root.draft("hf-1").write_small("config.json", b"[]")
    with root.lock("hf-1"), pytest.raises(CheckpointInUseError):
        root.publish("hf-1", manifest("hf", 1, {"config.json": 2}), overwrite=True)
    root.publish("hf-1", manifest("hf", 1, {"config.json": 2}), overwrite=True)
    assert read(root, "hf-1", "config.json") == b"[]"


def test_newer_checkpoints_are_set_aside_together(root: Root) -> None:
    for name in ("hf-1", "dcp-1", "hf-2", "dcp-3"):
        save(root, name)
    assert {path.name for path in root.set_aside(1)} == {"discarded-hf-2", "discarded-dcp-3"}
    assert sorted(names(root)) == ["dcp-1", "hf-1"]
    save(root, "hf-2")


def test_room_is_what_other_saves_leave(root: Root) -> None:
    first = root.reserve("hf-1", Room(1 << 20, 3))
    second = root.reserve("dcp-1", Room(1, 1))
    assert first.bytes - second.bytes >= 1 << 20
    assert first.files - second.files == 3
    root.abort("hf-1")
    assert root.reserve("dcp-1", Room(1, 1)).files == first.files


def test_files_are_written_from_images_and_from_where_tensors_lie(root: Root) -> None:
    header, tensor = b"header: ", torch.arange(3, dtype=torch.int64)
    image = FileImage(8)
    memoryview(image)[:] = b"an image"
    root.begin("hf-1")
    progress = []
    options = WriteOptions(set_progress=lambda written: progress.append(written))
    files = root.draft("hf-1").write(
        [
            ("pieces", 32, [(0, header), (8, tensor.numpy())]),
            ("image", 8, [(0, image)]),
        ],
        options,
    )
    assert [(file.name, file.size) for file in files] == [("pieces", 32), ("image", 8)]
    assert progress[-1]() == 40
    made = [root.draft("hf-1").write_small("note", io.BytesIO(b"text"))]
    root.publish("hf-1", manifest("hf", 1, {"pieces": 32, "image": 8, made[0].name: 4}))
    assert read(root, "hf-1", "pieces") == header + tensor.numpy().tobytes()
    assert read(root, "hf-1", "image") == b"an image"
    assert read(root, "hf-1", "note") == b"text"


@pytest.mark.parametrize("name", ["epoch=0-step=12.ckpt", "step-4", "output_dir"])
def test_a_single_folder_of_any_name_is_published_or_aborted(root: Root, name: str) -> None:
    for is_kept in (False, True):
        place = root.begin(name)
        root.draft(name, place).write([("weights", 3, [(0, b"abc")])], OPTIONS)
        if is_kept:
            assert root.publish(name, "{}") == root.path_of(name)
        else:
            root.abort(name)
            with pytest.raises(NotFoundError):
                read(root, name, "weights")
    assert read(root, name, "weights") == b"abc"
    assert names(root) == []


def test_a_single_folder_needs_no_root_of_checkpoints(tmp_path: Path) -> None:
    root = DiskRoot(tmp_path)
    root.draft("dcp-4", root.begin("dcp-4")).write_small("weights", b"abc")
    root.publish("dcp-4", "{}")
    root.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp-4"]
    assert sorted(path.name for path in (tmp_path / "dcp-4").iterdir()) == ["tundish.json", "weights"]


def test_objects_of_one_process_share_a_root(tmp_path: Path) -> None:
    root = DiskRoot(tmp_path / "root", owns=True, wait_seconds=0)
    with Checkpointer(root, on_failure="raise") as checkpointer:
        checkpointer.save_hf(1, {"w": torch.ones(2)}, blocking=True)
        save(root, "dcp-1")
        with pytest.raises(RootInUseError):
            DiskRoot(tmp_path / "root", owns=True, wait_seconds=0)
    # Still open: only one of the two was closed.
    save(root, "dcp-2")
    root.close()
    DiskRoot(tmp_path / "root", owns=True, wait_seconds=0).close()


def test_a_checkpointer_saves_and_prunes_through_any_root(root: Root) -> None:
    with Checkpointer(root, on_failure="raise", keep_last=2) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save_hf(step, {"w": torch.full((2,), float(step))}, blocking=True)
            checkpointer.save_dcp(step, {"w": torch.ones(2)}, extra={"step": step}, blocking=True)
        assert [one.step for one in checkpointer.list("hf")] == [2, 3]
        assert [one.extra for one in checkpointer.list("dcp")] == [{"step": 2}, {"step": 3}]
        assert checkpointer.latest("dcp") == root.path_of("dcp-3")
        checkpointer.discard_after(2)
        assert checkpointer.latest("hf") == root.path_of("hf-2")
    assert read(root, "hf-2", "model.safetensors").endswith(torch.full((2,), 2.0).numpy().tobytes())


def state(value: float) -> dict[str, Any]:
    """What torch's own reader loads too: a tensor that is no plain one to load into, and an object."""
    return {"w": torch.full((4, 6), value), "columns": torch.full((4, 6), value).t(), "o": {"n": [value]}}


def test_a_checkpointer_loads_and_verifies_through_any_root(root: Root) -> None:
    with Checkpointer(root, on_failure="raise") as checkpointer:
        with pytest.raises(NotFoundError, match="no DCP checkpoint"):
            checkpointer.load_dcp(state(0))
        for step in (1, 2):
            checkpointer.save_dcp(step, state(step), extra={"step": step}, rank_extra=[step], blocking=True)
        checkpointer.save_hf(2, {"w": torch.ones(2)}, blocking=True)
        target = state(0)
        extra, rank_extras = checkpointer.load_dcp(target)
        assert (extra, dict(rank_extras)) == ({"step": 2}, {0: [2]})
        assert torch.equal(target["w"], state(2)["w"]) and torch.equal(target["columns"], state(2)["columns"])
        assert target["o"] == state(2)["o"]
        assert checkpointer.load_dcp(state(0), step=1)[0] == {"step": 1}
        with pytest.raises(NotFoundError, match="steps there: 1, 2"):
            checkpointer.load_dcp(state(0), step=3)
        for name in ("dcp-1", "dcp-2", "hf-2"):
            checkpointer.verify(name)
            checkpointer.verify(root.path_of(name))
        with checkpointer.reading(1, "dcp") as path:
            assert path == root.path_of("dcp-1")
        chosen = choose_checkpoint(checkpointer, 1)
        load_chosen(checkpointer, target, chosen)
        assert (chosen.extra, target["o"]) == ({"step": 1}, state(1)["o"])
        assert names(root) == ["dcp-1"]
        with pytest.raises(StepExistsError):
            start_new_run(checkpointer)


def test_a_damaged_checkpoint_is_passed_over_in_any_root(root: Root) -> None:
    with Checkpointer(root, on_failure="raise") as checkpointer:
        for step in (1, 2):
            checkpointer.save_dcp(step, {"w": torch.ones(4)}, extra={"step": step}, blocking=True)
        cut(root, "dcp-2", "__0_0.distcp")
        with pytest.raises(CorruptCheckpointError, match="__0_0"):
            checkpointer.verify("dcp-2")
        with pytest.raises(CorruptCheckpointError, match="__0_0"):
            checkpointer.load_dcp({"w": torch.zeros(4)}, step=2)
        assert checkpointer.load_dcp({"w": torch.zeros(4)})[0] == {"step": 1}


def cut(root: Root, name: str, file: str) -> None:
    """Take the last byte of a file away."""
    if isinstance(root, MemoryRoot):
        root.published[name][file] = root.published[name][file][:-1]
    else:
        path = root.path_of(name) / file
        os.truncate(path, path.stat().st_size - 1)
