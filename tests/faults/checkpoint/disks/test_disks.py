"""Two ranks save while their disk fills up or becomes read-only, or the root is removed.

All ranks are told, what was published before is untouched, nothing is left behind, and as soon as the disk is as it
was before the next save succeeds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.checkpoint.rank_commands import (
    SAVED_BYTES,
    answer,
    assert_fine,
    assert_saved,
    begin_and_hold,
    each,
    end,
    obey,
    save,
    tell,
)
from support.distributed.rank_processes import Job

from tundish._native import staging_stats
from tundish.checkpoint import Checkpointer
from tundish.errors import CorruptCheckpointError, StorageError

NOBODY = 65534
DISK_BYTES = 10 * SAVED_BYTES


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", path], check=True)
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


Damage = Callable[[Path], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def full(root: Path) -> Iterator[None]:
    ballast = root.with_name("ballast")
    status = os.statvfs(root)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize)
    yield
    ballast.unlink()


@contextlib.contextmanager
def read_only(root: Path) -> Iterator[None]:
    """As a disk is that the kernel found errors on; what is open for writing stays so."""
    subprocess.run(["mount", "--bind", root, root], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", root], check=True)
    yield
    subprocess.run(["umount", "--lazy", root], check=True)


@contextlib.contextmanager
def moved(root: Path) -> Iterator[None]:
    elsewhere = root.rename(root.with_name("elsewhere"))
    yield
    elsewhere.rename(root)


@contextlib.contextmanager
def forbidden(root: Path) -> Iterator[None]:
    os.chown(root, NOBODY, NOBODY)
    yield
    os.chown(root, 0, 0)


@pytest.mark.parametrize("damage", [full, read_only, moved, forbidden])
def test_a_disk_that_fails_a_save_fails_it_on_all_ranks_and_no_later_one(disk: Path, damage: Damage) -> None:
    root = disk / "root"
    expected: dict[str, list[int]] = {}
    with Job(obey, 2, disk) as job:
        each(job, "give_up_power")
        assert_fine(each(job, "open", root))
        for kind in ("hf", "dcp"):
            save(job, kind, 1)
            begin_and_hold(job, kind, 2)
            with damage(root):
                each(job, "let_go")
                for error, text, _ in each(job, "result", kind, 2):
                    assert error, "a save without a disk"
                    assert str(root) in text
                assert all(told for told in each(job, "failed"))
            save(job, kind, 3)
            expected[kind] = [1, 3]
        assert_fine(each(job, "close"))
        assert_fine(each(job, "open", root))
        assert not [name for name in os.listdir(root) if name.startswith(".") and name != ".owner"]
        assert_fine(each(job, "close"))
        end(job)
    assert_saved(root, dict(sorted(expected.items())))


def test_a_root_that_is_removed_ends_saving_there_and_can_be_made_again(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Job(obey, 2, tmp_path) as job:
        assert_fine(each(job, "open", root))
        for kind in ("hf", "dcp"):
            begin_and_hold(job, kind, 2)
            shutil.rmtree(root)
            each(job, "let_go")
            for error, text, _ in each(job, "result", kind, 2):
                assert error
                assert str(root) in text
            for error, text, _ in each(job, "save", kind, 3):
                assert error
                assert str(root) in text
            # Nothing is written into a folder that another made in its place.
            root.mkdir()
            (root / "mine").write_text("mine")
            for error, _, _ in each(job, "save", kind, 4):
                assert error
            assert os.listdir(root) == ["mine"]
            assert_fine(each(job, "close"))
            assert_fine(each(job, "open", root))
            save(job, kind, 1)
        assert_fine(each(job, "close"))
        end(job)
    assert_saved(root, {"dcp": [1]})


def test_roots_that_a_rank_may_not_write_to_are_refused_on_all(disk: Path, tmp_path: Path) -> None:
    root = disk / "root"
    shared = disk / "shared"
    shared.mkdir()
    os.chown(shared, NOBODY, NOBODY)
    root.mkdir()
    with Job(obey, 2, tmp_path) as job:
        with read_only(root):
            for error, text, _ in each(job, "open", root):
                assert error in ("StorageError", "PeerFailedError")
                assert "Read-only file system" in text
        # Another folder on the second rank, under the same name or not.
        for rank, folder in enumerate((root, disk / "other")):
            folder.mkdir(exist_ok=True)
            tell(job, rank, "open", folder)
        assert "rank 1" in answer(job, 0)[1]
        assert "not the same writable folder" in answer(job, 1)[1]
        # Nor one in which another job has saved.
        with Checkpointer(disk / "other", on_failure="raise"):
            pass
        for rank, folder in enumerate((root, disk / "other")):
            tell(job, rank, "open", folder)
        assert all("'owner " in answer(job, rank)[1] for rank in (0, 1))
        # The second rank may look but not write.
        tell(job, 1, "give_up_power")
        answer(job, 1)
        (_, here, _), (error, there, _) = each(job, "open", shared)
        assert "rank 1" in here
        assert error == "StorageError"
        assert str(shared) in there
        assert not [name for name in os.listdir(shared) if name != ".owner"]
        end(job)


@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_too_little_room_is_refused_before_anything_is_staged(disk: Path, kind: str) -> None:
    large = {"w": torch.ones(DISK_BYTES // 4)}
    before = staging_stats()["in_use"]
    with Checkpointer(disk / "root", on_failure="raise") as checkpointer:
        begin = checkpointer.save_hf if kind == "hf" else checkpointer.save_dcp
        begin(1, {"w": torch.ones(9)}, blocking=True)
        with pytest.raises(StorageError, match=r"takes \d+ bytes, and \d+ are free") as refused:
            begin(2, large)
        assert refused.value.errno == 28
        assert staging_stats()["in_use"] == before
        assert sorted(os.listdir(disk / "root")) == [
            ".owner",
            f"{kind}-1",
            f"{kind}-latest",
        ]
        path = begin(2, {"w": torch.ones(10)}, blocking=True).result(0)
        checkpointer.verify(path)


def test_a_root_on_a_full_disk_is_opened_and_loaded_from(disk: Path) -> None:
    root = disk / "root"
    with Checkpointer(root, on_failure="raise") as checkpointer:
        checkpointer.save_dcp(1, {"w": torch.ones(9)}, extra={"step": 1}, blocking=True)
    state = {"w": torch.zeros(9)}
    with full(root), Checkpointer(root, on_failure="raise") as checkpointer:
        assert checkpointer.load_dcp(state) == ({"step": 1}, {0: None})
        assert torch.equal(state["w"], torch.ones(9))
        with pytest.raises(StorageError, match=r"takes \d+ bytes, and 0 are free"):
            checkpointer.save_dcp(2, {"w": torch.ones(9)})
    assert sorted(os.listdir(root)) == [".owner", "dcp-1", "dcp-latest"]


def test_a_leftover_that_nobody_may_look_into_fails_no_save(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Job(obey, 2, tmp_path) as job:
        each(job, "give_up_power")
        assert_fine(each(job, "open", root))
        (root / ".dcp-1.incomplete").mkdir(mode=0)
        save(job, "dcp", 1)
        assert_fine(each(job, "close"))
        end(job)
    assert_saved(root, {"dcp": [1]})


@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_a_save_that_finds_room_only_after_retention_succeeds(disk: Path, kind: str) -> None:
    # Each takes a third of the disk: the third save has room, since the first one went with the second.
    large = {"w": torch.ones(DISK_BYTES // 3 // 4 - MARGIN)}
    with Checkpointer(disk / "root", on_failure="raise", keep_last=1) as checkpointer:
        begin = checkpointer.save_hf if kind == "hf" else checkpointer.save_dcp
        for step in range(1, 6):
            begin(step, large, blocking=True)
        assert [one.step for one in checkpointer.list()] == [5]


MARGIN = 1 << 18


@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_a_save_waits_for_the_room_that_the_one_under_way_makes(
    disk: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    # As above, but the third save is called while the second is written, and the first one is still there.
    large = {"w": torch.ones(DISK_BYTES // 3 // 4 - MARGIN)}
    written, may_go_on = threading.Event(), threading.Event()

    def hold(event: str, _: str, step: int) -> None:
        if (event, step) == ("voted", 2):
            written.set()
            may_go_on.wait(60)

    with Checkpointer(disk / "root", on_failure="raise", keep_last=1, on_event=hold) as checkpointer:
        begin = checkpointer.save_hf if kind == "hf" else checkpointer.save_dcp
        begin(1, {"w": torch.ones(DISK_BYTES // 2 // 4 - MARGIN)}, blocking=True)
        begin(2, large)
        assert written.wait(60)
        threading.Timer(1.0, may_go_on.set).start()
        begin(3, large, blocking=True)
        assert [one.step for one in checkpointer.list()] == [3]
    assert f"save_{kind} of step 3 waits for the saves of steps [2]" in caplog.text


def test_room_for_a_save_under_way_is_not_free(disk: Path) -> None:
    staged, may_go_on = threading.Event(), threading.Event()

    def hold(event: str, *_: object) -> None:
        if event == "staged":
            staged.set()
            may_go_on.wait(60)

    large = {"w": torch.ones(DISK_BYTES * 2 // 3 // 4)}
    with Checkpointer(disk / "root", on_failure="raise", on_event=hold) as checkpointer:
        export = checkpointer.save_hf(1, large)
        assert staged.wait(60)
        threading.Timer(1.0, may_go_on.set).start()
        with pytest.raises(StorageError, match=r"takes \d+ bytes, and \d+ are free"):
            checkpointer.save_dcp(1, large)
        export.result(60)
        assert [one.path.name for one in checkpointer.list()] == ["hf-1"]


@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_a_disk_for_two_checkpoints_keeps_two(disk: Path, kind: str) -> None:
    # The third has room only once the first is gone.
    large = {"w": torch.ones(DISK_BYTES * 2 // 5 // 4)}
    with Checkpointer(disk / "root", on_failure="raise", keep_last=2) as checkpointer:
        begin = checkpointer.save_hf if kind == "hf" else checkpointer.save_dcp
        for step in range(1, 6):
            begin(step, large, blocking=True)
        assert [one.step for one in checkpointer.list()] == [4, 5]
        # The newest is never removed for another.
        checkpointer.protect(4)
        with pytest.raises(StorageError, match=r"takes \d+ bytes, and \d+ are free"):
            begin(6, large)
        assert [one.step for one in checkpointer.list()] == [4, 5]


@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_checkpoints_give_back_their_inodes(disk: Path, kind: str) -> None:
    subprocess.run(["mount", "-o", "remount,nr_inodes=60", disk], check=True)
    with Checkpointer(disk / "root", on_failure="raise") as checkpointer:
        begin = checkpointer.save_hf if kind == "hf" else checkpointer.save_dcp
        for step in (1, 2, 3):
            begin(step, {"w": torch.ones(9)}, blocking=True)
    used = os.statvfs(disk).f_files - os.statvfs(disk).f_favail
    subprocess.run(["mount", "-o", f"remount,nr_inodes={used}", disk], check=True)
    with Checkpointer(disk / "root", on_failure="raise", keep_last=2) as checkpointer:
        begin = checkpointer.save_hf if kind == "hf" else checkpointer.save_dcp
        for step in (4, 5):
            begin(step, {"w": torch.ones(9)}, blocking=True)
        assert [one.step for one in checkpointer.list()] == [4, 5]
        checkpointer.verify(checkpointer.list()[-1].path)
        assert (disk / "root" / f"{kind}-latest").resolve().name == f"{kind}-5"


@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_checkpoints_that_a_killed_run_did_not_remove_make_room(disk: Path, kind: str) -> None:
    large = {"w": torch.ones(DISK_BYTES // 3 // 4 - MARGIN)}
    with Checkpointer(disk / "root", on_failure="raise") as checkpointer:
        begin = checkpointer.save_hf if kind == "hf" else checkpointer.save_dcp
        for step in (1, 2):
            begin(step, large, blocking=True)
    # As after a kill between publication and retention; or of a run that kept more.
    ballast(disk, DISK_BYTES // 3)
    with Checkpointer(disk / "root", on_failure="raise", keep_last=1) as checkpointer:
        begin = checkpointer.save_hf if kind == "hf" else checkpointer.save_dcp
        begin(3, large, blocking=True)
        assert [one.step for one in checkpointer.list()] == [3]
        checkpointer.verify(checkpointer.list()[0].path)


def test_no_room_is_made_if_the_kept_checkpoint_is_damaged(disk: Path) -> None:
    large = {"w": torch.ones(DISK_BYTES // 3 // 4 - MARGIN)}
    with Checkpointer(disk / "root", on_failure="raise") as checkpointer:
        for step in (1, 2):
            newest = checkpointer.save_hf(step, large, blocking=True).result() / "model.safetensors"
    with newest.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    ballast(disk, DISK_BYTES // 3)
    with Checkpointer(disk / "root", on_failure="raise", keep_last=1) as checkpointer:
        with pytest.raises(CorruptCheckpointError, match="hf-2"):
            checkpointer.save_hf(3, large, blocking=True)
        assert [one.step for one in checkpointer.list()] == [1, 2]
        assert not (disk / "root" / ".hf-3.incomplete").exists()


def test_no_room_is_made_from_steps_that_another_rank_protects(disk: Path) -> None:
    root = disk / "root"
    with Job(obey, 2, disk) as job:
        assert_fine(each(job, "open", root))
        for step in (1, 2, 3):
            save(job, "hf", step)
        assert_fine(each(job, "close"))
        ballast(disk, DISK_BYTES - 4 * SAVED_BYTES + MARGIN)
        assert_fine(each(job, "open", root, keep_last=1))
        tell(job, 1, "protect", 1)
        assert_fine([answer(job, 1)])
        save(job, "hf", 4)
        assert_fine(each(job, "close"))
        end(job)
    assert_saved(root, {"hf": [1, 4]})


def ballast(disk: Path, count: int) -> None:
    """Take `count` bytes of the disk."""
    with (disk / "more").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, count)
