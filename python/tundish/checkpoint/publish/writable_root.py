"""The root as the group's first rank changes it: it holds the writer lock, publishes, removes and sets aside.

Invariants:
    - A step is begun on the caller's thread, and published or abandoned on its queue's thread.
    - Retention is applied only to what the root lists as published.
    - `protect` waits for decisions about what to remove, never for the removing itself.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tundish import _native
from tundish.checkpoint.publish.kinds_and_steps import KINDS, Kind, check_kind
from tundish.checkpoint.publish.readonly_root import Checkpoints, check_root, checkpoints_of, verify
from tundish.checkpoint.publish.retention import Checkpoint, Retention
from tundish.errors import CallbackError, CheckpointInUseError, NotFoundError, StorageError

__all__ = ["WritableRoot"]

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

# How long a start waits for a writer that is ending.
WAIT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A checkpoint to begin.

    Attributes:
        size: bytes that it will take on the disk.
        files: the number of its files.
        overwrite: whether a published checkpoint of this step may be replaced.
    """

    kind: Kind
    step: int
    tag: str | None
    size: int
    files: int
    overwrite: bool


class _Short(NamedTuple):
    """Too little room: the free bytes and files, and the error to raise."""

    free: tuple[int, int]
    error: StorageError


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
        # Lock files of writers that were killed; they are empty.
        _native.sweep_writer_slots(path)

    @property
    def owner(self) -> str:
        """A random text that all ranks find in the same root."""
        return self._root.owner

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

    def begin(self, request: Begun, *, wait_for_saves: Callable[[], object]) -> bool:
        """Make the folder of a step; refuse a step that is published, below the newest, or too large for the disk.

        Args:
            request: the checkpoint to begin.
            wait_for_saves: blocks until the saves under way are over; called where the disk has too little room.

        Returns:
            Whether `make_room` has to be called before anything is written.
        """
        if self._begin(request) is None:
            return False
        wait_for_saves()
        short = self._begin(request)
        if short is None:
            return False
        removable = self._removable(request)
        freed = sum(one.size for one in removable), sum(one.files + 2 for one in removable)
        if request.size > short.free[0] + freed[0] or request.files > short.free[1] + freed[1]:
            self.abandon(request.kind, request.step)
            raise short.error
        return True

    def make_room(self, request: Begun) -> None:
        """Remove checkpoints that retention will not keep, the oldest first, until the step can be begun.

        Raises `CorruptCheckpointError`, and removes nothing of a kind, where the newest checkpoint is damaged.
        """
        verified: set[str] = set()
        short = self._begin(request)
        for checkpoint in self._removable(request):
            if short is None:
                return
            if checkpoint.kind not in verified:
                newest = checkpoints_of(self._root.list(), check_kind(checkpoint.kind))[-1]
                verify(newest.path, warns=False)
                verified.add(checkpoint.kind)
            for error in self._remove([checkpoint]):
                _logger.warning("a checkpoint that was to make room cannot be removed: %s", error)
            short = self._begin(request)
        if short is not None:
            raise short.error

    def _begin(self, request: Begun) -> _Short | None:
        """Make the folder of a step; where the disk has too little room, only reserve the step."""
        kind, step = request.kind, request.step
        # The folder and the manifest are files too.
        files = request.files + 2
        free = self._root.reserve(kind, step, overwrite=request.overwrite, size=request.size, files=files)
        what = ("bytes", request.size, free[0]) if request.size > free[0] else ("files", files, free[1])
        if what[1] <= what[2]:
            try:
                self._root.begin(kind, step, overwrite=request.overwrite)
            except StorageError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                return _Short(free, error)
            return None
        message = f"step {step} ({kind}) takes {what[1]} {what[0]}, and {what[2]} are free: make room, or keep fewer"
        return _Short(free, StorageError(errno.ENOSPC, message, str(self.path)))

    def _removable(self, request: Begun) -> Checkpoints:
        """The checkpoints that retention will not keep once the step is published, without the newest of each kind.

        As far as this rank knows the protected steps.
        """
        pending = Checkpoint(
            kind=request.kind, step=request.step, path=self.path, tag=request.tag, size=0, files=0
        )
        found: Checkpoints = []
        try:
            with self._lock:
                for kind in KINDS:
                    published = checkpoints_of(self._root.list(), kind)
                    expected = [
                        one for one in published if one.step != request.step or one.kind != request.kind
                    ]
                    surplus = self._retention.surplus(
                        [*expected, pending] if kind == request.kind else published
                    )
                    found += [one for one in published[:-1] if one.step in surplus]
        except CallbackError:
            _logger.exception("cannot tell which checkpoints retention would remove to make room")
            return []
        return found

    def publish(self, kind: Kind, step: int, manifest: str, *, overwrite: bool) -> Path:
        """Give a complete folder its name, durably, and record it."""
        return Path(self._root.publish(kind, step, manifest, overwrite=overwrite))

    def abandon(self, kind: Kind, step: int) -> None:
        """Remove the files of a save that failed."""
        self._root.abandon(kind, step)

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
