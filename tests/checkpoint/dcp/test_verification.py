"""All ranks that load a DCP checkpoint verify it together: damage found by one rank counts for all."""

from __future__ import annotations

import ctypes
import logging
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from support.checkpoint.dcp_states import run
from support.distributed.rank_processes import Job, Line, outcome
from support.waiting import NOTICED
from torch import distributed

from tundish.checkpoint import Checkpointer, load_dcp
from tundish.checkpoint.dcp.format import shard_name
from tundish.checkpoint.dcp.verify import files_of_reader
from tundish.checkpoint.root import DiskFolder

MIB = 1 << 20


@given(
    others=some.integers(0, 5),
    count=some.integers(1, 9),
    savers=some.integers(1, 9),
)
def test_every_file_belongs_to_exactly_one_reader(others: int, count: int, savers: int) -> None:
    files = [shard_name(saver) for saver in range(savers)] + [f"other-{number}" for number in range(others)]
    parts = [files_of_reader(index, count, files, savers) for index in range(count)]
    assert sorted(name for part in parts for name in part) == sorted(files)
    shards = [sum(name.endswith(".distcp") for name in part) for part in parts]
    assert max(shards) <= -(-savers // count)


def test_a_rank_verifies_what_it_loads_next() -> None:
    names = [f"__{number}_0.distcp" for number in range(4)]
    extras = [f"rank_extra-{number:05d}.json" for number in range(4)]
    assert [files_of_reader(index, 4, names + extras, 4) for index in range(4)] == [
        {name, extra} for name, extra in zip(names, extras, strict=True)
    ]
    # If few ranks saved, their files go to readers far apart.
    parts = [files_of_reader(index, 16, names, 4) for index in range(16)]
    assert [index for index, part in enumerate(parts) if part] == [0, 4, 8, 12]


class Watched:
    """A read lock whose verifications are recorded and may be replaced."""

    def __init__(self, lock: Any, verify: Callable[[Any, set[str], bool], Any]) -> None:
        self._lock, self._verify = lock, verify

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)

    def verify_files(self, names: set[str], *, every_byte: bool) -> Any:
        return self._verify(self._lock, names, every_byte)


def watch(verify: Callable[[Any, set[str], bool], Any]) -> None:
    whole = DiskFolder.__enter__
    DiskFolder.__enter__ = lambda folder: Watched(whole(folder), verify)  # type: ignore[method-assign]


def save(root: Path, *steps: int, **options: Any) -> dict[str, Any]:
    """Collective: save checkpoints with a tensor of each rank; returns a state dict to load into."""
    rank = distributed.get_rank()
    with Checkpointer(root, on_failure="raise", timeout=60) as checkpointer:
        for step in steps:
            state = {f"mine-{rank}": torch.full((MIB,), float(step)), "note": "text"}
            checkpointer.save_dcp(step, state, rank_extra={"step": step}, blocking=True, **options)
    return {f"mine-{rank}": torch.zeros(MIB)}


def logged() -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tundish.checkpoint").addHandler(handler)
    return messages


def verify_together(rank: int, line: Line) -> None:
    (root,) = line.hear()
    state = save(root, 1)
    seen: list[tuple[set[str], bool]] = []

    def note(lock: Any, names: set[str], every_byte: bool) -> Any:
        seen.append((names, every_byte))
        return lock.verify_files(names, every_byte=every_byte)

    watch(note)
    with Checkpointer(root, on_failure="raise", timeout=60) as checkpointer:
        for arguments in ({}, {"step": 1}, {"step": 1, "verify": False}):
            checkpointer.load_dcp(state, **arguments)
    assert state[f"mine-{rank}"][0] == 1
    line.say(seen)


def test_each_rank_verifies_its_part_of_the_files(tmp_path: Path) -> None:
    root = tmp_path / "root"
    said = [seen for (seen,) in run(verify_together, 3, tmp_path / "job", root)]
    files = sorted(path.name for path in (root / "dcp-1").iterdir() if path.name != "tundish.json")
    assert len(files) == 7
    for number, every_byte in enumerate([True, True, False]):
        shares = [seen[3 * number] for seen in said]
        assert sorted(name for names, _ in shares for name in names) == files
        assert [seen_every_byte for _, seen_every_byte in shares] == [every_byte] * 3
        for rank, (names, _) in enumerate(shares):
            assert f"__{rank}_0.distcp" in names
            read = said[rank][3 * number + 1 : 3 * number + 3]
            assert read == [({".metadata"}, False), ({f"__{rank}_0.distcp"}, False)]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def remove(path: Path) -> None:
    path.unlink()


def load_what_is_damaged(rank: int, line: Line) -> None:
    root, damage, names = line.hear()
    state = save(root, 1, 2, 3)
    messages = logged()
    with Checkpointer(root, on_failure="raise", timeout=60) as checkpointer:
        if rank == 0:
            for step, name in zip((3, 2), names, strict=True):
                globals()[damage](root / f"dcp-{step}" / name)
            (root / "dcp-1" / "notes").mkdir()
            (root / "dcp-1" / "notes" / "mine.txt").write_text("of mine")
        distributed.barrier()
        named = outcome(lambda: checkpointer.load_dcp(state, 3))
        assert not state[f"mine-{rank}"].any()
        _, rank_extras = checkpointer.load_dcp(state)
    assert rank_extras == {one: {"step": 1} for one in range(3)}
    assert (state[f"mine-{rank}"] == 1).all()
    line.say(named, messages)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_found_by_one_rank_makes_all_load_the_checkpoint_before(tmp_path: Path, damage: str) -> None:
    names = "__2_0.distcp", "rank_extra-00001.json"
    said = run(load_what_is_damaged, 3, tmp_path / "job", tmp_path / "root", damage, names)
    for rank, (named, messages) in enumerate(said):
        assert named[0] == ("CorruptCheckpointError" if rank == 0 else "PeerFailedError"), named
        assert names[0] in named[1]
        text = " ".join(messages)
        assert ("the one before is tried" in text) is (rank == 0)
        if rank == 0:
            for step, name in zip((3, 2), names, strict=True):
                (about,) = (one for one in messages if f"step {step} cannot be loaded" in one)
                assert name in about
            assert "files that no save wrote, which are not read: notes/mine.txt" in text


def load_while_one_rank_sees_less(rank: int, line: Line) -> None:
    root, sight = line.hear()
    state = save(root, 1, 2)

    def see(lock: Any, names: set[str], every_byte: bool) -> Any:
        found = lock.verify_files(names, every_byte=every_byte)
        if rank == 2 and lock.path.name == "dcp-2" and every_byte:
            if sight == "fails":
                raise OSError(f"rank {rank} has no disk")
            found += [("__2_0.distcp", "is not as it was", sight == "other bytes")]
        return found

    watch(see)
    messages = logged()
    with Checkpointer(root, on_failure="raise", timeout=60) as checkpointer:
        newest = outcome(lambda: checkpointer.load_dcp(state))
        value = state[f"mine-{rank}"][0].item()
        # The next call finds all ranks in step.
        checkpointer.load_dcp(state, 1)
    line.say(newest, value, messages)


@pytest.mark.parametrize("sight", ["other bytes", "no file", "fails"])
def test_a_file_that_one_rank_cannot_reach_is_not_damage(tmp_path: Path, sight: str) -> None:
    said = run(load_while_one_rank_sees_less, 3, tmp_path / "job", tmp_path / "root", sight)
    for rank, (newest, value, messages) in enumerate(said):
        if sight == "other bytes":
            assert (newest[0], value) == ("", 1.0)
            assert rank or "__2_0.distcp is not as it was (as rank 2 reads it)" in " ".join(messages)
            continue
        assert value == 0
        assert "the one before is tried" not in " ".join(messages)
        own = {"no file": (0, "StorageError"), "fails": (2, "OSError")}[sight]
        assert newest[0] == (own[1] if rank == own[0] else "PeerFailedError")
        assert "rank 2" in newest[1]


def load_copies(rank: int, line: Line) -> None:
    """Each rank sees a copy of its own under one path, like nodes with checkpoints on their own disks."""
    root, damaged = line.hear()
    state = save(root, 1)
    mine = {name: torch.zeros_like(state[f"mine-{rank}"]) for name in ("mine-0", "mine-1", "mine-2")}
    copy = root.parent / f"copy-{rank}"
    shutil.copytree(root, copy, copy_function=shutil.copy2)
    distributed.barrier()
    assert not ctypes.CDLL(None).unshare(_NEW_MOUNTS)
    for mount in (["--make-rprivate", "/"], ["--bind", str(copy), str(root)]):
        subprocess.run(["mount", *mount], check=True)
    load_dcp(mine, root / "dcp-1", timeout=60)
    assert all((mine[f"mine-{one}"] == 1).all() for one in range(3))
    owner, damage, name = damaged
    if rank == owner:
        globals()[damage](root / "dcp-1" / name)
    distributed.barrier()
    mine = {name: torch.zeros_like(value) for name, value in mine.items()}
    line.say(outcome(lambda: load_dcp(mine, root / "dcp-1", timeout=60)))
    assert not any(value.any() for value in mine.values())


# CLONE_NEWNS
_NEW_MOUNTS = 0x00020000


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
@pytest.mark.parametrize(("owner", "name"), [(1, "__2_0.distcp"), (2, "__0_0.distcp"), (0, ".metadata")])
def test_every_copy_is_verified(tmp_path: Path, damage: str, owner: int, name: str) -> None:
    said = run(load_copies, 3, tmp_path / "job", tmp_path / "root", (owner, damage, name))
    for rank, ((kind, text, _),) in enumerate(said):
        # A file that is not all there may be on its way to that node, which the first one can tell of its own alone.
        expected = "CorruptCheckpointError" if damage == "flip" or owner == 0 else "StorageError"
        assert kind == (expected if rank == 0 else "PeerFailedError"), text
        assert name in text


def verify_unlike_the_others(rank: int, line: Line) -> None:
    (root,) = line.hear()
    state = save(root, 1)
    line.say(outcome(lambda: load_dcp(state, root / "dcp-1", verify=rank != 1, timeout=60)))
    assert not state[f"mine-{rank}"].any()


def test_ranks_that_disagree_about_verification_are_refused(tmp_path: Path) -> None:
    for kind, text, _ in (
        said for (said,) in run(verify_unlike_the_others, 3, tmp_path / "job", tmp_path / "root")
    ):
        assert kind == "PeerFailedError", text
        assert "every byte" in text
        assert "sizes" in text


def verify_beside_the_dead(rank: int, line: Line) -> None:
    (root,) = line.hear()
    state = save(root, 1)

    def wait(lock: Any, names: set[str], every_byte: bool) -> Any:
        if rank == 1:
            line.say("verifying")
            line.hear()
        return lock.verify_files(names, every_byte=every_byte)

    watch(wait)
    with Checkpointer(root, on_failure="raise", timeout=60) as checkpointer:
        line.say(outcome(lambda: checkpointer.load_dcp(state)))
        # The teardown of the process groups would wait for the dead rank.
        line.hear()


def test_a_rank_that_dies_while_it_verifies_fails_all(tmp_path: Path) -> None:
    with Job(verify_beside_the_dead, 3, tmp_path) as job:
        job.tell_all((tmp_path / "root",))
        assert job.hear(1) == ("verifying",)
        job.signal(1, signal.SIGKILL)
        started = time.monotonic()
        for rank in (0, 2):
            ((kind, text, failed),) = job.hear(rank)
            assert (kind, failed) == ("PeerFailedError", 1), text
        assert time.monotonic() - started < NOTICED
