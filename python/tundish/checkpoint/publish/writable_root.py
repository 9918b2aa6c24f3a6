"""What the group's first rank does to the root, and nobody else.

What always holds: a step is begun on the caller's thread and published, or abandoned, on its lane's; retention is
applied only to what the root says is published; the lanes ask one at a time what it keeps, and who protects a step
waits for that alone, not for what is removed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tundish import _native
from tundish.checkpoint.publish.read_only_root import (
    KINDS,
    Checkpoints,
    Kind,
    check_kind,
    check_root,
    checkpoints_of,
    verify_quietly,
)
from tundish.checkpoint.publish.retention import Retention
from tundish.errors import CallbackError, CheckpointInUseError, NotFoundError, StorageError

if TYPE_CHECKING:
    from tundish.checkpoint.publish.finalizer import Job

__all__ = ["WritableRoot"]

_logger = logging.getLogger("tundish.checkpoint")

_SAID = {
    "removed": "removed what dead saves left",
    "live": "left alone what somebody still writes into",
    "set_aside": "set aside after a rollback that was cut short",
    "repaired": "written again as the folders say",
    "failed": "could not be removed or written again",
}

# Another user's, a file that is fixed, or another file system mounted in it; what somebody still writes into, or reads
# where a network file system then keeps it under another name.
_MAY_NOT = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.ENOTEMPTY)

# How long a start waits for an owner that is dying.
WAIT_SECONDS = 60.0


class WritableRoot:
    """The owned root of a checkpointer, or of a command.

    `wait_seconds`: how long to wait for an owner that is dying; None takes what a start takes. Whether one that may run
    elsewhere lives is found out in any case, within 20 s.
    """

    def __init__(self, path: Path, retention: Retention, *, wait_seconds: float | None = None) -> None:
        check_root(path)
        self.path = path
        self._retention = retention
        # Re-entrant for a `keep` that protects.
        self._lock = threading.RLock()
        wait = WAIT_SECONDS if wait_seconds is None else wait_seconds
        self._root = _native.CheckpointRoot(path, wait_seconds=wait)
        # What the saves that were begun will take, by kind and step, until they are published or given up.
        self._promised: dict[tuple[str, int], int] = {}
        # The marks by which writers of this root take turns, of those that were killed. They hold nothing.
        _native.sweep_writer_slots(path)

    @property
    def recovered(self) -> dict[str, Any]:
        """What opening found and mended: `removed`, `live`, `set_aside`, `repaired`, `ignored`, `failed`."""
        return dict(self._root.recovered)

    def tell_recovered(self) -> None:
        """Log what opening found and mended."""
        found = self.recovered
        for path, reason in found["ignored"].items():
            _logger.warning("%s is called like a checkpoint, is none, and is left as it is: %s", path, reason)
        for what, paths in found.items():
            if what != "ignored" and paths:
                level = logging.WARNING if what == "failed" else logging.INFO
                _logger.log(level, "opening %s: %s: %s", self.path, _SAID[what], "; ".join(paths))

    def begin(
        self,
        kind: Kind,
        step: int,
        written_bytes: int,
        *,
        overwrite: bool,
        wait_for_saves: Callable[[], object],
    ) -> bool:
        """Make the folder of a step; refuses one that is published, below the newest, or too large for the disk.

        `wait_for_saves`: blocks until those under way are over. Called where there is too little room: what is old
        goes after them.

        Returns whether `make_room` has to be called before anything is written.
        """
        free = self._lacks_room(written_bytes)
        if free is not None:
            wait_for_saves()
            free = self._lacks_room(written_bytes)
        if free is not None and written_bytes > free + self._surplus_bytes():
            raise StorageError(
                errno.ENOSPC,
                f"step {step} ({kind}) takes {written_bytes} bytes, and {free} are free: make room, or keep fewer",
                str(self.path),
            )
        self._root.begin(kind, step, overwrite=overwrite)
        self._promised[kind, step] = written_bytes
        return free is not None

    def make_room(self) -> None:
        """Remove what retention does not keep and is still there: a run was killed first, or it kept more.

        Raises `CorruptCheckpointError`, and removes nothing of a kind, where the newest, which stays, is damaged.
        """
        for kind in KINDS:
            kept = self.kept_from_prune(kind)
            if kept:
                verify_quietly(kept[-1].path)
                self.prune(kind)

    def _surplus_bytes(self) -> int:
        """What retention does not keep, as far as it is known here what is protected."""
        try:
            with self._lock:
                return sum(one.size for kind in KINDS for one in self._split(kind)[1])
        except CallbackError:
            _logger.exception("of what may go to make room nothing is known")
            return 0

    def _lacks_room(self, written_bytes: int) -> int | None:
        """The bytes that are free, where `written_bytes` do not fit beside what is under way; else None."""
        status = os.statvfs(self.path)
        # A file system without blocks tells of no room at all.
        if status.f_blocks == 0:
            return None
        free = status.f_bavail * status.f_frsize
        promised = list(self._promised.items())
        if written_bytes + sum(size for _, size in promised) <= free:
            return None
        # Files are preallocated when they begin to be written: until then nobody sees what they will take.
        for (kind, step), size in promised:
            free -= max(0, size - _taken_by(self.path / f".{kind}-{step}.incomplete"))
        return max(0, free) if written_bytes > free else None

    def publish(self, job: Job, manifest: str) -> Path:
        """Give a complete folder its name, durably, and record it."""
        path = Path(self._root.publish(job.save.kind, job.save.step, manifest, overwrite=job.overwrite))
        self._promised.pop((job.save.kind, job.save.step), None)
        return path

    def abandon(self, kind: str, step: int) -> None:
        """Remove what a save that failed left."""
        try:
            self._root.abandon(kind, step)
        finally:
            self._promised.pop((kind, step), None)

    def prune(self, kind: str) -> None:
        """Remove what retention does not keep; what cannot be removed is told, and goes with a later save or start."""
        for error in self.remove_surplus(check_kind(kind)):
            _logger.warning(
                "retention does not keep it, but it cannot be removed; a later save or start tries again: %s",
                error,
            )

    def remove_surplus(self, kind: Kind) -> list[StorageError]:
        """Remove what retention does not keep, except what somebody reads, or has protected meanwhile.

        Returns the errors of what cannot be removed now.
        """
        refused = []
        with self._lock:
            surplus = self._split(kind)[1]
        for one in surplus:
            try:
                self._root.remove(one.kind, one.step)
            except CheckpointInUseError:
                # It goes with a later save, unless it is protected.
                continue
            except NotFoundError:
                _logger.warning("somebody else removed %s, which retention does not keep", one.path)
            except StorageError as error:
                if error.errno not in _MAY_NOT:
                    raise
                refused.append(error)
        return refused

    def kept_from_prune(self, kind: Kind) -> Checkpoints:
        """What `prune` would leave; nothing where it would remove nothing."""
        with self._lock:
            kept, surplus = self._split(kind)
            return kept if surplus else []

    def _split(self, kind: Kind) -> tuple[Checkpoints, Checkpoints]:
        """What retention keeps of what is published, and what it does not; not looked at where it keeps all."""
        if self._retention.keeps_all:
            return [], []
        published = checkpoints_of(self._root, kind)
        surplus = set(self._retention.surplus(published))
        return [one for one in published if one.step not in surplus], [
            one for one in published if one.step in surplus
        ]

    def protect(self, steps: Iterable[int]) -> None:
        """Keep the checkpoints of `steps`: what is listed afterwards is not removed."""
        kept = list(steps)
        for step in kept:
            # The root decides of what is being removed, which may take as long as a save of the other kind.
            self._root.protect(step)
        with self._lock:
            self._retention.protected.update(kept)

    def discard_after(self, step: int) -> None:
        """Set the checkpoints above `step` aside, and say where they are."""
        for path in self._root.discard_after(step):
            _logger.warning("newer than step %d, to which the run went back, and set aside: %s", step, path)

    def close(self) -> None:
        """Let go of the root."""
        self._root.close()


def _taken_by(folder: Path) -> int:
    """Bytes of the disk that lie in a folder, as far as it can be looked into."""
    taken = 0
    for above, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                taken += Path(above, name).lstat().st_blocks * 512
    return taken
