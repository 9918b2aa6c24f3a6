"""Finishes saves in the background, one of a kind after the other: `Finalizer`, and `SaveQueue` with its thread.

A save goes from staged tensors to a published folder, then retention and callbacks follow.

Invariants:
    - Every fallible step ends in a vote: all ranks publish or none does. Only the first rank changes the root.
    - The votes of a save are numbered from the vote that took it, so that ranks stay aligned after a failed save.
    - Nothing here is a collective of a process group, unless the kind's own background work is one.
    - A save is over on this rank before the next one begins to be written. Its staging memory is given back and its
      future resolved, whatever happens.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tundish import _native
from tundish.callers_device import on_this_device
from tundish.checkpoint.retention import WritableRoot
from tundish.checkpoint.root import Kind, Root, WriteOptions
from tundish.checkpoint.save_job import SaveJob, SaveState
from tundish.checkpoint.staging import Staged
from tundish.distributed import Voter
from tundish.errors import (
    CallbackError,
    CheckpointInUseError,
    InvalidInputError,
    JobStoreLostError,
    VoteTimeoutError,
)

FORMAT_VERSION = 1

# The most votes of a save: staging, two for making room, writing, publishing, pruning, and one more where one fails.
_VOTES = 7
# How long a rank that lost the others waits for them to hear that it gave up.
_REPORT_SECONDS = 2.0
# Between two attempts to replace a checkpoint that is being read.
_IN_USE_POLL_SECONDS = 0.2

_logger = logging.getLogger("tundish.checkpoint")


@dataclass(kw_only=True, eq=False)
class Finalizer:
    """Finishes the saves of one kind, one at a time, on the queue's thread.

    Attributes:
        kind: "hf" or "dcp".
        voter: used by this finalizer alone.
        root: where it is published.
        writable: the root with its retention, on the group's first rank; None on the others.
        world_size: number of ranks in the group.
        checksum: whether checksums are recorded.
        notify: called with an event's name, the kind and the step.
        on_published: functions that are called with the published path.
    """

    kind: Kind
    voter: Voter
    root: Root
    writable: WritableRoot | None
    world_size: int
    checksum: bool
    notify: Callable[[str, str, int], None]
    on_published: Sequence[Callable[[Path], Any]]

    def finish(self, job: SaveJob) -> None:
        """Collective: write and publish a save.

        Raises:
            CallbackError: the save is published, and a callback failed.
            Exception: the error of the save, the same on all ranks. Its files are still there: call `abandon`.
        """
        # Vote 0 belongs to the constructor.
        self.voter.skip_to(1 + _VOTES * job.number)
        try:
            staged = self._stage(job)
            reports = self._write(job, staged)
            with self.voter.agreed(f"{job.what}: publishing"):
                if self.writable is not None:
                    self.writable.protect(step for report in reports for step in report["protected"])
                    self._publish(job, self._manifest(job, staged, reports))
                    self._log(job, sum(size for report in reports for _, size, _ in report["files"]))
            job.state = SaveState.PUBLISHED
        except (JobStoreLostError, VoteTimeoutError):
            # On the other ranks the vote may have succeeded.
            if isinstance(job.staged, Staged):
                job.staged.abort()
            raise
        self.notify("published", self.kind, job.step)
        failed: list[BaseException] = []
        with self.voter.agreed(f"{job.what}: pruning"):
            try:
                if self.writable is not None:
                    self.writable.prune(self.kind)
            except CallbackError as caught:
                # An error of the user's `keep`; nothing was removed.
                failed.append(caught)
        for callback in self.on_published:
            try:
                callback(self.root.path_of(job.name))
            except BaseException as caught:  # noqa: BLE001 (an exit too would end this thread alone)
                failed.append(caught)
        if failed:
            said = "; ".join(
                str(error) if isinstance(error, CallbackError) else repr(error) for error in failed
            )
            raise CallbackError(f"{job.what} is published, but a callback failed: {said}") from failed[0]

    def report(self, job: SaveJob, error: BaseException) -> None:
        """Fail the vote in which other ranks may already wait. Never raises."""
        if isinstance(error, JobStoreLostError | VoteTimeoutError):
            with contextlib.suppress(Exception):
                self.voter.vote(error, what=f"{job.what}: going on", timeout=_REPORT_SECONDS)

    def abandon(self, job: SaveJob) -> None:
        """Remove the files of a save that failed. Never raises."""
        try:
            if self.writable is not None:
                self.root.abort(job.name)
        except Exception:
            # A log that cannot be written is no reason to end the thread of all saves.
            with contextlib.suppress(Exception):
                _logger.exception(
                    "%s failed, and what it left in %s stays until the next start", job.what, self.root.path
                )

    def close(self) -> None:
        """Close the voter."""
        self.voter.close()

    def _log(self, job: SaveJob, size: int) -> None:
        # A log that cannot be written does not fail the save.
        with contextlib.suppress(Exception):
            _logger.info(
                "published %s: %.1f MB in %.1f s; training was held up for %.3f s",
                self.root.path_of(job.name),
                size / 1e6,
                time.monotonic() - job.started,
                job.held_seconds,
            )

    def _publish(self, job: SaveJob, manifest: str) -> None:
        """Publish; wait for readers of the checkpoint that is to be replaced."""
        # The other ranks wait for this rank's vote no longer than the whole of it.
        until = time.monotonic() + self.voter.timeout / 2
        is_logged = False
        while True:
            try:
                self.root.publish(job.name, manifest, overwrite=job.overwrite)
            except CheckpointInUseError as error:
                if time.monotonic() > until:
                    raise
                if not is_logged:
                    _logger.warning("%s waits until it can replace the checkpoint: %s", job.what, error)
                is_logged = True
                time.sleep(_IN_USE_POLL_SECONDS)
            else:
                return

    def _stage(self, job: SaveJob) -> Staged:
        """Wait for the tensors, and make room on the disk where that is needed."""
        error: BaseException | None = None
        try:
            job.staged_save().wait_staged(None)
            job.state = SaveState.STAGED
            job.save._was_staged = True
            self.notify("staged", self.kind, job.step)
        except BaseException as caught:  # noqa: BLE001 (the vote raises it again)
            error = caught
        what = f"{job.what}: staging"
        if self.voter.vote(error, what=what, flag=job.needs_room):
            self._make_room(job, f"{job.what}: making room")
        return job.staged_save()

    def _make_room(self, job: SaveJob, what: str) -> None:
        """Remove old checkpoints, once the steps that any rank protects are known."""
        gathered = self.voter.gather(json.dumps(sorted(self.root.protected)), what=what)
        with self.voter.agreed(what):
            if self.writable is not None and job.wanted is not None:
                self.writable.protect(step for answer in gathered for step in json.loads(answer))
                self.writable.make_room(job.wanted, overwrite=job.overwrite)

    def _write(self, job: SaveJob, staged: Staged) -> list[Any]:
        """Write this rank's files; returns what all ranks report, on the first rank."""
        error: BaseException | None = None
        own: list[_native.FileMetadata] = []
        try:
            options = WriteOptions(
                checksum=self.checksum,
                set_progress=job.save._set_progress,
            )
            own = staged.write(self.root.draft(job.name), options)
            self.notify("written", self.kind, job.step)
        except BaseException as caught:  # noqa: BLE001 (the vote raises it again)
            error = caught
        report = {
            "files": [[file.name, file.size, file.checksum] for file in own],
            "note": staged.note,
            # Copied at once: the caller's thread may add to it.
            "protected": sorted(self.root.protected),
        }
        what = f"{job.what}: writing"
        gathered = self.voter.gather(json.dumps(report), error, what=what)
        self.notify("voted", self.kind, job.step)
        return [json.loads(text) for text in gathered]

    def _manifest(self, job: SaveJob, staged: Staged, reports: list[Any]) -> str:
        """On the first rank: write the other files; returns the manifest of all of them."""
        files = [tuple(file) for report in reports for file in report["files"]]
        others = staged.write_late_files(self.root.draft(job.name), [report["note"] for report in reports])
        files += [(file.name, file.size, file.checksum) for file in others]
        manifest = {
            "format_version": FORMAT_VERSION,
            "kind": self.kind,
            "step": job.step,
            "tag": job.tag,
            "world_size": self.world_size,
            "extra": job.extra,
            "files": [
                {"name": name, "size": size, "checksum": checksum}
                for name, size, checksum in sorted(files, key=lambda file: file[0])
            ],
        }
        return json.dumps(manifest, indent=2, allow_nan=False) + "\n"


class SaveQueue:
    """The saves of one kind and the thread that finishes them.

    Args:
        finalizer: of that kind.
        on_failure: called with the error of a save that failed in the background, and what it was.
    """

    def __init__(self, finalizer: Finalizer, on_failure: Callable[[BaseException, str], None]) -> None:
        self._finalizer = finalizer
        self._on_failure = on_failure
        self._thread: threading.Thread | None = None
        self._pending: list[SaveJob] = []
        self._changed = threading.Condition()
        self._is_closing = False
        self._has_ended = threading.Event()

    def steps_under_way(self) -> list[int]:
        """Steps of the saves that are not over, in order."""
        with self._changed:
            return [job.step for job in self._pending]

    def wait_for_turn(self) -> None:
        """Block until at most one save is not over: that one may be written while the next is staged."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._pending) < 2)

    def has_turn(self) -> bool:
        """Whether `wait_for_turn` would return at once."""
        with self._changed:
            return len(self._pending) < 2

    def start(self) -> None:
        """Start the thread before ranks agree on a save: if it cannot start, the other ranks have to hear."""
        if self._thread is None and not self._is_closing:
            # The user's conversions and callbacks run on this thread.
            thread = threading.Thread(
                target=on_this_device(self._run), name=f"tundish-{self._finalizer.kind}-finalize", daemon=True
            )
            thread.start()
            self._thread = thread

    def submit(self, job: SaveJob) -> None:
        """Take over a save. Where the queue is closed, the save fails and gives back its memory."""
        with self._changed:
            if not self._is_closing:
                self._pending.append(job)
                self._changed.notify_all()
                return
        error = InvalidInputError(f"{job.what}: the checkpointer was closed while the save was taken")
        self._finalizer.abandon(job)
        job.release()
        job.save._fail(error)
        raise error

    def is_own_thread(self) -> bool:
        """Whether the caller runs on this queue's thread, and so would wait for itself."""
        return threading.current_thread() is self._thread

    def wait(self, timeout: float | None) -> bool:
        """Block until no save is under way, up to `timeout` seconds; returns whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout)

    def finish(self) -> None:
        """Take no more saves, and block until the pending ones are over and the thread has ended."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            # Not `join`, which takes the thread for ended where Ctrl-C interrupts it (Python 3.11).
            self._has_ended.wait()

    def close(self) -> None:
        """Close the finalizer. After `finish`."""
        self._finalizer.close()

    # From here on everything runs on the queue's thread.

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                self._finish(job)
                del job
        finally:
            self._has_ended.set()

    def _next(self) -> SaveJob | None:
        """Wait for a save; None once the queue is closing and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._is_closing)
            return self._pending[0] if self._pending else None

    def _finish(self, job: SaveJob) -> None:
        error: BaseException | None = None
        try:
            self._finalizer.finish(job)
        except BaseException as caught:  # noqa: BLE001 (whatever it is, it is the save's failure)
            error = caught
            # The frames hold on to what was staged.
            traceback.clear_frames(caught.__traceback__)
        caller_raises = job.caller_raises
        if isinstance(error, CallbackError):
            with contextlib.suppress(Exception):
                _logger.error("a callback failed", exc_info=error)
        elif error is not None and not caller_raises:
            # Before the leftovers are removed, which may take long, and before the future is resolved.
            self._on_failure(error, job.what)
        if error is not None:
            self._finalizer.report(job, error)
            if job.state is not SaveState.PUBLISHED:
                self._finalizer.abandon(job)
        job.release()
        with self._changed:
            self._pending.remove(job)
            self._changed.notify_all()
        try:
            if error is None:
                job.save._finish(self._finalizer.root.path_of(job.name))
            else:
                job.save._fail(error)
        except BaseException:
            # A callback of the future raised, perhaps SystemExit; the next save must go on.
            with contextlib.suppress(Exception):
                _logger.exception("a callback of the future of %s failed", job.what)
        is_unraised = caller_raises and not job.caller_raises
        if is_unraised and error is not None and not isinstance(error, CallbackError):
            # Ctrl-C ended the caller's wait after this thread relied on the caller to raise the error.
            self._on_failure(error, job.what)
