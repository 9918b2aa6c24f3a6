"""`StagedState`, a rank's part of a DCP save after it was staged: planned and written in the background."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tundish._native import FileMetadata, ShardWriter, write_small_file
from tundish.checkpoint.dcp.file_names import METADATA, rank_extra_name, shard_name
from tundish.checkpoint.dcp.saving.file_layout import FileLayout
from tundish.checkpoint.dcp.saving.plan_exchange import PlanExchange
from tundish.checkpoint.dcp.saving.torch_planning import StagedPlanner, plan_together
from tundish.checkpoint.publish.shard_writing import finishing
from tundish.checkpoint.stager import WriteOptions
from tundish.checkpoint.staging.buffers import Buffer
from tundish.checkpoint.staging.copies import EagerCopy, LazyCopy

__all__ = ["StagedState", "open_shard"]


class StagedState:
    """A `tundish.checkpoint.stager.StagedSave`.

    Args:
        index: of this rank in the group.
        exchange: of plans with the other ranks, in the background.
        layout: of this rank's file.
        buffer: the file, into which `copies` copy the tensors; None if the file is empty.
        copies: running copies.
        planner: for the values in the file.
        objects: pickles of the values that are no tensors, by name.
        rank_extra: the contents of the file for it; empty if there is none.
    """

    def __init__(
        self,
        *,
        index: int,
        exchange: PlanExchange,
        layout: FileLayout,
        buffer: Buffer | None,
        copies: Sequence[EagerCopy | LazyCopy],
        planner: StagedPlanner,
        objects: Mapping[str, bytes],
        rank_extra: bytes,
    ) -> None:
        self._index = index
        self._exchange = exchange
        self._layout = layout
        self._buffer = buffer
        self._copies = copies
        self._planner = planner
        self._objects = objects
        self._rank_extra = rank_extra

    def wait_staged(self, timeout: float | None) -> None:
        """Block until host memory holds everything that this rank saves."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for copies in self._copies:
            copies.wait(deadline)

    def allow_changes(self) -> None:
        """Note that the caller may change its tensors from here on, because staging is over."""
        for copies in self._copies:
            copies.allow_changes()

    def write_other_files(self, folder: Path) -> list[FileMetadata]:  # noqa: ARG002 (the ranks have not planned yet)
        """Write nothing: `.metadata` is written together with the tensors."""
        return []

    def write(self, folder: Path, options: WriteOptions) -> list[FileMetadata]:
        """Collective: plan with the other ranks and write this rank's files; on the first rank also `.metadata`."""
        metadata = plan_together(self._planner, self._layout, self._index, self._exchange)
        files: list[FileMetadata] = []
        name, size = shard_name(self._index), self._layout.size
        if self._buffer is None:
            files += _write_metadata(folder, metadata)
        else:
            self._layout.fill(self._buffer, self._objects)
            writer = open_shard(folder, name, size, options)
            with finishing(writer, options):
                writer.write(name, 0, self._buffer.image, 0, size)
                # While the writer's threads write.
                files += _write_metadata(folder, metadata)
                files += writer.finish()
        if self._rank_extra:
            files.append(write_small_file(folder, rank_extra_name(self._index), self._rank_extra))
        for copies in self._copies:
            copies.confirm()
        return files

    def abort(self) -> None:
        """Fail the other ranks that wait for this rank's plan."""
        self._exchange.break_off()

    def release(self) -> None:
        """Release the memory after all copies into it have ended."""
        for copies in self._copies:
            # Their errors were raised where they were waited for.
            with contextlib.suppress(Exception):
                copies.release()
        if self._buffer is not None:
            self._buffer.release()
            self._buffer = None


def _write_metadata(folder: Path, metadata: bytes | None) -> list[FileMetadata]:
    return [] if metadata is None else [write_small_file(folder, METADATA, metadata)]


def open_shard(folder: Path, name: str, size: int, options: WriteOptions) -> ShardWriter:
    """A writer of one file, which exists at its full size when this returns."""
    return ShardWriter(
        folder, [(name, size)], checksum=options.checksum, writers_per_node=options.writers_per_node
    )
