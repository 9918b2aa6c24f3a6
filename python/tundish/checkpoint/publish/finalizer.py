"""The way of one save from staged tensors to a published folder, and what follows it.

A `Finalizer` owns the voter that the saves of one kind vote with. What always holds:

1. Every fallible step ends in a vote, so all ranks publish or none does; the first rank alone changes the root. The
   votes of a save are counted from its number, so that they meet whatever became of the save before, even where one
   rank took that and another did not.
2. Nothing here is a collective of a process group, unless the kind's own background work is one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tundish import _native
from tundish.checkpoint.save import Save, Staged, WriteOptions
from tundish.distributed import Voter
from tundish.errors import CallbackError, CheckpointInUseError, StoreLostError, VoteTimeoutError

__all__ = ["Finalizer", "Job", "Publisher"]

FORMAT_VERSION = 1

# The most votes that a save goes through: staging, two for making room, writing, publishing, pruning, and one more
# where one fails.
_VOTES = 7
# How long a rank that lost sight of the others tells them that it gave up.
_TELLING_SECONDS = 2.0
# How often it is tried again to replace what somebody reads.
_IN_USE_POLL_SECONDS = 0.2

_logger = logging.getLogger("tundish.checkpoint")


class Publisher(Protocol):
    """What the group's first rank does to the root."""

    def publish(self, job: Job, manifest: str) -> Path: ...
    def abandon(self, kind: str, step: int) -> None: ...
    def protect(self, steps: Iterable[int]) -> None: ...
    def make_room(self) -> None: ...
    def prune(self, kind: str) -> None: ...


@dataclass(kw_only=True, eq=False)
class Job:
    """One save on its way through a lane.

    `staged` is the error instead where staging failed on this rank: the others hear of it in the next vote. `undo`:
    gives back what was taken for the staging, until there is something staged. `folder` is where the files lie until
    they are published as `target`. `is_answered`: the caller hears of a failure by itself, so that the failure policy
    need not act. `lacks_room`: what is old has to go before anything is written; known to the first rank. `release` is
    called when the save is over, of which `is_over` tells. `is_published`: it has its name, whatever follows. `number`:
    of the vote by which it was taken, the same on all ranks and higher than that of any save before.
    """

    save: Save
    number: int
    folder: Path
    target: Path
    tag: str | None
    overwrite: bool
    extra: dict[str, Any]
    lacks_room: bool
    is_answered: bool
    undo: Callable[[], None] | None
    release: Callable[[], None]
    staged: Staged | BaseException | None = None
    is_published: bool = False
    is_over: bool = False

    @property
    def what(self) -> str:
        """The save, for messages."""
        return f"save_{self.save.kind} of step {self.save.step}"


class Finalizer:
    """Finishes the saves of one kind, one after the other, on one thread.

    Args:
        kind: "hf" or "dcp".
        voter: this one's own.
        publisher: on the group's first rank; None on the others.
        world_size: ranks of the group.
        writers_per_node: processes of a node that write at once.
        checksum: whether checksums are recorded.
        announce: called with an event's name, the kind and the step.
        on_published: called with a published path.
        protected: steps that this rank was told to keep; the first rank hears of them with every save.
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
        protected: Collection[int],
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
        self._protected = protected
        self._timeout = timeout

    def options(self, save: Save) -> WriteOptions:
        """How the files of `save` are written."""
        return WriteOptions(
            checksum=self._checksum, writers_per_node=self._writers_per_node, progress=save.note_written
        )

    def finish(self, job: Job) -> None:
        """Collective: write and publish a save.

        Raises what it failed with, the same on all ranks; `CallbackError` where it is published nevertheless. What lies
        in the root of one that is not, is still there: `abandon` it.
        """
        # The vote that made the voter was the first.
        self._voter.skip_to(1 + _VOTES * job.number)
        try:
            staged, facts = self._stage(job)
            facts += self._write(job, staged)
            with self._voted(f"{job.what}: publishing"):
                if self._publisher is not None:
                    self._publish(self._publisher, job, self._manifest(job, facts))
            job.is_published = True
        except (StoreLostError, VoteTimeoutError):
            # The others may have seen the vote succeed that failed here.
            if job.staged is not None and not isinstance(job.staged, BaseException):
                job.staged.break_off()
            raise
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

    def tell(self, job: Job, error: BaseException) -> None:
        """Bring `error`, which ended `finish`, to the vote that the others may have gone on to. Never raises."""
        if isinstance(error, StoreLostError | VoteTimeoutError):
            with contextlib.suppress(Exception):
                self._voter.vote(error, what=f"{job.what}: going on", timeout=_TELLING_SECONDS)

    def abandon(self, job: Job) -> None:
        """Remove what lies in the root of a save that comes to nothing. Never raises."""
        try:
            if self._publisher is not None:
                self._publisher.abandon(self.kind, job.save.step)
        except Exception:
            # A log that cannot be written is no reason to end the thread of all saves.
            with contextlib.suppress(Exception):
                _logger.exception(
                    "%s failed, and its leftover %s stays until the next start", job.what, job.folder
                )

    def close(self) -> None:
        """Let go of the voter."""
        self._voter.close()

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

    def _stage(self, job: Job) -> tuple[Staged, list[_native.FileMetadata]]:
        """Wait for the tensors, and make room where it lacks; the first rank writes everything else."""
        error: BaseException | None = None
        facts: list[_native.FileMetadata] = []
        try:
            facts = self._prepare(job)
        except BaseException as caught:  # noqa: BLE001 (the vote raises it again)
            error = caught
        what = f"{job.what}: staging"
        lacks_room = self._voter.vote(error, what=what, flag=job.lacks_room, timeout=self._timeout)
        if lacks_room:
            facts = self._make_room(job)
        return _staged_of(job), facts

    def _prepare(self, job: Job) -> list[_native.FileMetadata]:
        """Wait for the tensors; the facts of what the first rank wrote."""
        staged = _staged_of(job)
        staged.wait_staged(None)
        job.save.note_staged()
        self._announce("staged", self.kind, job.save.step)
        return [] if self._publisher is None or job.lacks_room else staged.prewrite(job.folder)

    def _make_room(self, job: Job) -> list[_native.FileMetadata]:
        """Remove what should have gone before, once it is known what all ranks protect; the rest is as `_prepare`."""
        what = f"{job.what}: making room"
        told = json.dumps(list(self._protected))
        gathered = self._voter.gather(told, what=what, timeout=self._timeout)
        with self._voted(what):
            if self._publisher is None:
                return []
            self._publisher.protect(step for text in gathered for step in json.loads(text))
            self._publisher.make_room()
            return _staged_of(job).prewrite(job.folder)

    def _write(self, job: Job, staged: Staged) -> list[_native.FileMetadata]:
        """Write this rank's files; on the first rank the facts of all ranks' files, and what they protect."""
        error: BaseException | None = None
        own: list[_native.FileMetadata] = []
        try:
            own = staged.write(job.folder, self.options(job.save))
            self._announce("written", self.kind, job.save.step)
        except BaseException as caught:  # noqa: BLE001 (the vote raises it again)
            error = caught
        told = json.dumps(
            {
                "files": [[facts.name, facts.size, facts.checksum] for facts in own],
                # Copied at once: the caller's thread may add to it.
                "protected": list(self._protected),
            }
        )
        what = f"{job.what}: writing"
        gathered = self._voter.gather(told, error, what=what, timeout=self._timeout)
        self._announce("voted", self.kind, job.save.step)
        heard = [json.loads(text) for text in gathered]
        if self._publisher is not None:
            self._publisher.protect(step for one in heard for step in one["protected"])
        return [_native.FileMetadata(*facts) for one in heard for facts in one["files"]]

    def _manifest(self, job: Job, facts: list[_native.FileMetadata]) -> str:
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

    def _voted(self, what: str) -> contextlib.AbstractContextManager[None]:
        return self._voter.agreed(what, timeout=self._timeout)


def _staged_of(job: Job) -> Staged:
    """What was staged; raises what staging failed with on this rank."""
    if isinstance(job.staged, BaseException):
        raise job.staged
    if job.staged is None:
        raise RuntimeError(f"{job.what} was handed on without its tensors")
    return job.staged
