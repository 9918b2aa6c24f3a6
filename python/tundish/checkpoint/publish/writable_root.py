"""The root as the group's first rank changes it: it holds the writer lock, publishes, removes and sets aside.

Invariants:
    - A step is begun on the caller's thread, and published or abandoned on its queue's thread.
    - Retention is applied only to what the root lists as published.
    - `protect` waits for decisions about what to remove, never for the removing itself.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tundish import _native
from tundish.checkpoint.publish.kinds_and_steps import KINDS, Kind
from tundish.checkpoint.publish.readonly_root import Checkpoints, check_root, checkpoints_of, verify
from tundish.checkpoint.publish.retention import Retention
from tundish.errors import CallbackError, CheckpointInUseError, NotFoundError, StorageError

__all__ = ["WritableRoot"]

_logger = logging.getLogger("tundish.checkpoint")

_LOG_TEXTS = {
    "removed": "removed leftovers of dead writers",
    "live": "kept leftovers that a process still writes",
    "set_aside": "set aside, to complete a rollback",
    "repaired": "rewritten from the folders",
    "failed": "could not be removed or rewritten",
}

# Files of another user, immutable files, mount points, files in use on a network file system.
_NOT_REMOVABLE = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.ENOTEMPTY)

# How long a start waits for a writer that is ending.
WAIT_SECONDS = 60.0


class WritableRoot:
    """A root with its writer lock, of a checkpointer or of a command.

    Args:
        path: the folder of all checkpoints.
        retention: which checkpoints stay.
        wait_seconds: how long to wait for a writer that is ending; None takes a minute. A writer on another node is
            looked for in any case, for up to 20 s.
    """

    def __init__(self, path: Path, retention: Retention, *, wait_seconds: float | None = None) -> None:
        check_root(path)
        self.path = path
        self._retention = retention
        # Re-entrant for a `keep` that protects.
        self._lock = threading.RLock()
        wait = WAIT_SECONDS if wait_seconds is None else wait_seconds
        self._root = _native.CheckpointRoot(path, wait_seconds=wait)
        # Bytes of the saves that were begun, by kind and step, until they are published or abandoned.
        self._promised: dict[tuple[Kind, int], int] = {}
        # Lock files of writers that were killed; they are empty.
        _native.sweep_writer_slots(path)

    @property
    def recovered(self) -> dict[str, Any]:
        """The results of opening: `removed`, `live`, `set_aside`, `repaired`, `ignored`, `failed`."""
        return dict(self._root.recovered)

    def log_recovered(self) -> None:
        """Log the results of opening."""
        found = self.recovered
        for path, reason in found["ignored"].items():
            _logger.warning("%s is named like a checkpoint and is none; it stays as it is: %s", path, reason)
        for what, paths in found.items():
            if what != "ignored" and paths:
                level = logging.WARNING if what == "failed" else logging.INFO
                _logger.log(level, "opening %s: %s: %s", self.path, _LOG_TEXTS[what], "; ".join(paths))

    def begin(
        self,
        kind: Kind,
        step: int,
        written_bytes: int,
        *,
        overwrite: bool,
        wait_for_saves: Callable[[], object],
    ) -> bool:
        """Make the folder of a step; refuse a step that is published, below the newest, or too large for the disk.

        Args:
            kind: "hf" or "dcp".
            step: the step.
            written_bytes: what the checkpoint will take on the disk.
            overwrite: whether a published checkpoint of this step may be replaced.
            wait_for_saves: blocks until the saves under way are over; called where the disk has too little room.

        Returns:
            Whether `make_room` has to be called before anything is written.
        """
        if written_bytes > self._free_bytes():
            wait_for_saves()
        free = self._free_bytes()
        needs_room = written_bytes > free
        if needs_room and written_bytes > free + self._surplus_bytes():
            raise StorageError(
                errno.ENOSPC,
                f"step {step} ({kind}) takes {written_bytes} bytes, and {free} are free: make room, or keep fewer",
                str(self.path),
            )
        self._root.begin(kind, step, overwrite=overwrite)
        self._promised[kind, step] = written_bytes
        return needs_room

    def make_room(self) -> None:
        """Remove the checkpoints that retention does not keep, also those of earlier runs.

        Raises `CorruptCheckpointError`, and removes nothing of a kind, where the newest checkpoint is damaged.
        """
        for kind in KINDS:
            kept = self.kept_from_prune(kind)
            if kept:
                verify(kept[-1].path, warns=False)
                self.prune(kind)

    def _surplus_bytes(self) -> int:
        """Bytes of the checkpoints that retention does not keep, as far as this rank knows the protected steps."""
        try:
            with self._lock:
                return sum(checkpoint.size for kind in KINDS for checkpoint in self._split(kind)[1])
        except CallbackError:
            _logger.exception("cannot tell which checkpoints retention would remove to make room")
            return 0

    def _free_bytes(self) -> float:
        """The free bytes beside those that the saves under way have yet to write."""
        status = os.statvfs(self.path)
        # Some file systems report no blocks at all.
        if status.f_blocks == 0:
            return math.inf
        free = status.f_bavail * status.f_frsize
        # Files are preallocated when writing begins: until then the file system does not count them.
        for (kind, step), size in list(self._promised.items()):
            free -= max(0, size - _taken_by(self.path / f".{kind}-{step}.incomplete"))
        return max(0, free)

    def publish(self, kind: Kind, step: int, manifest: str, *, overwrite: bool) -> Path:
        """Give a complete folder its name, durably, and record it."""
        path = Path(self._root.publish(kind, step, manifest, overwrite=overwrite))
        self._promised.pop((kind, step), None)
        return path

    def abandon(self, kind: Kind, step: int) -> None:
        """Remove the files of a save that failed."""
        try:
            self._root.abandon(kind, step)
        finally:
            self._promised.pop((kind, step), None)

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
        refused = []
        with self._lock:
            surplus = self._split(kind)[1]
        for checkpoint in surplus:
            try:
                self._root.remove(checkpoint.kind, checkpoint.step)
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
        published = checkpoints_of(self._root.list(), kind)
        surplus = set(self._retention.surplus(published))
        return [checkpoint for checkpoint in published if checkpoint.step not in surplus], [
            checkpoint for checkpoint in published if checkpoint.step in surplus
        ]

    def protect(self, steps: Iterable[int]) -> None:
        """Keep the checkpoints of `steps`: those that are listed afterwards are not removed."""
        kept = list(steps)
        for step in kept:
            # The root knows whether the step is being removed just now.
            self._root.protect(step)
        with self._lock:
            self._retention.protected.update(kept)

    def discard_after(self, step: int) -> None:
        """Set the checkpoints above `step` aside, and log their new paths."""
        for path in self._root.discard_after(step):
            _logger.warning("newer than step %d, to which the run went back; set aside: %s", step, path)

    def close(self) -> None:
        """Release the writer lock."""
        self._root.close()


def _taken_by(folder: Path) -> int:
    """Bytes that a folder takes on the disk, as far as it can be read."""
    taken = 0
    for above, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                taken += Path(above, name).lstat().st_blocks * 512
    return taken
