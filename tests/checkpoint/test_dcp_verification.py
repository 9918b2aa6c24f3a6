"""A DCP checkpoint is verified by all ranks that load it, a part by each: what one of them finds counts for all."""

from __future__ import annotations

import ctypes
import itertools
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
from support.distributed.rank_processes import Job, Line, outcome
from torch import distributed

from dcp_worlds import run
from tundish.checkpoint import Checkpointer, load_dcp
from tundish.checkpoint.dcp import opened, shares
from tundish.checkpoint.dcp.shares import cuts_of, share_of

MIB = 1 << 20


@given(
    sizes=some.lists(some.integers(0, 50 * MIB), max_size=40),
    count=some.integers(1, 9),
    savers=some.integers(1, 9),
    is_summed=some.booleans(),
)
def test_every_byte_is_one_ranks_and_none_has_much_more_than_its_part(
    sizes: list[int], count: int, savers: int, is_summed: bool
) -> None:
    names = [f"__{number}_0.distcp" for number in range(20)] + [f"other-{number}" for number in range(20)]
    checksum = "crc64nvme:0123456789abcdef" if is_summed else None
    files = [(name, size, checksum) for name, size in zip(names, sizes, strict=False)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "_LEAST_PART", 8 * MIB)
        cuts = cuts_of(count, files)
        dealt = [share_of(index, count, files, savers, cuts) for index in range(count)]
    whole = sorted(name for share in dealt for name in share.whole)
    assert whole == sorted(name for name, _, _ in files if name not in cuts)
    parts = sorted(part for share in dealt for part in share.parts)
    assert parts == sorted(part for pieces in cuts.values() for part in pieces)
    for name, size, _ in files:
        starts = [0, *itertools.accumulate(part[2] for part in cuts.get(name, []))]
        assert not starts[1:] or starts[-1] == size
        assert [part[1] for part in cuts.get(name, [])] == starts[:-1]
    # To open a file counts as a mebibyte.
    sized = {name: size for name, size, _ in files}
    work = [
        sum(sized[name] + MIB for name in share.whole) + sum(size + MIB for _, _, size in share.parts)
        for share in dealt
    ]
    even = max(8 * MIB, sum(sizes) / count + 1)
    largest = max([even, *(size for name, size in sized.items() if name not in cuts)]) + MIB
    assert max(work) <= sum(work) / count + largest + 1
    # With checksums no file holds up the rest.
    assert not is_summed or largest <= even + MIB


def names_of(index: int, count: int, files: list[tuple[str, int, str | None]], savers: int) -> set[str]:
    return share_of(index, count, files, savers, {}).whole


def test_a_rank_verifies_what_it_loads_next() -> None:
    names = [f"__{number}_0.distcp" for number in range(4)]
    extras = [f"rank_extra-{number:05d}.json" for number in range(4)]
    files: list[tuple[str, int, str | None]] = [(name, 50 * MIB, None) for name in names]
    small: list[tuple[str, int, str | None]] = [(name, 200, None) for name in extras]
    assert [names_of(index, 4, files + small, 4) for index in range(4)] == [
        {name, extra} for name, extra in zip(names, extras, strict=True)
    ]
    # Of few files each goes to another node.
    dealt = [names_of(index, 16, files, 4) for index in range(16)]
    assert [index for index, share in enumerate(dealt) if share] == [0, 4, 8, 12]


class Watched:
    """A read lock whose verifications are seen, and may be others than they are."""

    def __init__(self, lock: Any, verify: Callable[[Any, set[str], bool], Any]) -> None:
        self._lock, self._verify = lock, verify

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)

    def verify_files(self, names: set[str], *, every_byte: bool) -> Any:
        return self._verify(self._lock, names, every_byte)


def watch(verify: Callable[[Any, set[str], bool], Any]) -> None:
    read_lock = opened.read_lock
    opened.read_lock = lambda path: Watched(read_lock(path), verify)  # type: ignore[assignment,return-value]


def save(root: Path, *steps: int, **options: Any) -> dict[str, Any]:
    """Save checkpoints in which each rank has a tensor of its own; what they are loaded into. Collective."""
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


def test_each_rank_verifies_a_part_of_the_files(tmp_path: Path) -> None:
    root = tmp_path / "root"
    said = [seen for (seen,) in run(verify_together, 3, tmp_path / "job", root)]
    files = sorted(path.name for path in (root / "dcp-1").iterdir() if path.name != "tundish.json")
    assert len(files) == 7
    for number, every_byte in enumerate([True, True, False]):
        # The others of a load are at what the rank reads.
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
def test_what_any_rank_finds_damaged_means_the_one_before_on_all(tmp_path: Path, damage: str) -> None:
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


def load_a_large_file_together(rank: int, line: Line) -> None:
    """One of the ranks saved nearly everything: all read its file, a part each."""
    (root,) = line.hear()
    shares._LEAST_PART = MIB
    state = {f"mine-{rank}": torch.full((MIB if rank == 1 else 1,), 7.0)}
    with Checkpointer(root, on_failure="raise", timeout=60) as checkpointer:
        checkpointer.save_dcp(1, state, blocking=True)
        large = root / "dcp-1" / "__1_0.distcp"
        whole = large.read_bytes()
        assert len(cuts_of(3, [(large.name, len(whole), "")])[large.name]) == 3
        for at in (0, len(whole) // 2, len(whole) - 1, None):
            distributed.barrier()
            if rank == 0:
                large.write_bytes(whole[:-1] if at is None else whole)
            if rank == 0 and at is not None:
                with large.open("r+b") as file:
                    file.seek(at)
                    file.write(bytes([whole[at] ^ 1]))
            distributed.barrier()
            line.say(*outcome(lambda: checkpointer.load_dcp(state, 1)))
        distributed.barrier()
        if rank == 0:
            large.write_bytes(whole)
        distributed.barrier()
        line.say(*outcome(lambda: checkpointer.load_dcp(state, 1)))


def test_a_large_file_is_verified_by_all_ranks_and_each_of_its_bytes_counts(tmp_path: Path) -> None:
    with Job(load_a_large_file_together, 3, tmp_path / "job") as job:
        for rank in range(3):
            job.tell(rank, (tmp_path / "root",))
        for what in (*["has the checksum crc64nvme"] * 3, "bytes in the place of"):
            said = job.hear_all()
            kinds = [kind for kind, _, _ in said]
            assert kinds == ["CorruptCheckpointError", "PeerFailedError", "PeerFailedError"], said
            assert "__1_0.distcp has" in said[0][1] and what in said[0][1], said
        assert job.hear_all() == [("", "", None)] * 3
        job.expect_end()


def load_beside_other_eyes(rank: int, line: Line) -> None:
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
def test_what_one_rank_cannot_reach_is_its_failure_and_no_damage(tmp_path: Path, sight: str) -> None:
    said = run(load_beside_other_eyes, 3, tmp_path / "job", tmp_path / "root", sight)
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
    """Each rank sees under one path a copy of its own, as nodes do that keep checkpoints on their own disks."""
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


def test_a_part_that_a_rank_would_not_verify_is_told_of(tmp_path: Path) -> None:
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
        # What is left of the groups waits for the dead in its own ends.
        line.hear()


def test_a_rank_that_dies_while_it_verifies_fails_all(tmp_path: Path) -> None:
    with Job(verify_beside_the_dead, 3, tmp_path) as job:
        for rank in range(3):
            job.tell(rank, (tmp_path / "root",))
        assert job.hear(1) == ("verifying",)
        job.signal(1, signal.SIGKILL)
        started = time.monotonic()
        for rank in (0, 2):
            ((kind, text, failed),) = job.hear(rank)
            assert (kind, failed) == ("PeerFailedError", 1), text
        assert time.monotonic() - started < 5
