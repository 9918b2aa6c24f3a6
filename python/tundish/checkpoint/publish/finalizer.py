"""Finishes one save: from staged tensors to a published folder, then retention and callbacks.

Invariants:
    - Every fallible step ends in a vote: all ranks publish or none does. Only the first rank changes the root.
    - The votes of a save are numbered from the vote that took it, so that all ranks meet whatever the save before did.
    - Nothing here is a collective of a process group, unless the kind's own background work is one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tundish import _native
from tundish.checkpoint.publish.kinds_and_steps import Kind
from tundish.checkpoint.publish.writable_root import Begun, WritableRoot
from tundish.checkpoint.save import Save
from tundish.checkpoint.staging import Staged, WriteOptions
from tundish.distributed import Voter
from tundish.errors import CallbackError, CheckpointInUseError, JobStoreLostError, VoteTimeoutError

__all__ = ["Finalizer", "QueuedSave"]

FORMAT_VERSION = 1

# The most votes of a save: staging, two for making room, writing, publishing, pruning, and one more where one fails.
_VOTES = 7
# How long a rank that lost the others waits for them to hear that it gave up.
_REPORT_SECONDS = 2.0
# Between two attempts to replace a checkpoint that is being read.
_IN_USE_POLL_SECONDS = 0.2

_logger = logging.getLogger("tundish.checkpoint")


@dataclass(kw_only=True, eq=False)
class QueuedSave:
    """One save in the queue.

    Attributes:
        save: the future that the caller holds.
        number: of the vote that took the save; the same on all ranks, and higher than that of any save before.
        folder: where the files lie until they are published.
        target: the published folder.
        begun: the checkpoint as the first rank began it; None on the others.
        needs_room: whether old checkpoints have to go before anything is written; known to the first rank.
        caller_raises: whether the caller's thread raises the error of this save. Then the failure policy does not act.
        release: gives back the staging budget.
        staged: the staged save, or the error that staging failed with on this rank.
        is_published: whether the checkpoint has its name, whatever follows.
    """

    save: Save
    number: int
    folder: Path
    target: Path
    tag: str | None
    overwrite: bool
    extra: dict[str, Any]
    begun: Begun | None
    needs_room: bool
    caller_raises: bool
    release: Callable[[], None]
    staged: Staged | BaseException | None = None
    is_published: bool = False

    @property
    def what(self) -> str:
        """The save, for messages."""
        return f"save_{self.save.kind} of step {self.save.step}"


@dataclass(kw_only=True, eq=False)
class Finalizer:
    """Finishes the saves of one kind, one at a time, on the queue's thread.

    Attributes:
        kind: "hf" or "dcp".
        voter: used by this finalizer alone.
        writable: the root, on the group's first rank; None on the others.
        world_size: number of ranks in the group.
        writers_per_node: how many processes of a node write at once.
        checksum: whether checksums are recorded.
        notify: called with an event's name, the kind and the step.
        on_published: functions that are called with the published path.
        protected: steps that this rank protects; the first rank hears of them with every save.
    """

    kind: Kind
    voter: Voter
    writable: WritableRoot | None
    world_size: int
    writers_per_node: int
    checksum: bool
    notify: Callable[[str, str, int], None]
    on_published: Sequence[Callable[[Path], Any]]
    protected: Collection[int]

    def finish(self, queued: QueuedSave) -> None:
        """Collective: write and publish a save.

        Raises:
            CallbackError: the save is published, and a callback failed.
            Exception: the error of the save, the same on all ranks. Its files are still there: call `abandon`.
        """
        # The vote that made the voter was the first.
        self.voter.skip_to(1 + _VOTES * queued.number)
        try:
            staged = self._stage(queued)
            reports = self._write(queued, staged)
            with self.voter.agreed(f"{queued.what}: publishing"):
                if self.writable is not None:
                    self.writable.protect(step for report in reports for step in report["protected"])
                    self._publish(self.writable, queued, self._manifest(queued, staged, reports))
            queued.is_published = True
        except (JobStoreLostError, VoteTimeoutError):
            # On the other ranks the vote may have succeeded.
            if queued.staged is not None and not isinstance(queued.staged, BaseException):
                queued.staged.abort()
            raise
        self.notify("published", self.kind, queued.save.step)
        failed: list[BaseException] = []
        with self.voter.agreed(f"{queued.what}: pruning"):
            try:
                if self.writable is not None:
                    self.writable.prune(self.kind)
            except CallbackError as caught:
                # An error of the user's `keep`; nothing was removed.
                failed.append(caught)
        for callback in self.on_published:
            try:
                callback(queued.target)
            except BaseException as caught:  # noqa: BLE001 (an exit too would end this thread alone)
                failed.append(caught)
        if failed:
            said = "; ".join(
                str(error) if isinstance(error, CallbackError) else repr(error) for error in failed
            )
            raise CallbackError(f"{queued.what} is published, but a callback failed: {said}") from failed[0]

    def report(self, queued: QueuedSave, error: BaseException) -> None:
        """Bring the error of `finish` to the vote that the other ranks may have gone on to. Never raises."""
        if isinstance(error, JobStoreLostError | VoteTimeoutError):
            with contextlib.suppress(Exception):
                self.voter.vote(error, what=f"{queued.what}: going on", timeout=_REPORT_SECONDS)

    def abandon(self, queued: QueuedSave) -> None:
        """Remove the files of a save that failed. Never raises."""
        try:
            if self.writable is not None:
                self.writable.abandon(self.kind, queued.save.step)
        except Exception:
            # A log that cannot be written is no reason to end the thread of all saves.
            with contextlib.suppress(Exception):
                _logger.exception(
                    "%s failed, and its leftover %s stays until the next start", queued.what, queued.folder
                )

    def close(self) -> None:
        """Close the voter."""
        self.voter.close()

    def _publish(self, writable: WritableRoot, queued: QueuedSave, manifest: str) -> None:
        """Publish; wait for readers of the checkpoint that is to be replaced."""
        # The other ranks wait for this rank's vote no longer than the whole of it.
        until = time.monotonic() + self.voter.timeout / 2
        is_logged = False
        while True:
            try:
                writable.publish(self.kind, queued.save.step, manifest, overwrite=queued.overwrite)
            except CheckpointInUseError as error:
                if time.monotonic() > until:
                    raise
                if not is_logged:
                    _logger.warning("%s waits until it can replace the checkpoint: %s", queued.what, error)
                is_logged = True
                time.sleep(_IN_USE_POLL_SECONDS)
            else:
                return

    def _stage(self, queued: QueuedSave) -> Staged:
        """Wait for the tensors, and make room on the disk where that is needed."""
        error: BaseException | None = None
        try:
            _staged_of(queued).wait_staged(None)
            queued.save._was_staged = True
            self.notify("staged", self.kind, queued.save.step)
        except BaseException as caught:  # noqa: BLE001 (the vote raises it again)
            error = caught
        what = f"{queued.what}: staging"
        if self.voter.vote(error, what=what, flag=queued.needs_room):
            self._make_room(queued, f"{queued.what}: making room")
        return _staged_of(queued)

    def _make_room(self, queued: QueuedSave, what: str) -> None:
        """Remove old checkpoints, once the steps that any rank protects are known."""
        gathered = self.voter.gather(json.dumps(list(self.protected)), what=what)
        with self.voter.agreed(what):
            if self.writable is not None and queued.begun is not None:
                self.writable.protect(step for answer in gathered for step in json.loads(answer))
                self.writable.make_room(queued.begun)

    def _write(self, queued: QueuedSave, staged: Staged) -> list[Any]:
        """Write this rank's files; returns what all ranks report, on the first rank."""
        error: BaseException | None = None
        own: list[_native.FileMetadata] = []
        try:
            options = WriteOptions(
                checksum=self.checksum,
                writers_per_node=self.writers_per_node,
                set_progress=queued.save._set_progress,
            )
            own = staged.write(queued.folder, options)
            self.notify("written", self.kind, queued.save.step)
        except BaseException as caught:  # noqa: BLE001 (the vote raises it again)
            error = caught
        report = {
            "files": [[file.name, file.size, file.checksum] for file in own],
            "note": staged.note,
            # Copied at once: the caller's thread may add to it.
            "protected": list(self.protected),
        }
        what = f"{queued.what}: writing"
        gathered = self.voter.gather(json.dumps(report), error, what=what)
        self.notify("voted", self.kind, queued.save.step)
        return [json.loads(text) for text in gathered]

    def _manifest(self, queued: QueuedSave, staged: Staged, reports: list[Any]) -> str:
        """On the first rank: write the other files; returns the manifest of all of them."""
        files = [tuple(file) for report in reports for file in report["files"]]
        others = staged.write_late_files(queued.folder, [report["note"] for report in reports])
        files += [(file.name, file.size, file.checksum) for file in others]
        manifest = {
            "format_version": FORMAT_VERSION,
            "kind": self.kind,
            "step": queued.save.step,
            "tag": queued.tag,
            "world_size": self.world_size,
            "extra": queued.extra,
            "files": [
                {"name": name, "size": size, "checksum": checksum}
                for name, size, checksum in sorted(files, key=lambda file: file[0])
            ],
        }
        return json.dumps(manifest, indent=2, allow_nan=False) + "\n"


def _staged_of(queued: QueuedSave) -> Staged:
    """The staged save; raises what staging failed with on this rank."""
    if isinstance(queued.staged, BaseException):
        raise queued.staged
    if queued.staged is None:
        raise RuntimeError(f"{queued.what} was handed on without its tensors")
    return queued.staged
