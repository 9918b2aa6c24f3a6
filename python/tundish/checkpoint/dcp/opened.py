"""A DCP checkpoint that several ranks read together.

What always holds: it is the same one for all of them, and neither removed nor replaced until they are done; each of its
files is verified by one rank, or a part of it by each of several, and of copies each file of every copy, and what is
found damaged there is damaged for all; what one rank alone cannot reach is that rank's failure and says nothing of the
checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tundish._native import CheckpointReadLock
from tundish.checkpoint.dcp.shares import Part, cuts_of, share_of
from tundish.checkpoint.publish.read_only_root import MANIFEST, held, is_file, tell_unsummed
from tundish.distributed import Voter, compress_list, decompress_list
from tundish.errors import CorruptCheckpointError, NotFoundError, StateMismatchError, StorageError
from tundish.waiting import was_let_go

__all__ = ["Opened", "Readers", "opened", "read_lock"]

_logger = logging.getLogger("tundish.checkpoint")

# More than any job has; what says that more ranks saved is damaged, and not counted through.
_MOST_RANKS = 1 << 20
# Damaged files that a rank tells the first one of by name.
_TOLD = 64

_Damage = tuple[str, str, bool]


@dataclass(kw_only=True)
class Ballot:
    """What a rank brings to a vote: texts that have to be the `same` on all, whether it has a `note`.

    `is_noted`: afterwards, whether any rank had one.
    """

    same: list[str] = field(default_factory=list)
    note: bool = False
    is_noted: bool = False


class Readers:
    """The ranks that load together, as `index` of `count` sees it; they wait `timeout` seconds for each other."""

    def __init__(self, voter: Voter, timeout: float) -> None:
        self.voter = voter
        self.timeout = timeout
        self.index = voter.ranks.index(voter.rank)
        self.count = len(voter.ranks)
        self.is_first = self.index == 0

    def agreed(self, what: str) -> contextlib.AbstractContextManager[None]:
        """As `Voter.agreed`."""
        return self.voter.agreed(what, timeout=self.timeout)

    @contextlib.contextmanager
    def voted(self, what: str) -> Iterator[Ballot]:
        """Collective: a block of fallible work that ends in a vote, to which it brings more than whether it failed."""
        error: BaseException | None = None
        ballot = Ballot(same=[what])
        try:
            yield ballot
        except BaseException as caught:
            if was_let_go(caught):
                raise
            error = caught
        same = ", ".join(ballot.same)
        ballot.is_noted = self.voter.vote(error, what=what, same=same, flag=ballot.note, timeout=self.timeout)


class Opened:
    """A checkpoint that all `readers` hold with their `lock`.

    `extra`: what was saved beside the tensors. `savers`: how many ranks saved it. `files`: name, size and checksum of
    each. `checksum`: of what says all that.
    """

    def __init__(
        self, lock: CheckpointReadLock, step: int | None, readers: Readers, *, every_byte: bool
    ) -> None:
        said, files, checksum = lock.describe()
        self.lock = lock
        self.path = lock.path
        self.readers = readers
        self._every_byte = every_byte
        self.files: Sequence[tuple[str, int, str | None]] = files
        self.checksum = checksum
        self.extra: dict[str, Any] = {} if said["extra"] is None else said["extra"]
        world_size = said["world_size"]
        if said["kind"] != "dcp":
            raise StateMismatchError(
                f"{self.path} is a checkpoint of kind {said['kind']!r}: load_dcp reads kind 'dcp'"
            )
        if step is not None and said["step"] != step:
            raise self._refused(f"is the checkpoint of step {said['step']}: rename it back")
        if world_size is None or not 0 < world_size <= _MOST_RANKS:
            raise self._refused(f"says that {world_size} ranks saved it")
        if not isinstance(self.extra, dict):
            raise self._refused(f"holds as extra what no save gives it: {str(self.extra)[:100]}")
        self.savers = world_size

    def _refused(self, what: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self.path} {what}", (MANIFEST,))

    def verify(self) -> CorruptCheckpointError | None:
        """Collective: compare all files with what was saved: their sizes, with every byte their checksums, too.

        What is not the checkpoint's own, and what cannot be compared, is told in the log.

        Returns what is damaged, on all ranks alike; only the first knows all of it.
        """
        readers = self.readers
        found: list[_Damage] = []
        foreign: list[str] = []
        every_byte = self._every_byte
        index, count = self._place_among_alike() if every_byte else (readers.index, readers.count)
        # Not of copies: some ranks read the parts of another one than the first.
        is_cut = every_byte and count == readers.count
        cuts = cuts_of(count, self.files) if is_cut else {}
        sums: list[str | None] = []
        with readers.voted(f"verifying {self.path}") as ballot:
            share = share_of(index, count, self.files, self.savers, cuts)
            found = self.lock.verify_files(share.whole, every_byte=every_byte)
            if share.parts:
                sums, shown = self.lock.sum_parts(share.parts)
                found += shown
            ballot.note = bool(found)
            if readers.is_first and every_byte:
                foreign = self.lock.foreign_files()
        if cuts:
            ballot = self._compare(cuts, share.parts, sums, found)
        if ballot.is_noted:
            return self._agree_on(found)
        if foreign:
            _logger.warning(
                "%s holds files that no save wrote, which are not read: %s", self.path, "; ".join(foreign)
            )
        if readers.is_first and every_byte:
            tell_unsummed(self.path, [name for name, _, checksum in self.files if checksum is None])
        return None

    def _compare(
        self,
        cuts: Mapping[str, Sequence[Part]],
        parts: Sequence[Part],
        sums: Sequence[str | None],
        found: list[_Damage],
    ) -> Ballot:
        """Collective: compare the files of which each rank read `parts`, and found that they have these `sums`.

        What is damaged of them is added to what is `found`, on the first rank.
        """
        readers = self.readers
        what = f"comparing what was read of {self.path}"
        told = readers.voter.gather(
            json.dumps(list(zip(parts, sums, strict=True))), what=what, timeout=readers.timeout
        )
        with readers.voted(what) as ballot:
            known = {tuple(part): checksum for text in told for part, checksum in json.loads(text)}
            for name, pieces in cuts.items() if readers.is_first else ():
                of_pieces = [(known[piece], piece[2]) for piece in pieces]
                # Of one that was not read to its end whoever read it tells.
                if all(checksum is not None for checksum, _ in of_pieces):
                    damage = self.lock.compare_sums(name, of_pieces)
                    found += [] if damage is None else [damage]
            ballot.note = bool(found)
        return ballot

    def _place_among_alike(self) -> tuple[int, int]:
        """Collective: which one this rank is of those that see the same files as it does, and of how many.

        Of all, where there is one checkpoint; nodes may have copies, under one path, of which only one is damaged.
        """
        readers, voter = self.readers, self.readers.voter
        if readers.count == 1:
            return 0, 1
        what = f"looking whether all see the same {self.path.name}"
        own = self._marks()
        told = own if readers.is_first else None
        first = voter.broadcast(told, source=voter.ranks[0], what=what, timeout=readers.timeout)
        if not voter.vote(what=what, flag=own != first, timeout=readers.timeout):
            return readers.index, readers.count
        gathered = voter.gather(own, what=what, timeout=readers.timeout)
        told = compress_list(gathered) if readers.is_first else None
        all_marks = decompress_list(
            voter.broadcast(told, source=voter.ranks[0], what=what, timeout=readers.timeout)
        )
        alike = [index for index, marks in enumerate(all_marks) if marks == own]
        return alike.index(readers.index), len(alike)

    def _marks(self) -> str:
        """What differs between copies: the times at which two of the files were last changed.

        Nothing else can be told apart everywhere: a copy may keep all other times, and some network file systems
        number a file otherwise on each node. Copies that are made at once may have one time in common, seldom two.
        """
        marks = []
        for name in (MANIFEST, *(name for name, _, _ in self.files[:1])):
            # What is missing is found when it is verified.
            with contextlib.suppress(OSError):
                marks.append(f"{name} {(self.path / name).stat().st_ctime_ns}")
        return ", ".join(marks)

    def _agree_on(self, found: list[_Damage]) -> CorruptCheckpointError:
        readers = self.readers
        told = readers.voter.gather(
            json.dumps([len(found), sorted(found)[:_TOLD]]),
            what=f"telling what is damaged in {self.path}",
            timeout=readers.timeout,
        )
        problem = CorruptCheckpointError(f"{self.path} is damaged, as the first rank says")
        with readers.agreed(f"looking at what is damaged in {self.path}"):
            if readers.is_first:
                problem = self._judged([json.loads(text) for text in told])
        return problem

    def _judged(self, told: Sequence[Any]) -> CorruptCheckpointError:
        """What is damaged by what each rank tells; raises what some rank alone cannot reach."""
        voter = self.readers.voter
        damaged: dict[str, str] = {}
        unreached: dict[str, tuple[int, str]] = {}
        unnamed = 0
        for rank, (found, named) in zip(voter.ranks, told, strict=True):
            unnamed += found - len(named)
            for name, what, is_changed in named:
                if is_changed or rank == voter.rank:
                    damaged[name] = what if rank == voter.rank else f"{what} (as rank {rank} reads it)"
                else:
                    unreached[name] = rank, what
        # Missing, or cannot be read: it may be that rank's node alone that does not reach it.
        again = self.lock.verify_files(set(unreached), every_byte=self._every_byte)
        damaged |= {name: what for name, what, _ in again}
        if not damaged:
            name, (rank, what) = min(unreached.items())
            raise StorageError(
                errno.EIO,
                f"rank {rank} does not see what rank {voter.rank} sees: to it {name} {what}. The checkpoint is whole",
                str(self.path / name),
            )
        names = tuple(sorted(damaged))
        others = len(names) - 1 + unnamed
        more = f", and {others} more" if others else ""
        return CorruptCheckpointError(
            f"{self.path} does not hold what its manifest says: {names[0]} {damaged[names[0]]}{more}", names
        )

    def check(self, names: set[str]) -> None:
        """Not collective: that this rank sees these files, of the size they were saved with."""
        found = self.lock.verify_files(names, every_byte=False)
        if found:
            name, what, _ = min(found)
            raise CorruptCheckpointError(
                f"{self.path} does not hold what its manifest says: {name} {what}",
                tuple(sorted(name for name, _, _ in found)),
            )


@contextlib.contextmanager
def opened(path: Path, *, step: int | None, every_byte: bool, readers: Readers) -> Iterator[Opened]:
    """Collective: the checkpoint at `path`, which has to be of `step`; during the block it stays as it is.

    `every_byte`: whether it is verified by its checksums, or by the sizes of its files alone.
    """
    with contextlib.ExitStack() as stack:
        with readers.voted(f"opening {path.name}") as ballot:
            # Each verifies a part: what one did not want verified would be for nobody.
            ballot.same.append("every byte" if every_byte else "sizes")
            lock = stack.enter_context(held(read_lock(path)))
            checkpoint = Opened(lock, step, readers, every_byte=every_byte)
            # Another one may have come under the name between two ranks' looks at it.
            ballot.same.append(checkpoint.checksum)
        yield checkpoint


def read_lock(path: Path) -> CheckpointReadLock:
    """A lock on the checkpoint at `path`.

    Raises `NotFoundError` where none is, or where it is only being written.
    """
    if path.name.startswith(".") or path.is_symlink() or not is_file(path / MANIFEST):
        raise NotFoundError(
            errno.ENOENT,
            f"no whole checkpoint is here: what a save under way or cut short leaves has no {MANIFEST}, and "
            "what torch saved by itself is read by torch.distributed.checkpoint.load",
            str(path),
        )
    return CheckpointReadLock(path)
