"""The owner of a root, as Python sees it: what exists, what goes, and who may say so."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tundish import _native
from tundish.checkpoint import Checkpointer
from tundish.errors import (
    AlreadyExistsError,
    CheckpointInUseError,
    CorruptCheckpointError,
    InvalidInputError,
    NotFoundError,
    RootInUseError,
    StepExistsError,
    StepOrderError,
    StorageError,
)

Root = _native.CheckpointRoot


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Root]:
    # Only the root itself is made.
    with pytest.raises(NotFoundError, match=r"run does not exist"):
        Root(tmp_path / "run" / "checkpoints", wait_seconds=0)
    (tmp_path / "run").mkdir()
    opened = Root(tmp_path / "run" / "checkpoints", wait_seconds=0)
    yield opened
    opened.close()


def manifest(kind: str, step: int, sizes: dict[str, int], **more: object) -> str:
    files = [{"name": name, "size": size, "checksum": None} for name, size in sizes.items()]
    fields = {"format_version": 1, "kind": kind, "step": step, "world_size": 1, "tag": None, "files": files}
    return json.dumps(fields | more)


def save(
    root: Root, kind: str, step: int, *, overwrite: bool = False, mark: str = "", **more: object
) -> Path:
    folder = root.begin(kind, step, overwrite=overwrite)
    files = {"weights": f"{kind} {step} {mark}", "inner/rest": "rest"}
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    sizes = {name: len(text) for name, text in files.items()}
    return root.publish(kind, step, manifest(kind, step, sizes, **more), overwrite=overwrite)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def steps(listed: list[_native.Checkpoint]) -> list[tuple[str, int]]:
    return [(entry["kind"], entry["step"]) for entry in listed]


def test_what_is_published_is_listed_and_pointed_to(root: Root) -> None:
    extra = {"consumed": 2**70, "loss": 0.1, "names": ["ä"]}
    first = save(root, "dcp", 10, extra=extra, tag="snapshot", world_size=4)
    second = save(root, "hf", 20)
    assert first == root.path / "dcp-10"
    assert (first / "weights").read_text() == "dcp 10 "
    assert names(root.path) == [".owner", "checkpoints.json", "dcp-10", "dcp-latest", "hf-20", "hf-latest"]
    assert os.readlink(root.path / "hf-latest") == "hf-20"
    assert root.list() == [
        {
            "kind": "dcp",
            "step": 10,
            "path": first,
            "tag": "snapshot",
            "bytes": 11,
            "world_size": 4,
            "extra": extra,
        },
        {
            "kind": "hf",
            "step": 20,
            "path": second,
            "tag": None,
            "bytes": 10,
            "world_size": 1,
            "extra": None,
        },
    ]
    assert (root.latest("dcp"), root.latest("hf")) == (first, second)
    registry = json.loads((root.path / "checkpoints.json").read_text())
    assert registry["format_version"] == 1
    assert [(entry["folder"], entry["extra"]) for entry in registry["checkpoints"]] == [
        ("dcp-10", extra),
        ("hf-20", None),
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
    with pytest.raises(StepExistsError, match="hf-20 is there already") as caught:
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
    calls: list[Callable[[], object]] = [
        lambda: root.begin(kind, 1, overwrite=False),
        lambda: root.publish(kind, 1, "{}", overwrite=False),
        lambda: root.abandon(kind, 1),
        lambda: root.remove(kind, 1),
        lambda: root.latest(kind),
        lambda: root.read_lock(kind, 1),
    ]
    for call in calls:
        with pytest.raises(InvalidInputError, match=f"kind is {json.dumps(kind)}"):
            call()


def test_a_folder_that_is_not_what_its_manifest_says_is_not_published(root: Root) -> None:
    folder = root.begin("hf", 1, overwrite=False)
    (folder / "short").write_bytes(b"x")
    (folder / "stranger").write_bytes(b"x")
    (folder / "link").symlink_to("short")
    with pytest.raises(
        CorruptCheckpointError, match="short has 1 bytes in the place of 2, and 3 more"
    ) as caught:
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


def test_a_step_is_overwritten_whole(root: Root) -> None:
    save(root, "hf", 1, mark="old", extra={"save": 1})
    path = save(root, "hf", 1, mark="new", overwrite=True, extra={"save": 2})
    assert (path / "weights").read_text() == "hf 1 new"
    assert [entry["extra"] for entry in root.list()] == [{"save": 2}]
    assert names(root.path) == [".owner", "checkpoints.json", "hf-1", "hf-latest"]


def test_what_is_newest_or_read_stays(root: Root) -> None:
    for step in (1, 2, 3):
        save(root, "hf", step)
    with pytest.raises(CheckpointInUseError, match="hf-3 stays: it is the newest"):
        root.remove("hf", 3)
    lock = root.read_lock("hf", 2)
    assert lock.path == root.path / "hf-2"
    with pytest.raises(CheckpointInUseError, match="hf-2 stays: it is being read"):
        root.remove("hf", 2)
    with pytest.raises(CheckpointInUseError, match="being read"):
        root.discard_after(1)
    assert steps(root.list()) == [("hf", 1), ("hf", 2), ("hf", 3)]
    root.remove("hf", 1)
    lock.close()
    lock.close()
    root.remove("hf", 2)
    assert names(root.path) == [".owner", "checkpoints.json", "hf-3", "hf-latest"]
    with pytest.raises(NotFoundError, match=r"there is no checkpoint .*hf-2"):
        root.remove("hf", 2)
    with pytest.raises(NotFoundError):
        root.read_lock("hf", 2)
    newest = root.read_lock("hf", 3)
    with pytest.raises(CheckpointInUseError, match="being read"):
        save(root, "hf", 3, overwrite=True, mark="again")
    newest.close()
    root.abandon("hf", 3)
    save(root, "hf", 3, overwrite=True, mark="again")


def test_junk_of_any_length_in_the_owners_file_keeps_nobody_out(tmp_path: Path) -> None:
    for length in (1, 100, 511, 512, 513, 600, 70_000):
        (tmp_path / ".owner").write_bytes(b"x" * length)
        for step in (1, 2):
            root = Root(tmp_path, wait_seconds=0)
            save(root, "hf", step, overwrite=True)
            if step == 2:
                root.remove("hf", 1)
            root.close()
            assert (tmp_path / ".owner").stat().st_size == 512
        shutil.rmtree(tmp_path / "hf-2")


def test_an_opening_removes_the_marks_of_killed_writers_and_of_no_living_one(tmp_path: Path) -> None:
    status = tmp_path.stat()
    dead, living, other = (
        Path("/dev/shm", f"tundish-writer-{os.geteuid()}-{status.st_dev:x}-{number:x}-{slot}")
        for number, slot in ((status.st_ino, 7), (status.st_ino, 8), (1 << 62, 0))
    )
    try:
        with living.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            dead.touch()
            other.touch()
            Checkpointer(tmp_path, on_failure="raise").close()
            assert (dead.exists(), living.exists(), other.exists()) == (False, True, True)
        _native.sweep_writer_slots(tmp_path)
        assert not living.exists()
    finally:
        for path in (dead, living, other):
            path.unlink(missing_ok=True)


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


def test_what_is_newer_is_set_aside_after_a_rollback(root: Root) -> None:
    for step in (100, 200):
        save(root, "dcp", step)
        save(root, "hf", step)
    (root.path / "hf-150").mkdir()
    root.begin("hf", 300, overwrite=False)
    with pytest.raises(CheckpointInUseError, match="being written"):
        root.discard_after(100)
    root.abandon("hf", 300)
    aside = ["discarded-dcp-200", "discarded-hf-200", "discarded-hf-150"]
    assert root.discard_after(100) == [root.path / name for name in aside]
    assert root.discard_after(100) == []
    assert steps(root.list()) == [("dcp", 100), ("hf", 100)]
    assert os.readlink(root.path / "hf-latest") == "hf-100"
    assert (root.path / "discarded-hf-200" / "weights").read_text() == "hf 200 "
    save(root, "hf", 200, mark="again")
    assert root.discard_after(0)[0].name == "discarded-hf-200-2"
    assert root.latest("hf") is None
    assert not (root.path / "hf-latest").is_symlink()


def test_what_a_person_did_is_coped_with(root: Root) -> None:
    for step in (1, 2, 3, 4):
        save(root, "hf", step)
    (root.path / "hf-4").rename(root.path / "hf-4-good")
    (root.path / "hf-3").rename(root.path / "hf-33")
    (root.path / "hf-1" / "weights").unlink()
    (root.path / "checkpoints.json").write_text('{"checkpoints": [')
    assert steps(root.list()) == [("hf", 1), ("hf", 2)]
    assert root.latest("hf") == root.path / "hf-2"
    with pytest.raises(CheckpointInUseError):
        root.remove("hf", 2)
    root.close()
    again = Root(root.path, wait_seconds=0)
    recovered = again.recovered
    assert sorted(recovered["repaired"]) == [
        str(again.path / name) for name in ("checkpoints.json", "hf-latest")
    ]
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
    for name in ("checkpoints.json", "hf-latest", ".owner"):
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
    files = (path / "tundish.json", root.path / "checkpoints.json", root.path / ".owner")
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


# ---- Who owns it ----

OWNER = """
import sys
from tundish import _native
root = _native.CheckpointRoot(sys.argv[1], wait_seconds=0)
root.begin("hf", 1, overwrite=False)
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def started(program: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_root_has_one_owner(root: Root) -> None:
    with pytest.raises(RootInUseError, match="this very process") as caught:
        Root(root.path, wait_seconds=30)
    assert isinstance(caught.value, BlockingIOError)
    # Looking at the lock did not lose it.
    refused = f"""
import sys
from tundish import _native
from tundish.errors import RootInUseError
try:
    _native.CheckpointRoot(sys.argv[1], wait_seconds=0.2)
except RootInUseError as error:
    print("ready", flush=True)
    assert f"process {os.getpid()} on host {os.uname().nodename}" in str(error), error
"""
    with started(refused, root.path) as other:
        other.communicate()
        assert other.returncode == 0
    save(root, "hf", 1)


def test_the_root_of_a_killed_owner_is_taken_over_at_once(tmp_path: Path) -> None:
    with started(OWNER, tmp_path) as owner:
        with pytest.raises(RootInUseError, match=f"process {owner.pid} on host"):
            Root(tmp_path, wait_seconds=0)
        owner.kill()
        owner.wait()
        begun = time.monotonic()
        root = Root(tmp_path, wait_seconds=5)
        assert time.monotonic() - begun < 2
    assert root.recovered["removed"] == [str(root.path / ".hf-1.incomplete")]
    root.close()


def test_a_dying_owner_is_waited_for(tmp_path: Path) -> None:
    with started(OWNER, tmp_path) as owner:
        timer = threading.Timer(1.0, owner.kill)
        timer.start()
        begun = time.monotonic()
        root = Root(tmp_path, wait_seconds=60)
        assert 0.9 < time.monotonic() - begun < 20
        timer.join()
    root.close()


def test_an_owner_that_copies_its_root_away_keeps_it(tmp_path: Path) -> None:
    """Closing any descriptor of a file costs a process its lock on it; the record still names a process that lives."""
    copying = "import shutil\nshutil.copytree(sys.argv[1], sys.argv[2])\n"
    with started(
        OWNER.replace("print(", copying + "print(", 1), tmp_path / "root", tmp_path / "copy"
    ) as owner:
        with pytest.raises(RootInUseError, match=f"process {owner.pid} "):
            Root(tmp_path / "root", wait_seconds=0)
        # The copy is nobody's to keep: its owner is none of it.
        owner.kill()
        owner.wait()
    Root(tmp_path / "copy", wait_seconds=0).close()


def test_an_orphan_of_a_killed_owner_does_not_keep_the_root(tmp_path: Path) -> None:
    """A data worker made by `fork` outlives a rank that is killed."""
    forking = """
import os, time
if os.fork() == 0:
    with open(sys.argv[2], "w") as file:
        file.write(f"{os.getpid()}.")
    time.sleep(60)
"""
    pid_file = tmp_path / "pid"
    with started(OWNER.replace("print(", forking + "print(", 1), tmp_path / "root", pid_file) as owner:
        while not pid_file.exists() or not pid_file.read_text().endswith("."):
            time.sleep(0.01)
        orphan = int(pid_file.read_text().rstrip("."))
        try:
            owner.kill()
            # Its output is kept open by the orphan.
            os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
            root = Root(tmp_path / "root", wait_seconds=5)
            # The orphan still holds the folder of the dead attempt, which nobody can tell from a live writer.
            assert root.recovered["live"] == [str(root.path / ".hf-1.incomplete")]
            save(root, "hf", 1)
            root.close()
        finally:
            os.kill(orphan, signal.SIGKILL)


def test_a_forked_child_leaves_its_parent_s_root_alone(tmp_path: Path) -> None:
    forking = """
import os
from tundish.errors import StorageError
child = os.fork()
if child == 0:
    code = 1
    try:
        root.close()
        root.begin("hf", 2, overwrite=False)
    except StorageError as error:
        code = 0 if "forked" in str(error) else 2
    finally:
        del root
        os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
root.abandon("hf", 1)
root.begin("hf", 3, overwrite=False)
"""
    with (
        started(OWNER.replace("print(", forking + "print(", 1), tmp_path),
        pytest.raises(RootInUseError),
    ):
        Root(tmp_path, wait_seconds=0)


def test_waiting_lets_other_threads_and_ctrl_c_through(tmp_path: Path) -> None:
    waiting = """
import sys, threading, time
from tundish import _native
ticks = []
threading.Thread(target=lambda: [ticks.append(time.sleep(0.01)) for _ in range(10**6)], daemon=True).start()
threading.Timer(0.3, lambda: print("ready", flush=True)).start()
try:
    _native.CheckpointRoot(sys.argv[1], wait_seconds=60)
except KeyboardInterrupt:
    assert len(ticks) > 10, ticks
    print("interrupted", flush=True)
"""
    with started(OWNER, tmp_path), started(waiting, tmp_path) as other:
        begun = time.monotonic()
        other.send_signal(signal.SIGINT)
        assert other.stdout is not None
        assert other.stdout.readline() == "interrupted\n"
        assert time.monotonic() - begun < 2
