"""The saves of one kind, one after the other, from staged tensors to a published folder.

A `Lane` owns the finalize thread of its kind and a voter that only this thread uses. What always holds:

1. The save of step N is over on every rank before that of step N+1 begins to be written.
2. Every fallible step ends in a vote, so all ranks publish or none does; the first rank alone changes the root.
3. A save's staging memory is given back and its future resolved, whatever happened.
4. Nothing here is a collective of a process group, unless the kind's own background work is one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tundish import _native
from tundish.checkpoint.saves import Save, Staged, WriteOptions
from tundish.distributed import Voter
from tundish.errors import CallbackError, CheckpointInUseError, InvalidInputError

__all__ = ["Job", "Lane", "Publisher"]

FORMAT_VERSION = 1

# How often it is tried again to replace what somebody reads.
_IN_USE_POLL_SECONDS = 0.2

_logger = logging.getLogger("tundish.checkpoint")


class Publisher(Protocol):
    """What the group's first rank does to the root."""

    def publish(self, job: Job, manifest: str) -> Path: ...
    def abandon(self, kind: str, step: int) -> None: ...
    def prune(self, kind: str) -> None: ...


@dataclass(kw_only=True)
class Job:
    """One save on its way through a lane.

    `staged` is the error instead where staging failed on this rank: the others hear of it in the next vote.
    `folder` is where the files lie until they are published as `target`. `is_answered`: the caller hears of a
    failure by itself, so that the failure policy need not act. `release` is called when the save is over.
    """

    save: Save
    folder: Path
    target: Path
    tag: str | None
    overwrite: bool
    extra: dict[str, Any]
    is_answered: bool
    release: Callable[[], None]
    staged: Staged | BaseException | None = None

    @property
    def what(self) -> str:
        """The save, for messages."""
        return f"save_{self.save.kind} of step {self.save.step}"


class Lane:
    """The finalize thread of one kind.

    Args:
        kind: "hf" or "dcp".
        voter: this lane's own.
        publisher: on the group's first rank; None on the others.
        world_size: ranks of the group.
        writers_per_node: processes of a node that write at once.
        checksum: whether checksums are recorded.
        announce: called with an event's name, the kind and the step.
        on_published: called with a published path.
        failed: called with the error of a save that failed in the background and what it was.
        timeout: seconds that a vote waits for the other ranks.
    """

    def __init__(
        self,
        *,
        kind: str,
        voter: Voter,
        publisher: Publisher | None,
        world_size: int,
        writers_per_node: int,
        checksum: bool,
        announce: Callable[[str, str, int], None],
        on_published: Sequence[Callable[[Path], Any]],
        failed: Callable[[BaseException, str], None],
        timeout: float,
    ) -> None:
        self.kind = kind
        self._voter = voter
        self._publisher = publisher
        self._world_size = world_size
        self._writers_per_node = writers_per_node
        self._checksum = checksum
        self._announce = announce
        self._on_published = on_published
        self._failed = failed
        self._timeout = timeout
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._pending: list[Job] = []
        self._changed = threading.Condition()
        self._is_closing = False
        self._is_over = threading.Event()

    def options(self, save: Save) -> WriteOptions:
        """How the files of `save` are written."""
        return WriteOptions(
            checksum=self._checksum, writers_per_node=self._writers_per_node, progress=save.note_written
        )

    def steps_under_way(self) -> list[int]:
        """Steps of the saves that are not over, in order."""
        with self._changed:
            return [job.save.step for job in self._pending]

    def wait_for_turn(self) -> None:
        """Block until at most one save is not over: that one may be written while the next is staged."""
        with self._changed:
            while len(self._pending) > 1:
                self._changed.wait()

    def start(self) -> None:
        """Have the thread there, before ranks agree on a save: where it cannot be started, the others have to hear."""
        with self._changed:
            if self._thread is None and not self._is_closing:
                name = f"tundish-{self.kind}-finalize"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                thread.start()
                self._thread = thread

    def submit(self, job: Job) -> None:
        """Take over a save; one that cannot be, as the lane is closed, fails and gives back what it has."""
        try:
            with self._changed:
                if self._is_closing:
                    raise InvalidInputError(
                        f"{job.what}: the checkpointer was closed while the save was taken"
                    )
                self._pending.append(job)
                self._queue.put(job)
        except BaseException as error:
            self._give_back(job)
            self._abandon(job)
            job.save.fail(error)
            raise

    def is_own_thread(self) -> bool:
        """Whether the caller is called by this lane, and so would wait for itself."""
        return threading.current_thread() is self._thread

    def wait(self, timeout: float | None) -> bool:
        """Block until no save is under way; whether it came to that in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout)

    def close(self) -> None:
        """End the thread, once the saves that it has are over, and let go of the voter.

        May be called again, by any thread, where a call was interrupted.
        """
        with self._changed:
            self._is_closing = True
        if self._thread is not None and os.getpid() == self._process:
            self._queue.put(None)
            # A join that Ctrl-C ends takes the thread for ended, in some versions of Python.
            self._is_over.wait()
        self._voter.close()

    # From here on everything runs on the finalize thread.

    def _run(self) -> None:
        try:
            while (job := self._queue.get()) is not None:
                self._finish(job)
                del job
        finally:
            self._is_over.set()

    def _give_back(self, job: Job) -> None:
        if job.staged is not None and not isinstance(job.staged, BaseException):
            job.staged.release()
        job.release()

    def _finish(self, job: Job) -> None:
        error: BaseException | None = None
        try:
            self._finalize(job)
        except BaseException as caught:  # noqa: BLE001 (whatever it is, it is the save's failure)
            error = caught
        self._give_back(job)
        if isinstance(error, CallbackError):
            # It is the future's alone, which perhaps nobody asks.
            _logger.error("a callback failed", exc_info=error)
        elif error is not None and not job.is_answered:
            # Before anybody is told that the save is over: the next call is to know of it.
            self._failed(error, job.what)
        with self._changed:
            self._pending.remove(job)
            self._changed.notify_all()
        try:
            if error is None:
                job.save.finish(job.target)
            else:
                job.save.fail(error)
        except BaseException:
            # Of a function that waited for the future, which may even exit; the next save is none of its business.
            _logger.exception("a callback of the future of %s failed", job.what)

    def _finalize(self, job: Job) -> None:
        published = False
        try:
            with self._voted(f"{job.what}: staging"):
                if isinstance(job.staged, BaseException):
                    raise job.staged
                if job.staged is None:
                    raise RuntimeError(f"{job.what} was handed on without its tensors")
                facts = self._prepare(job, job.staged)
            facts += self._write(job, job.staged)
            with self._voted(f"{job.what}: publishing"):
                if self._publisher is not None:
                    self._publish(self._publisher, job, self._manifest(job, facts))
            published = True
        finally:
            if not published:
                self._abandon(job)
        self._announce("published", self.kind, job.save.step)
        failed: list[BaseException] = []
        with self._voted(f"{job.what}: pruning"):
            try:
                if self._publisher is not None:
                    self._publisher.prune(self.kind)
            except CallbackError as caught:
                # What the user's `keep` failed with; nothing was removed.
                failed.append(caught)
        for callback in self._on_published:
            try:
                callback(job.target)
            except BaseException as caught:  # noqa: BLE001 (an exit too would end this thread alone)
                failed.append(caught)
        if failed:
            said = "; ".join(str(one) if isinstance(one, CallbackError) else repr(one) for one in failed)
            raise CallbackError(f"{job.what} is published, but a callback failed: {said}") from failed[0]

    def _publish(self, publisher: Publisher, job: Job, manifest: str) -> None:
        """Publish; what is to be replaced is waited for while somebody reads it."""
        # The other ranks wait for this rank's vote no longer than the whole of it.
        until = time.monotonic() + self._timeout / 2
        is_told = False
        while True:
            try:
                publisher.publish(job, manifest)
            except CheckpointInUseError as error:
                if time.monotonic() > until:
                    raise
                if not is_told:
                    _logger.warning("%s waits until it can replace the checkpoint: %s", job.what, error)
                is_told = True
                time.sleep(_IN_USE_POLL_SECONDS)
            else:
                return

    def _prepare(self, job: Job, staged: Staged) -> list[_native.FileFacts]:
        """Wait for the tensors; the first rank writes everything else."""
        staged.wait_staged(None)
        job.save.note_staged()
        self._announce("staged", self.kind, job.save.step)
        return [] if self._publisher is None else staged.prewrite(job.folder)

    def _write(self, job: Job, staged: Staged) -> list[_native.FileFacts]:
        """Write this rank's files; on the first rank the facts of all ranks' files."""
        error: BaseException | None = None
        own: list[_native.FileFacts] = []
        try:
            own = staged.write(job.folder, self.options(job.save))
            self._announce("written", self.kind, job.save.step)
        except BaseException as caught:  # noqa: BLE001 (the vote raises it again)
            error = caught
        told = json.dumps([[facts.name, facts.size, facts.checksum] for facts in own])
        what = f"{job.what}: writing"
        gathered = self._voter.gather(told, error, what=what, timeout=self._timeout)
        self._announce("voted", self.kind, job.save.step)
        return [_native.FileFacts(*facts) for text in gathered for facts in json.loads(text)]

    def _manifest(self, job: Job, facts: list[_native.FileFacts]) -> str:
        manifest = {
            "format_version": FORMAT_VERSION,
            "kind": self.kind,
            "step": job.save.step,
            "tag": job.tag,
            "world_size": self._world_size,
            "extra": job.extra,
            "files": [
                {"name": file.name, "size": file.size, "checksum": file.checksum}
                for file in sorted(facts, key=lambda file: file.name)
            ],
        }
        return json.dumps(manifest, indent=2, allow_nan=False) + "\n"

    def _abandon(self, job: Job) -> None:
        try:
            if self._publisher is not None:
                self._publisher.abandon(self.kind, job.save.step)
        except Exception:
            _logger.exception(
                "%s failed, and its leftover %s stays until the next start", job.what, job.folder
            )

    def _voted(self, what: str) -> contextlib.AbstractContextManager[None]:
        return self._voter.agreed(what, timeout=self._timeout)
