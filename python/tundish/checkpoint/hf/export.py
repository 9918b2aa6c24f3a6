"""Stages a Hugging Face export and writes it: reserves memory, gathers sharded tensors, and copies all others.

Invariants:
    - Making a stager is not collective.
    - Staging goes through the same exchanges on all ranks, and ends on all of them, even if it fails on one.
    - A lazy save gathers before it opens a file, so that a rank that writes never holds up one that gathers.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tundish._native import FileMetadata
from tundish.checkpoint.buffers import Buffer, Place
from tundish.checkpoint.copies import BufferCopy, Copies, optimizers_of
from tundish.checkpoint.hf.conversion import ToHf
from tundish.checkpoint.hf.gather import (
    ExchangeGroup,
    FileSink,
    Gather,
    HostConnection,
    TensorTransport,
    device_transport,
    exchange_bytes,
    gather_rounds,
    host_transport,
    joins_devices,
    snapshots,
)
from tundish.checkpoint.hf.plan import make_export_plan
from tundish.checkpoint.hf.safetensors import ShardBuffer
from tundish.checkpoint.hf.sidecars import Sidecars, collect_sidecars
from tundish.checkpoint.publish.shard_writing import write_files
from tundish.checkpoint.replicas import compare, digest_of
from tundish.checkpoint.stager import DEFAULT_SHARD_BYTES, StagedSave, Staging, WriteOptions
from tundish.checkpoint.tensors import any_on_cuda, locals_of
from tundish.distributed import VoteId, Voter, group_info
from tundish.errors import format_count

# Places in a buffer of several tensors are aligned to this, so that any dtype can be viewed in them.
_ALIGNMENT = 64


class HfStager:
    """A `tundish.checkpoint.stager.Stager` of an export. Its constructor is not collective and has no side effects.

    Args:
        model_or_tensors, config, tokenizer, dtype, shard_bytes, source_dir, to_hf, staging, optimizer: as
            `Checkpointer.save_hf` takes them.
        root: the root, which must not be `source_dir`.
        group: the ranks that save together (None: all ranks of the job). Parts of tensors travel over it between CUDA
            devices, on the caller's thread.
        exchange_group: of the same ranks, for parts that travel through host memory; None for a single rank.
        voter: of the caller's thread; None for a single rank.
        of_first_rank: names of buffers that differ between ranks, of which the first rank's are saved. The same on all
            ranks; `prepare` adds to it.
        are_nodes_alike: whether all nodes have as many ranks as this one; the same on all ranks.

    Raises:
        InvalidTypeError: a tensor or an argument has a kind or dtype that cannot be saved.
        InvalidInputError: a name, a layout or a value cannot be used; a lazy save has no optimizer.
        NotFoundError: `source_dir` is no folder.
        Exception: raised by `to_hf`, or by the `save_pretrained` of a config.
    """

    def __init__(
        self,
        model_or_tensors: Any,
        *,
        config: Any = None,
        tokenizer: Any = None,
        dtype: torch.dtype | None = None,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        source_dir: str | os.PathLike[str] | None = None,
        root: Path | None = None,
        to_hf: ToHf | None = None,
        staging: Staging = "eager",
        optimizer: Any = None,
        group: Any = None,
        exchange_group: ExchangeGroup | None = None,
        voter: Voter | None = None,
        of_first_rank: set[str] | None = None,
        are_nodes_alike: bool = True,
    ) -> None:
        self._optimizers = optimizers_of(staging, optimizer)
        self._group = group
        self._exchange_group = exchange_group
        self._voter = voter
        self._of_first_rank = set() if of_first_rank is None else of_first_rank
        info = group_info(group)
        self._rank = info.rank
        self._make_plan = functools.partial(
            make_export_plan,
            model_or_tensors,
            dtype=dtype,
            shard_bytes=shard_bytes,
            to_hf=to_hf,
            info=info,
            are_nodes_alike=are_nodes_alike,
        )
        self._ranks = info.ranks
        self._buffers: list[ShardBuffer] = []
        self._snapshot_buffers: list[Buffer] = []
        self._copies = Copies()
        self._number = 0
        # The connection in which other ranks wait for this one, if they do.
        self._awaited_in: HostConnection | None = None
        self._sidecars: Sidecars | None = None
        self._plan_files()
        if info.rank == info.ranks[0]:
            # Last, since it opens files.
            self._sidecars = collect_sidecars(
                model=self._plan.model,
                adapters=self._plan.adapters,
                config=config,
                tokenizer=tokenizer,
                source_dir=source_dir,
                root=root,
                dtype=dtype,
                index=self._plan.layout.index,
            )
            self.checkpoint_bytes += self._sidecars.size

    def _plan_files(self) -> None:
        self._plan = plan = self._make_plan(of_first_rank=self._of_first_rank)
        self._local = locals_of(plan.tensors)
        # The device of the sharded tensors; None if there are none.
        self._sharded_device = next(
            (local.device for local, cut in zip(self._local, plan.is_sharded, strict=True) if cut), None
        )
        # A lazy save gathers in the background, and the caller's group belongs to the caller's thread.
        self._uses_devices = (
            not self._optimizers
            and self._sharded_device is not None
            and joins_devices(self._group, self._sharded_device)
        )
        self._rounds = gather_rounds(plan, self._ranks if plan.any_sharded else (self._rank,))
        # A lazy save gathers snapshots: their sources, and their places in one buffer.
        kept = snapshots(plan, self._rounds, self._rank) if self._optimizers else {}
        self._snapshot_sources = list(kept)
        self._snapshot_places, self._snapshot_bytes = _places_of(list(kept.values()))
        self._files = plan.files_of(self._rank)
        self.file_bytes = sum(file.size for file in self._files)
        self.staged_bytes = (
            self.file_bytes + self._snapshot_bytes + exchange_bytes(plan, self._rounds, self._rank)
        )
        self.checkpoint_bytes = sum(file.size for file in plan.layout.files)
        self.fingerprint = self._fingerprint()

    @property
    def needs_preparation(self) -> bool:
        """Whether tensors travel through host memory, and this rank has no connection."""
        group = self._exchange_group
        return group is not None and self._uses_host and not group.is_connected

    @property
    def _uses_host(self) -> bool:
        return self._sharded_device is not None and not self._uses_devices

    @property
    def replicas(self) -> Mapping[str, str]:
        """A hash of the tensors that all ranks hold."""
        return {"all": digest_of([tensor for _, tensor in self._replicas()])}

    def prepare(self, vote: VoteId, *, any_needs: bool, do_replicas_differ: bool) -> bool:
        """Collective if a rank needs it: find the tensors that differ, and connect the ranks."""
        self._number = vote.number
        if do_replicas_differ:
            if self._voter is None:
                raise RuntimeError("one rank alone has no replicas")
            named = self._replicas()
            self._of_first_rank.update(
                compare(self._voter, [name for name, _ in named], [one for _, one in named])
            )
            self._give_back()
            self._plan_files()
        group = self._exchange_group
        if group is not None:
            if any_needs:
                group.connect(vote.name)
            if self._uses_host and not self._optimizers:
                self._awaited_in = group.connection
        return do_replicas_differ

    def _replicas(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors that are the same on all ranks, and their names."""
        plan = self._plan
        return [
            (name, tensor)
            for (name, _, _), tensor, is_sharded in zip(
                plan.conversion.sources, plan.tensors, plan.is_sharded, strict=True
            )
            if not is_sharded and name not in self._of_first_rank
        ]

    def reserve(self) -> None:
        """Take the memory of this rank's files and snapshots, and begin to copy."""
        is_pinned = any_on_cuda(self._local)
        for file in self._files:
            self._buffers.append(ShardBuffer(file, is_pinned=is_pinned))
        if self._snapshot_bytes:
            self._snapshot_buffers.append(Buffer(self._snapshot_bytes, is_pinned=is_pinned))
        blocks = [self._direct_block(buffer) for buffer in self._buffers]
        blocks += [
            self._block(buffer, self._snapshot_places, self._snapshot_sources)
            for buffer in self._snapshot_buffers
        ]
        self._copies.begin(blocks, self._optimizers)

    def stage(self) -> StagedExport:
        """Copy tensors into the files' buffers; collective if tensors are sharded.

        An error of this rank is raised after all exchanges, so that the other ranks are not held up.
        """
        gather = None
        if self._rounds:
            gather = Gather(
                self._plan,
                rounds=self._rounds,
                local=self._sources(),
                rank=self._rank,
                transport=self._transport(),
                sink=FileSink(self._buffers, self._copies),
            )
            if not self._optimizers:
                # First, since the other ranks take part.
                gather.run()
                gather = self._awaited_in = None
        self._copies.run()
        return StagedExport(
            copies=self._copies,
            buffers=[*self._buffers, *self._snapshot_buffers],
            files=self._buffers,
            gather=gather,
            sidecars=self._sidecars,
        )

    def release(self) -> None:
        """Give back all that was reserved; ranks that wait for this one in an exchange through host memory fail."""
        if self._awaited_in is not None:
            self._awaited_in.close()
        self._give_back()
        if self._sidecars is not None:
            self._sidecars.release()

    def _give_back(self) -> None:
        self._copies.release()
        for buffer in (*self._buffers, *self._snapshot_buffers):
            buffer.release()
        self._buffers, self._snapshot_buffers, self._copies = [], [], Copies()

    def _sources(self) -> Sequence[torch.Tensor]:
        """This rank's part of each source: a snapshot, if it is gathered later."""
        given = list(self._local)
        for buffer in self._snapshot_buffers:
            for source, place in zip(self._snapshot_sources, self._snapshot_places, strict=True):
                given[source] = buffer.view(place)
        return given

    def _direct_block(self, buffer: ShardBuffer) -> BufferCopy:
        """The tensors of a file that need neither other ranks nor a conversion."""
        units = [self._plan.conversion.unit_of[product] for product in buffer.file.products]
        block = self._block(buffer, buffer.file.places, [unit.sources[0] for unit in units])
        if not self._rounds:
            return block
        return block.chosen([number for number, unit in enumerate(units) if self._plan.is_direct(unit)])

    def _block(self, buffer: Buffer, places: Sequence[Place], sources: Sequence[int]) -> BufferCopy:
        return BufferCopy(
            buffer=buffer,
            places=places,
            sources=[self._local[source] for source in sources],
            names=[self._plan.conversion.sources[source][0] for source in sources],
        )

    def _transport(self) -> TensorTransport:
        """Between devices on the caller's thread, else through host memory."""
        if self._sharded_device is None:
            return TensorTransport()
        if self._uses_devices:
            return device_transport(self._group, self._sharded_device)
        if self._exchange_group is None or self._exchange_group.connection is None:
            raise RuntimeError("tensors are sharded over ranks that are not connected")
        return host_transport(self._exchange_group.connection, self._number)

    def _fingerprint(self) -> str:
        plan = self._plan
        digest = hashlib.sha256(plan.layout.fingerprint.encode())
        known = (
            plan.writers,
            bool(self._optimizers),
            len(plan.conversion.units),
            plan.any_sharded,
            self._uses_devices,
        )
        digest.update(repr(known).encode())
        if plan.any_sharded:
            digest.update(bytes(plan.is_sharded))
        if plan.conversion.converts:
            digest.update(repr(plan.conversion.sources).encode())
        # A message shows this: the readable part comes first.
        tensors, files = (
            format_count(len(plan.products), "tensor"),
            format_count(len(plan.layout.files), "file"),
        )
        size = sum(file.size for file in plan.layout.files)
        return f"{tensors} in {files} of {size} bytes ({digest.hexdigest()[:16]})"


def _places_of(tensors: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> tuple[list[Place], int]:
    """Aligned places of tensors in one buffer, and its bytes."""
    places: list[Place] = []
    at = 0
    for dtype, shape in tensors:
        size = math.prod(shape) * dtype.itemsize
        places.append(Place(at, at + size, dtype, shape))
        at += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places, at


@dataclass(kw_only=True, eq=False)
class StagedExport(StagedSave):
    """A Hugging Face export. The first rank knows everything about the other files, so that it has no notes.

    Attributes:
        files: the buffers of this rank's files, among all buffers.
        gather: fills the rest of `files` in the background, from snapshots; None if nothing is missing.
        sidecars: the files beside the weights, on the rank that writes them.
    """

    files: Sequence[ShardBuffer]
    gather: Gather | None
    sidecars: Sidecars | None

    def write_other_files(self, folder: Path, notes: Sequence[str]) -> list[FileMetadata]:  # noqa: ARG002 (it has none)
        """Write everything but the weights."""
        return [] if self.sidecars is None else self.sidecars.write(folder)

    def write(self, folder: Path, options: WriteOptions) -> list[FileMetadata]:
        """Write this rank's files and block until they are durable."""
        if self.gather is not None:
            try:
                self.gather.run()
            finally:
                # A conversion may make its products on a device.
                self.gather.wait()
            self.gather = None
        # Without a name: a later error would keep the images alive.
        written = write_files(
            folder, [(buffer.file.name, buffer.file.size, buffer.image) for buffer in self.files], options
        )
        self.copies.confirm()
        return written

    def abort(self) -> None:
        """Called instead of `write`: ranks that wait for this one fail at once."""
        if self.gather is not None:
            self.gather.abort()

    def release(self) -> None:
        """Stop the copies, give the host memory back and close the files beside the weights."""
        self.gather = None
        super().release()
        if self.sidecars is not None:
            self.sidecars.release()
