"""Decides which checkpoints stay, and removes the others: `Retention` and `WritableRoot`, on the first rank alone.

Invariants:
    - A step is begun on the caller's thread, and published or abandoned on its queue's thread.
    - Retention is applied only to what the root lists as published. The newest checkpoint of a kind is never removed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tundish.checkpoint.root import (
    KINDS,
    Checkpoint,
    Checkpoints,
    DiskRoot,
    Kind,
    Room,
    Root,
    check_kind,
    name_of,
)
from tundish.errors import (
    CallbackError,
    CheckpointInUseError,
    InvalidInputError,
    InvalidTypeError,
    NotFoundError,
    StorageError,
)

_logger = logging.getLogger("tundish.checkpoint")

_LOG_TEXTS = {
    "removed": "removed leftovers of dead writers",
    "live": "kept leftovers that a process still writes",
    "set_aside": "set aside, to complete a rollback",
    "repaired": "made to lead to the newest checkpoints",
    "failed": "could not be removed or rewritten",
}

# Files of another user, immutable files, mount points, files in use on a network file system.
_NOT_REMOVABLE = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.ENOTEMPTY)


@dataclass(kw_only=True)
class Retention:
    """Which checkpoints of one kind are kept.

    Attributes:
        keep_last: how many of the newest untagged checkpoints; None keeps all.
        keep_every: also untagged ones whose step is a multiple of this.
        keep: also those for which this function returns True, tagged or not.
        keep_tagged: how many of the newest of each tag; tags that are not named keep all of theirs.

    Raises:
        InvalidInputError: a count is below 1.
        InvalidTypeError: `keep` is no function, or `keep_tagged` no mapping.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep: Callable[[Checkpoint], bool] | None = None
    keep_tagged: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.keep is not None and not callable(self.keep):
            raise InvalidTypeError(f"keep is {self.keep!r}: give a function of a Checkpoint")
        if not isinstance(self.keep_tagged, Mapping) or not all(
            isinstance(tag, str) for tag in self.keep_tagged
        ):
            raise InvalidTypeError(f"keep_tagged is {self.keep_tagged!r}: give a mapping of tags to numbers")
        counts = {"keep_last": self.keep_last, "keep_every": self.keep_every}
        counts |= {f"keep_tagged[{tag!r}]": count for tag, count in self.keep_tagged.items()}
        for name, count in counts.items():
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
                raise InvalidInputError(f"{name} is {count!r}: give a whole number of at least 1")

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is ever surplus, whatever is published."""
        return self.keep_last is None and not self.keep_tagged

    def surplus(self, published: Sequence[Checkpoint], protected: Collection[int] = ()) -> list[int]:
        """Steps of `published` (one kind, ascending) that need not be kept and are not protected, oldest first.

        Raises `CallbackError` where `keep` fails.
        """
        newer_of_tag: dict[str | None, int] = {}
        surplus = []
        for checkpoint in reversed(published):
            newer = newer_of_tag.get(checkpoint.tag, 0)
            newer_of_tag[checkpoint.tag] = newer + 1
            limit = self.keep_last if checkpoint.tag is None else self.keep_tagged.get(checkpoint.tag)
            is_newest = checkpoint is published[-1]
            if is_newest or limit is None or newer < limit or self._is_kept(checkpoint, protected):
                continue
            surplus.append(checkpoint.step)
        # `keep` may have protected what was judged before.
        return [step for step in reversed(surplus) if step not in protected]

    def _is_kept(self, checkpoint: Checkpoint, protected: Collection[int]) -> bool:
        if checkpoint.step in protected:
            return True
        if checkpoint.tag is None and self.keep_every is not None and checkpoint.step % self.keep_every == 0:
            return True
        if self.keep is None:
            return False
        try:
            return bool(self.keep(checkpoint))
        except BaseException as caught:  # an exit too is the function's failure
            raise CallbackError(f"keep failed for {checkpoint.path}: {caught!r}") from caught


class _Short(NamedTuple):
    """Too little room: what is free, and the error to raise."""

    free: Room
    error: StorageError


class WritableRoot:
    """A root that this process owns, of a checkpointer or of a command, and the checkpoints that it keeps.

    Args:
        root: the root.
        retention: which checkpoints stay.
    """

    def __init__(self, root: Root, retention: Retention) -> None:
        self.root = root
        self._retention = retention
        # Re-entrant for a `keep` that protects.
        self._lock = threading.RLock()

    def begin(
        self, wanted: Checkpoint, *, overwrite: bool, wait_for_saves: Callable[[], object] | None
    ) -> bool | None:
        """Begin a checkpoint; refuse a step that is published, below the newest, or too large for the disk.

        Args:
            wanted: what it will be.
            overwrite: whether a published checkpoint of this step may be replaced.
            wait_for_saves: blocks until the saves under way are over; called where there is too little room. None if
                this call must not wait.

        Returns:
            Whether `make_room` has to be called before anything is written. None if the call would have to wait; then
            nothing is begun.
        """
        if self._begin(wanted, overwrite) is None:
            return False
        if wait_for_saves is None:
            self.abort(wanted)
            return None
        wait_for_saves()
        short = self._begin(wanted, overwrite)
        if short is None:
            return False
        removable = self._removable(wanted)
        needed = _room_of(wanted)
        freed = [_room_of(one) for one in removable]
        if not removable or (
            needed.bytes > short.free.bytes + sum(room.bytes for room in freed)
            or needed.files > short.free.files + sum(room.files for room in freed)
        ):
            self.abort(wanted)
            raise short.error
        return True

    def make_room(self, wanted: Checkpoint, *, overwrite: bool) -> None:
        """Remove checkpoints that retention will not keep, the oldest first, until the checkpoint can be begun.

        Raises `CorruptCheckpointError`, and removes nothing of a kind, where the newest checkpoint is damaged.
        """
        verified: set[str] = set()
        short = self._begin(wanted, overwrite)
        for checkpoint in self._removable(wanted):
            if short is None:
                return
            if checkpoint.kind not in verified:
                newest = self._published(check_kind(checkpoint.kind))[-1]
                self.root.verify(name_of(newest.kind, newest.step))
                verified.add(checkpoint.kind)
            for error in self._remove([checkpoint]):
                _logger.warning("a checkpoint that was to make room cannot be removed: %s", error)
            short = self._begin(wanted, overwrite)
        if short is not None:
            raise short.error

    def _begin(self, wanted: Checkpoint, overwrite: bool) -> _Short | None:
        """Begin a checkpoint; where there is too little room, only reserve its step."""
        name, needed = name_of(wanted.kind, wanted.step), _room_of(wanted)
        free = self.root.reserve(name, needed, overwrite=overwrite)
        for what, takes, has in zip(Room._fields, needed, free, strict=True):
            if takes > has:
                message = (
                    f"step {wanted.step} ({wanted.kind}) takes {takes} {what}, and {has} are free: make room, or keep "
                    "fewer"
                )
                return _Short(free, StorageError(errno.ENOSPC, message, str(self.root.path)))
        try:
            self.root.begin(name, overwrite=overwrite)
        except StorageError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return _Short(free, error)
        return None

    def _removable(self, wanted: Checkpoint) -> Checkpoints:
        """The checkpoints that retention will not keep once `wanted` is published, without the newest of each kind.

        As far as this rank knows the protected steps.
        """
        found: Checkpoints = []
        try:
            with self._lock:
                for kind in KINDS:
                    published = self._published(kind)
                    expected = published
                    if kind == wanted.kind:
                        expected = [*(one for one in published if one.step != wanted.step), wanted]
                    surplus = self._retention.surplus(expected, self.root.protected)
                    found += [one for one in published[:-1] if one.step in surplus]
        except CallbackError:
            _logger.exception("cannot tell which checkpoints retention would remove to make room")
            return []
        return found

    def abort(self, wanted: Checkpoint) -> None:
        """Remove the files of a save that failed."""
        self.root.abort(name_of(wanted.kind, wanted.step))

    def prune(self, kind: Kind) -> None:
        """Remove the checkpoints that retention does not keep; log those that cannot be removed now."""
        for error in self.remove_surplus(kind):
            _logger.warning(
                "a checkpoint that retention does not keep cannot be removed; a later save or start tries again: %s",
                error,
            )

    def remove_surplus(self, kind: Kind) -> list[StorageError]:
        """Remove the checkpoints that retention does not keep, except those being read or protected meanwhile.

        Returns the errors of those that cannot be removed now.
        """
        with self._lock:
            surplus = self._split(kind)[1]
        return self._remove(surplus)

    def _remove(self, checkpoints: Checkpoints) -> list[StorageError]:
        refused = []
        for checkpoint in checkpoints:
            try:
                self.root.remove(name_of(checkpoint.kind, checkpoint.step))
                with contextlib.suppress(Exception):
                    _logger.info("removed %s, which retention does not keep", checkpoint.path)
            except CheckpointInUseError:
                # It goes with a later save, unless it is protected.
                continue
            except NotFoundError:
                _logger.warning("another process removed %s, which retention does not keep", checkpoint.path)
            except StorageError as error:
                if error.errno not in _NOT_REMOVABLE:
                    raise
                refused.append(error)
        return refused

    def kept_from_prune(self, kind: Kind) -> Checkpoints:
        """The checkpoints that `prune` would leave; empty where it would remove nothing."""
        with self._lock:
            kept, surplus = self._split(kind)
            return kept if surplus else []

    def _split(self, kind: Kind) -> tuple[Checkpoints, Checkpoints]:
        """The published checkpoints that retention keeps, and the others. Both empty where it keeps all."""
        if self._retention.keeps_all:
            return [], []
        published = self._published(kind)
        surplus = set(self._retention.surplus(published, self.root.protected))
        return [checkpoint for checkpoint in published if checkpoint.step not in surplus], [
            checkpoint for checkpoint in published if checkpoint.step in surplus
        ]

    def _published(self, kind: Kind) -> Checkpoints:
        return [checkpoint for checkpoint in self.root.list() if checkpoint.kind == kind]

    def protect(self, steps: Iterable[int]) -> None:
        """Keep the checkpoints of `steps`: those that are listed afterwards are not removed."""
        for step in steps:
            # The root knows whether the step is being removed just now.
            self.root.protect(step)

    def discard_after(self, step: int) -> None:
        """Set the checkpoints above `step` aside, and log their new paths."""
        for path in self.root.set_aside(step):
            _logger.warning("newer than step %d, to which the run went back; set aside: %s", step, path)


def log_recovered(root: DiskRoot) -> None:
    """Log the results of opening a root."""
    found = root.recovered
    for path, reason in found["ignored"].items():
        _logger.warning("%s is named like a checkpoint and is none; it stays as it is: %s", path, reason)
    for what, paths in found.items():
        if what != "ignored" and paths:
            level = logging.WARNING if what == "failed" else logging.INFO
            _logger.log(level, "opening %s: %s: %s", root.path, _LOG_TEXTS[what], "; ".join(paths))


def _room_of(checkpoint: Checkpoint) -> Room:
    """The room that a checkpoint takes; its folder and its manifest are files too."""
    return Room(checkpoint.size, checkpoint.files + 2)
