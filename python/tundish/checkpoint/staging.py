"""`Staged`: the tensors of a `WritePlan` in host memory, or on their way there, and the writing of its files.

Invariants:
    - After `copy` of an eager save returns, the caller may change the tensors: the save does not change.
    - A lazy save exchanges tensors before it opens a file, so that a rank that writes never holds up one that waits.
    - Memory is given back once, by `release`, whatever happens.
"""

from __future__ import annotations

from collections.abc import Sequence

from tundish._native import FileMetadata
from tundish.checkpoint.buffers import Buffer
from tundish.checkpoint.copies import BufferCopy, Copies
from tundish.checkpoint.root import Draft, WriteOptions
from tundish.checkpoint.write_plan import Exchange, PlannedBuffer, WritePlan


class Staged:
    """The buffers of a save and the copies into them. Making it takes the memory and begins to copy.

    Raises `MemoryError` kinds; then nothing is held.
    """

    def __init__(self, plan: WritePlan) -> None:
        self._plan = plan
        self._copies = Copies()
        # One for each file, then one for each part of the snapshots.
        self._buffers: list[Buffer] = []
        self._exchange: Exchange | None = None
        try:
            parts: list[PlannedBuffer] = [*plan.files, *plan.snapshots]
            for part in parts:
                self._buffers.append(Buffer(part.size, is_pinned=plan.is_pinned))
            blocks = [
                BufferCopy(
                    buffer=buffer,
                    places=part.places,
                    sources=part.sources,
                    names=part.names,
                    # The bytes around tensors are filled in when the file is written. Places that an exchange fills are
                    # filled later too, but a device may write first into memory that it receives into.
                    are_gaps_free=plan.exchange is None,
                )
                for part, buffer in zip(parts, self._buffers, strict=True)
            ]
            self._copies.begin(blocks, plan.optimizers)
        except BaseException:
            self.release()
            raise

    @property
    def note(self) -> str:
        """Data that the first rank needs from every rank for the late files."""
        return self._plan.note

    @property
    def file_bytes(self) -> int:
        """Bytes of the files with tensors."""
        return self._plan.file_bytes

    def copy(self) -> None:
        """On the caller's thread: copy the tensors; collective if they are sharded.

        An error of this rank in an exchange is raised after all exchanges, so that the other ranks are not held up.
        """
        if self._plan.exchange is not None:
            self._exchange = self._plan.exchange(self._buffers, self._copies)
            if not self._plan.optimizers:
                # First, since the other ranks take part.
                self._exchange.run()
                self._exchange = None
        self._copies.run()

    def wait_staged(self, timeout: float | None) -> None:
        """Block until host memory holds everything. Raises the error of a copy, or `TimedOutError`."""
        self._copies.wait(timeout)

    def allow_changes(self) -> None:
        """After `wait_staged`, on the caller's thread: the caller may change the tensors from here on."""
        self._copies.allow_changes()

    def write(self, draft: Draft, options: WriteOptions) -> list[FileMetadata]:
        """Write this rank's files and block until they are durable. On a background thread of every rank."""
        if self._exchange is not None:
            try:
                self._exchange.run()
            finally:
                # A conversion may make its products on a device.
                self._exchange.wait()
            self._exchange = None
        self._fill_frames()
        # Without a name: a later error would keep the images alive.
        written = draft.write(
            [
                (file.name, file.size, [(0, buffer.image)])
                for file, buffer in zip(self._plan.files, self._buffers, strict=False)
            ],
            options,
        )
        written += [draft.write_small(name, contents) for name, contents in self._plan.small_files]
        self._copies.confirm()
        return written

    def write_late_files(self, draft: Draft, notes: Sequence[str]) -> list[FileMetadata]:
        """Write the late files, durably. On the group's first rank, after every rank's `write`, with their notes."""
        late = self._plan.late_files
        return [] if late is None else [draft.write_small(name, contents) for name, contents in late(notes)]

    def abort(self) -> None:
        """Called instead of `write` while other ranks may call theirs: ranks that wait for this one fail at once."""
        if self._exchange is not None:
            self._exchange.abort()

    def release(self) -> None:
        """Stop the copies and give the host memory back. Never raises."""
        self._exchange = None
        self._copies.release()
        for buffer in self._buffers:
            buffer.release()

    def _fill_frames(self) -> None:
        # Here and not in `write`, whose frame a later error keeps alive, with the memory.
        for file, buffer in zip(self._plan.files, self._buffers, strict=False):
            memory = memoryview(buffer.image)
            for start, contents in file.frames():
                memory[start : start + len(contents)] = contents
