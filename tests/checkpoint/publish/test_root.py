"""The binding of a checkpoint root: publication, removal, rollback and locks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.checkpoint.checkpoint_roots import Root, manifest, save, started

from tundish import _native
from tundish.errors import (
    AlreadyExistsError,
    CheckpointInUseError,
    CorruptCheckpointError,
    InvalidInputError,
    NotFoundError,
    StepExistsError,
    StepOrderError,
    StorageError,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def steps(listed: list[_native.Checkpoint]) -> list[tuple[str, int]]:
    return [(entry["kind"], entry["step"]) for entry in listed]


def test_a_published_checkpoint_is_listed_and_linked(root: Root) -> None:
    extra = {"consumed": 2**70, "loss": 0.1, "names": ["ä"]}
    first = save(root, "dcp", 10, extra=extra, tag="snapshot", world_size=4)
    second = save(root, "hf", 20)
    assert first == root.path / "dcp-10"
    assert (first / "weights").read_text() == "dcp 10 "
    assert names(root.path) == [".owner", "dcp-10", "dcp-latest", "hf-20", "hf-latest"]
    assert os.readlink(root.path / "hf-latest") == "hf-20"
    assert root.list() == [
        {
            "kind": "dcp",
            "step": 10,
            "path": first,
            "tag": "snapshot",
            "bytes": 11,
            "files": 2,
            "world_size": 4,
            "extra": extra,
        },
        {
            "kind": "hf",
            "step": 20,
            "path": second,
            "tag": None,
            "bytes": 10,
            "files": 2,
            "world_size": 1,
            "extra": None,
        },
    ]


def test_a_watcher_sees_the_same_and_changes_nothing(root: Root) -> None:
    save(root, "hf", 1)
    save(root, "hf", 2)
    root.begin("hf", 3, overwrite=False)
    before = names(root.path)
    watcher = _native.open_checkpoints_readonly(root.path)
    assert watcher.list() == root.list()
    assert watcher.latest("hf") == root.path / "hf-2"
    assert watcher.latest("dcp") is None
    assert names(root.path) == before
    # It keeps nothing in mind: what is damaged is not shown.
    (root.path / "hf-2" / "weights").write_text("")
    assert watcher.latest("hf") == root.path / "hf-1"
    with pytest.raises(NotFoundError):
        _native.open_checkpoints_readonly(root.path / "nowhere")


def test_steps_are_saved_once_and_upwards(root: Root) -> None:
    save(root, "hf", 20)
    with pytest.raises(StepExistsError, match=r"hf-20 is there already: .* discard_after") as caught:
        root.begin("hf", 20, overwrite=False)
    assert isinstance(caught.value, FileExistsError)
    with pytest.raises(StepOrderError, match=r"hf step 19 is below step 20.*discard_after") as order:
        root.begin("hf", 19, overwrite=True)
    assert isinstance(order.value, ValueError)
    root.begin("dcp", 5, overwrite=False)
    with pytest.raises(StepExistsError, match="being written already"):
        root.begin("dcp", 5, overwrite=False)
    with pytest.raises(StepOrderError):
        root.begin("dcp", 4, overwrite=False)
    assert steps(root.list()) == [("hf", 20)]


@pytest.mark.parametrize("kind", ["", "HF", "../hf", "hf-1"])
def test_kinds_that_there_are_not_are_refused_by_name(root: Root, kind: str) -> None:
    watcher = _native.open_checkpoints_readonly(root.path)
    calls: list[Callable[[], object]] = [
        lambda: root.begin(kind, 1, overwrite=False),
        lambda: root.publish(kind, 1, "{}", overwrite=False),
        lambda: root.abandon(kind, 1),
        lambda: root.remove(kind, 1),
        lambda: watcher.latest(kind),
        lambda: watcher.read_lock(kind, 1),
    ]
    for call in calls:
        with pytest.raises(InvalidInputError, match=f"kind is {json.dumps(kind)}"):
            call()


def test_a_folder_that_differs_from_its_manifest_is_not_published(root: Root) -> None:
    folder = root.begin("hf", 1, overwrite=False)
    (folder / "short").write_bytes(b"x")
    (folder / "stranger").write_bytes(b"x")
    (folder / "link").symlink_to("short")
    with pytest.raises(CorruptCheckpointError, match="link is no plain file, and 3 more") as caught:
        root.publish("hf", 1, manifest("hf", 1, {"short": 2, "missing": 0, "link": 1}), overwrite=False)
    assert sorted(caught.value.paths) == ["link", "missing", "short", "stranger"]
    assert not (root.path / "hf-1").exists()
    with pytest.raises(InvalidInputError, match="begin it again"):
        root.publish("hf", 1, manifest("hf", 1, {}), overwrite=False)
    root.abandon("hf", 1)
    assert names(root.path) == [".owner"]
    with pytest.raises(InvalidInputError, match="not begun"):
        root.publish("hf", 1, manifest("hf", 1, {}), overwrite=False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        manifest("dcp", 1, {}),
        manifest("hf", 2, {}),
        manifest("hf", 1, {"../outside": 1}),
        manifest("hf", 1, {"a": 1}) + "{",
    ],
)
def test_a_manifest_of_something_else_is_refused(root: Root, text: str) -> None:
    root.begin("hf", 1, overwrite=False)
    with pytest.raises(InvalidInputError, match="manifest"):
        root.publish("hf", 1, text, overwrite=False)
    root.abandon("hf", 1)
    save(root, "hf", 1)


READER = """
import sys
from tundish import _native
lock = _native.open_checkpoints_readonly(sys.argv[1]).read_lock("hf", 1)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_reader_in_another_process_is_respected_until_it_dies(root: Root) -> None:
    save(root, "hf", 1)
    save(root, "hf", 2)
    with started(READER, root.path) as reader:
        with pytest.raises(CheckpointInUseError):
            root.remove("hf", 1)
        reader.kill()
        reader.wait()
        root.remove("hf", 1)
    assert steps(root.list()) == [("hf", 2)]


def test_changes_by_people_are_handled(root: Root) -> None:
    for step in (1, 2, 3, 4):
        save(root, "hf", step)
    (root.path / "hf-4").rename(root.path / "hf-4-good")
    (root.path / "hf-3").rename(root.path / "hf-33")
    (root.path / "hf-1" / "weights").unlink()
    assert steps(root.list()) == [("hf", 1), ("hf", 2)]
    with pytest.raises(CheckpointInUseError):
        root.remove("hf", 2)
    root.close()
    again = Root(root.path, wait_seconds=0)
    recovered = again.recovered
    assert recovered["repaired"] == [str(again.path / "hf-latest")]
    assert {Path(path).name: why for path, why in recovered["ignored"].items()} == {
        "hf-1": "weights is missing",
        "hf-33": "tundish.json says that this is hf-3",
    }
    assert steps(again.list()) == [("hf", 2)]
    assert os.readlink(again.path / "hf-latest") == "hf-2"
    save(again, "hf", 3)
    assert {"hf-1", "hf-33", "hf-4-good"} <= set(names(again.path))
    again.close()


def test_leftovers_go_and_everything_else_stays(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_text("keep")
    for name in (".hf-7.incomplete", ".dcp-8.removed-0"):
        (tmp_path / "root" / name / "inner").mkdir(parents=True)
        (tmp_path / "root" / name / "inner" / "file").write_text("x")
        (tmp_path / "root" / name / "way out").symlink_to(outside)
    (tmp_path / "root" / ".hf-9.incomplete").symlink_to(outside)
    (tmp_path / "root" / ".hf-latest.incomplete").symlink_to("hf-9")
    (tmp_path / "root" / "hf-12").symlink_to(outside)
    (tmp_path / "root" / "notes").write_text("mine")
    root = Root(tmp_path / "root", wait_seconds=0)
    assert len(root.recovered["removed"]) == 4
    assert root.recovered["ignored"].keys() == {str(root.path / "hf-12")}
    assert names(root.path) == [".owner", "hf-12", "notes"]
    assert (outside / "keep").read_text() == "keep"
    root.close()


def test_names_that_are_taken_by_something_else_are_refused_early(tmp_path: Path) -> None:
    for name in ("hf-latest", ".owner"):
        folder = tmp_path / name.strip(".") / "root"
        (folder / name).mkdir(parents=True)
        with pytest.raises(AlreadyExistsError, match="is in the way"):
            Root(folder, wait_seconds=0)
    folder = tmp_path / "file"
    folder.mkdir()
    (folder / "hf-latest").write_text("not a link")
    with pytest.raises(AlreadyExistsError, match="hf-latest is in the way"):
        Root(folder, wait_seconds=0)
    assert (folder / "hf-latest").read_text() == "not a link"


def test_roots_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nowhere").symlink_to("missing")
    for name in ("file", "file/inner", "loop", "loop/inner", "nowhere"):
        with pytest.raises(StorageError, match=name.split("/")[0]):
            Root(tmp_path / name, wait_seconds=0)
    with pytest.raises(InvalidInputError, match="wait_seconds"):
        Root(tmp_path / "root", wait_seconds=-1)
    assert names(tmp_path) == ["file", "loop", "nowhere"]


def test_modes_are_those_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        root = Root(tmp_path / "root", wait_seconds=0)
        path = save(root, "hf", 1)
    finally:
        os.umask(before)
    files = (path / "tundish.json", root.path / ".owner")
    assert {file.stat().st_mode & 0o777 for file in files} == {0o640}
    assert {folder.stat().st_mode & 0o777 for folder in (path, root.path)} == {0o750}
    root.close()


def test_after_close_nothing_changes_any_more(root: Root) -> None:
    save(root, "hf", 1)
    folder = root.begin("hf", 2, overwrite=False)
    root.close()
    root.close()
    calls: list[Callable[[], object]] = [
        lambda: root.begin("hf", 3, overwrite=False),
        lambda: root.publish("hf", 2, manifest("hf", 2, {}), overwrite=False),
        lambda: root.abandon("hf", 2),
        lambda: root.remove("hf", 1),
        lambda: root.discard_after(0),
    ]
    for call in calls:
        with pytest.raises(StorageError, match="it was closed"):
            call()
    assert steps(root.list()) == [("hf", 1)]
    assert folder.exists()


def test_a_root_that_is_moved_or_replaced_is_not_written_to(root: Root) -> None:
    save(root, "hf", 1)
    root.begin("hf", 2, overwrite=False)
    moved = root.path.with_name("moved")
    root.path.rename(moved)
    with pytest.raises(StorageError, match="moved or removed"):
        root.publish("hf", 2, manifest("hf", 2, {}), overwrite=False)
    root.path.mkdir()
    with pytest.raises(StorageError, match="another folder"):
        root.begin("hf", 3, overwrite=False)
    assert names(root.path) == []
    root.path.rmdir()
    moved.rename(root.path)
    root.publish("hf", 2, manifest("hf", 2, {}), overwrite=False)
