"""A DCP checkpoint that several ranks read and verify together.

Invariants: all ranks read the same checkpoint, and it is not removed or replaced until they are done. Each file is
verified by one rank. Where nodes have copies of their own, every rank verifies its whole copy. Damage found by one rank
counts for all. A file that one rank alone cannot reach is that rank's failure and says nothing about the checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tundish import _native
from tundish.checkpoint.dcp.format import METADATA, rank_extra_name, shard_name
from tundish.checkpoint.readonly import warn_without_checksums
from tundish.checkpoint.root import (
    MANIFEST,
    DiskFolder,
    FileDamage,
    Published,
    RecordedFile,
    format_steps,
    is_file,
)
from tundish.distributed import Voter, same_arguments
from tundish.errors import CorruptCheckpointError, NotFoundError, StateMismatchError, StorageError

_logger = logging.getLogger("tundish.checkpoint")

# More ranks than any job has. A larger number in a manifest means damage.
_MOST_RANKS = 1 << 20
# Damaged files that a rank reports to the first one by name.
_MOST_REPORTED = 64

# Locks what is published under a name during a block, again and again.
Lock = Callable[[], contextlib.AbstractContextManager[Published]]


class OpenCheckpoint:
    """A checkpoint on which all ranks of `voter` hold a read lock.

    Attributes:
        published: the locked checkpoint.
        lock: locks it once more.
        step: that it was opened for; None for any.
        extra: the `extra` of its save.
        savers: the number of ranks that saved it.
        files: name, size in bytes and checksum of each file.
        checksum: of the manifest.
    """

    def __init__(
        self, published: Published, lock: Lock, step: int | None, voter: Voter, *, every_byte: bool
    ) -> None:
        described, files, checksum = published.describe()
        self.published = published
        self.lock = lock
        self.step = step
        self.path = published.path
        self.voter = voter
        self._every_byte = every_byte
        self.files: Sequence[RecordedFile] = files
        self.checksum = checksum
        self.extra: dict[str, Any] = {} if described["extra"] is None else described["extra"]
        world_size = described["world_size"]
        if described["kind"] != "dcp":
            raise StateMismatchError(
                f"{self.path} is a checkpoint of kind {described['kind']!r}: load_dcp reads kind 'dcp'"
            )
        if step is not None and described["step"] != step:
            raise self._refused(f"is the checkpoint of step {described['step']}: rename it back")
        if world_size is None or not 0 < world_size <= _MOST_RANKS:
            raise self._refused(f"says that {world_size} ranks saved it")
        if not isinstance(self.extra, dict):
            raise self._refused(f"has an extra that no save writes: {str(self.extra)[:100]}")
        self.savers = world_size

    def _refused(self, what: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self.path} {what}", (MANIFEST,))

    def verify(self) -> CorruptCheckpointError | None:
        """Collective: compare the sizes of all files and, with `every_byte`, their checksums.

        Files that no save wrote, and files without a checksum, are logged.

        Returns:
            The damage, on all ranks or none; only the first rank's error lists all of it.
        """
        voter, what = self.voter, f"verifying {self.path}"
        found: Sequence[FileDamage] = []
        foreign: Sequence[str] = []
        error: BaseException | None = None
        is_alone = self._every_byte and self._are_copies()
        index, count = (0, 1) if is_alone else (voter.index, len(voter.ranks))
        try:
            names = files_of_reader(index, count, (name for name, _, _ in self.files), self.savers)
            found = self.published.verify_files(names, every_byte=self._every_byte)
            if voter.is_first and self._every_byte:
                foreign = self.published.foreign_files()
        except BaseException as caught:  # noqa: BLE001 (the vote raises it again)
            error = caught
        if voter.vote(error, what=what, flag=bool(found)):
            return self._agree_on(found)
        if foreign:
            _logger.warning(
                "%s holds files that no save wrote, which are not read: %s", self.path, "; ".join(foreign)
            )
        if voter.is_first and self._every_byte:
            warn_without_checksums(self.path, [name for name, _, checksum in self.files if checksum is None])
        return None

    def _are_copies(self) -> bool:
        """Collective: whether nodes have copies of their own under this path."""
        what = f"comparing what the ranks see of {self.path.name}"
        own = self.published.copy_id()
        return self.voter.vote(what=what, flag=own != self.voter.broadcast(own, what=what))

    def _agree_on(self, found: Sequence[FileDamage]) -> CorruptCheckpointError:
        voter = self.voter
        reported = json.dumps(sorted(found)[:_MOST_REPORTED])
        reports = voter.gather(reported, what=f"collecting the damage of {self.path}")
        problem = CorruptCheckpointError(
            f"{self.path} is damaged: the error on rank {voter.ranks[0]} names the files"
        )
        with voter.agreed(f"judging the damage of {self.path}"):
            if voter.is_first:
                problem = self._judge([json.loads(report) for report in reports])
        return problem

    def _judge(self, reports: Sequence[Any]) -> CorruptCheckpointError:
        """The damage that the ranks report; raises `StorageError` if one rank alone cannot reach a file."""
        voter = self.voter
        damaged: dict[str, str] = {}
        unreached: dict[str, tuple[int, str]] = {}
        for rank, named in zip(voter.ranks, reports, strict=True):
            for name, problem, is_changed in named:
                if is_changed or rank == voter.rank:
                    damaged[name] = problem if rank == voter.rank else f"{problem} (as rank {rank} reads it)"
                else:
                    unreached[name] = rank, problem
        # It may be missing or unreadable on that rank's node alone.
        again = self.published.verify_files(set(unreached), every_byte=self._every_byte)
        damaged |= {name: problem for name, problem, _ in again}
        if not damaged:
            name, (rank, problem) = min(unreached.items())
            raise StorageError(
                errno.EIO,
                f"on rank {rank} {name} {problem}, but not on rank {voter.rank}: the checkpoint is whole, so check the "
                "file system of that node",
                str(self.path / name),
            )
        return self._damaged(damaged)

    def _damaged(self, problems: Mapping[str, str]) -> CorruptCheckpointError:
        names = tuple(sorted(problems))
        more = f", and {len(names) - 1} more" if len(names) > 1 else ""
        return CorruptCheckpointError(
            f"{self.path} does not hold what its manifest says: {names[0]} {problems[names[0]]}{more}", names
        )

    def check(self, names: set[str]) -> None:
        """Check, on this rank alone, that these files exist with the sizes they were saved with.

        Raises:
            CorruptCheckpointError: one does not.
        """
        found = self.published.verify_files(names, every_byte=False)
        if found:
            raise self._damaged({name: problem for name, problem, _ in found})


def files_of_reader(index: int, count: int, files: Iterable[str], savers: int) -> set[str]:
    """The files that reader `index` of `count` verifies, of a checkpoint that `savers` ranks saved.

    A reader verifies the files of the saver in its place, because it mostly loads them next, from the page cache of its
    node. Files of few savers go to readers far apart. The first reader also verifies the files that belong to no saver.
    """
    reader_of = {}
    for saver in range(savers):
        reader = saver * count // savers
        reader_of[shard_name(saver)] = reader_of[rank_extra_name(saver)] = reader
    return {name for name in files if reader_of.get(name, 0) == index}


@contextlib.contextmanager
def open_checkpoint(
    lock: Lock, name: str, *, step: int | None, every_byte: bool, voter: Voter
) -> Iterator[OpenCheckpoint]:
    """Collective: open a checkpoint; it does not change during the block.

    Args:
        lock: locks it.
        name: of the checkpoint, for messages.
        step: that it must have; None accepts any.
        every_byte: verify checksums; else only the sizes of the files.
        voter: of the ranks that read it.
    """
    with contextlib.ExitStack() as stack:
        checked = "every byte" if every_byte else "sizes"
        same = same_arguments(folder=name, verified=checked)
        error: BaseException | None = None
        try:
            published = stack.enter_context(lock())
            checkpoint = OpenCheckpoint(published, lock, step, voter, every_byte=every_byte)
            # Another checkpoint may have taken the name between two ranks' calls.
            same = same_arguments(folder=name, verified=checked, checksum=checkpoint.checksum)
        except BaseException as caught:  # noqa: BLE001 (the vote raises it again)
            error = caught
        voter.vote(error, what=f"opening {name}", same=same)
        yield checkpoint


def lock_folder(path: Path) -> DiskFolder:
    """Lock the checkpoint at `path`, in whatever root.

    Raises:
        NotFoundError: there is none, or it is still being written.
    """
    if path.name.startswith(".") or path.is_symlink() or not is_file(path / MANIFEST):
        raise NotFoundError(errno.ENOENT, f"{path} {_why_none(path)}", str(path))
    return DiskFolder(_native.CheckpointReadLock(path))


def _why_none(path: Path) -> str:
    """Why no checkpoint can be loaded from `path`, and what to do."""
    if steps := _dcp_steps(path):
        return f"is a root, not a checkpoint: give {path / f'dcp-{steps[-1]}'} ({format_steps(steps)})"
    if path.is_symlink():
        return "is a link: give the folder that it points to"
    others = format_steps(_dcp_steps(path.parent))
    if not path.exists():
        return f"does not exist: give the path of a DCP checkpoint ({others})"
    if path.name.startswith("."):
        return f"is a save that is under way or was cut short: give a published checkpoint ({others})"
    if is_file(path / METADATA):
        return (
            f"has no {MANIFEST}: torch saved it by itself, so load it with torch.distributed.checkpoint.load"
        )
    return f"is no checkpoint of tundish, since it has no {MANIFEST}: give the path of a DCP checkpoint ({others})"


def _dcp_steps(root: Path) -> list[int]:
    """The steps of the DCP checkpoints in a folder, ascending; none if it cannot be read."""
    try:
        names = [path.name for path in root.glob("dcp-*") if is_file(path / MANIFEST)]
    except OSError:
        return []
    steps = (name.removeprefix("dcp-") for name in names)
    return sorted(int(step) for step in steps if step.isascii() and step.isdecimal())
