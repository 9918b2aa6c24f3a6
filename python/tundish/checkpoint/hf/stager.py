"""Stages a Hugging Face export: reserves its memory, gathers what is sharded, copies everything else.

Invariants:
    - Making a stager is not collective.
    - Staging goes through the same exchanges on all ranks, and ends on all of them, whatever fails on one.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tundish.checkpoint.hf.conversion import ToHf
from tundish.checkpoint.hf.export_plan import ExportPlan, make_export_plan
from tundish.checkpoint.hf.gather.exchange import Gather
from tundish.checkpoint.hf.gather.file_sink import FileSink
from tundish.checkpoint.hf.gather.schedule import gather_rounds
from tundish.checkpoint.hf.gather.staging_size import aligned_bytes, exchange_bytes, snapshots
from tundish.checkpoint.hf.gather.transport import (
    NO_TRANSPORT,
    TensorTransport,
    device_transport,
    host_transport,
    joins_devices,
)
from tundish.checkpoint.hf.shards import ShardBuffer
from tundish.checkpoint.hf.sidecars import Sidecars, gather_sidecars
from tundish.checkpoint.hf.staged_export import LazyGather, StagedExport
from tundish.checkpoint.private_group import PrivateGroup
from tundish.checkpoint.stager import DEFAULT_SHARD_BYTES, Staging
from tundish.checkpoint.staging.buffers import Buffer, Place, Places
from tundish.checkpoint.staging.copies import (
    EagerCopy,
    LazyCopy,
    begin_copies,
    optimizers_of,
    run_copies,
)
from tundish.checkpoint.staging.tensor_copy import Block
from tundish.checkpoint.tensors import any_on_cuda, locals_of
from tundish.distributed import GroupInfo, VoteId, group_info
from tundish.errors import InvalidInputError, counted

__all__ = ["HfStager", "make_hf_stager"]


def make_hf_stager(
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
    exchange_group: PrivateGroup | None = None,
    are_nodes_alike: bool = True,
) -> HfStager:
    """Plan an export, on every rank of `group`. Not collective, and without side effects.

    Args:
        model_or_tensors, config, tokenizer, dtype, shard_bytes, source_dir, to_hf, staging, optimizer: as
            `Checkpointer.save_hf` takes them.
        root: the root, which must not be `source_dir`.
        group: the ranks that save together (None: all ranks of the job). Parts of tensors travel over it between CUDA
            devices, on the caller's thread.
        exchange_group: of the same ranks, for parts that travel through host memory; None in a world of one.
        are_nodes_alike: whether all nodes have as many ranks as this one; the same on all ranks.

    Raises:
        InvalidTypeError: a tensor or an argument has a kind or dtype that cannot be saved.
        InvalidInputError: a name, a layout or a value cannot be used; a lazy save has no optimizer.
        NotFoundError: `source_dir` is no folder.
        Exception: what `to_hf`, or the `save_pretrained` of a config, raises.
    """
    if staging not in ("eager", "lazy"):
        raise InvalidInputError(f'staging is {staging!r}: give "eager" or "lazy"')
    optimizers = optimizers_of(optimizer) if staging == "lazy" else ()
    info = group_info(group)
    plan = make_export_plan(
        model_or_tensors,
        dtype=dtype,
        shard_bytes=shard_bytes,
        to_hf=to_hf,
        info=info,
        are_nodes_alike=are_nodes_alike,
    )
    sidecars = None
    if info.rank == info.ranks[0]:
        sidecars = gather_sidecars(
            model=plan.model,
            adapters=plan.adapters,
            config=config,
            tokenizer=tokenizer,
            source_dir=source_dir,
            root=root,
            dtype=dtype,
            index=plan.layout.index,
        )
    return HfStager(
        plan,
        info=info,
        sidecars=sidecars,
        optimizers=optimizers,
        group=group,
        exchange_group=exchange_group,
    )


class HfStager:
    """A `tundish.checkpoint.stager.Stager` of an export; made by `make_hf_stager`."""

    def __init__(
        self,
        plan: ExportPlan,
        *,
        info: GroupInfo,
        sidecars: Sidecars | None,
        optimizers: Sequence[Any],
        group: Any,
        exchange_group: PrivateGroup | None,
    ) -> None:
        self._plan = plan
        self._rank = info.rank
        self._sidecars = sidecars
        self._optimizers = optimizers
        self._group = group
        self._exchange_group = exchange_group
        self._local = locals_of(plan.tensors)
        self._rounds = gather_rounds(plan, info.ranks if plan.any_sharded else (info.rank,))
        # A lazy save gathers in the background, of snapshots.
        self._snapshots = snapshots(plan, self._rounds, info.rank) if optimizers else {}
        self._buffers: list[ShardBuffer] = []
        self._held: list[Buffer] = []
        self._snapshot_block: Block | None = None
        # Copies of what needs no exchange, begun by `reserve`; and of what was gathered from devices.
        self._copies: list[EagerCopy | LazyCopy] = []
        self._gathered: list[EagerCopy] = []
        self._number = 0
        # The generation of the exchange group in which other ranks wait for this one, if they do.
        self._awaited_in: int | None = None
        self._files = plan.files_of(info.rank)
        self.file_bytes = sum(file.size for file in self._files)
        self.staged_bytes = (
            self.file_bytes
            + sum(aligned_bytes(*snapshot) for snapshot in self._snapshots.values())
            + exchange_bytes(plan, self._rounds, info.rank)
        )
        self.checkpoint_bytes = (
            sum(file.size for file in plan.layout.files)
            + len(plan.layout.index or b"")
            + (0 if sidecars is None else sidecars.size)
        )
        self.fingerprint = self._fingerprint()

    @property
    def needs_preparation(self) -> bool:
        """Whether the exchange group is needed, and is not connected on this rank."""
        group = self._exchange_group
        return group is not None and group.is_absent and self._uses_host_transport

    def prepare(self, vote: VoteId, *, any_needs: bool) -> bool:
        """Collective where a rank needs it: connect the exchange group."""
        self._number = vote.number
        group = self._exchange_group
        if group is not None:
            if any_needs:
                group.connect(vote.name)
            if self._plan.any_sharded and not self._optimizers:
                self._awaited_in = group.generation
        return False

    def reserve(self) -> None:
        """Take the memory of this rank's files and snapshots, and begin to copy."""
        is_pinned = any_on_cuda(self._local)
        for file in self._files:
            self._buffers.append(ShardBuffer(file, is_pinned=is_pinned))
        size = sum(aligned_bytes(*snapshot) for snapshot in self._snapshots.values())
        if size:
            self._held.append(Buffer(size, is_pinned=is_pinned))
            self._snapshot_block = self._make_snapshot_block(self._held[0])
        blocks = [self._direct_block(buffer) for buffer in self._buffers]
        begin_copies(
            blocks if self._snapshot_block is None else [*blocks, self._snapshot_block],
            self._optimizers,
            self._copies,
        )

    def stage(self) -> StagedExport:
        """Copy tensors into the files' buffers; collective where tensors are sharded.

        What fails on this rank is raised after all exchanges, so that the other ranks are not held up.
        """
        lazy_gather = None
        if self._rounds:
            sink = FileSink(self._buffers, self._gathered)
            gather = Gather(self._plan, local=self._sources(), rank=self._rank, transport=self._transport())
            if self._optimizers:
                lazy_gather = LazyGather(gather=gather, rounds=self._rounds, sink=sink)
            else:
                # First, since the other ranks take part.
                gather.run(self._rounds, sink)
                self._awaited_in = None
        run_copies(self._copies)
        return StagedExport(
            files=self._buffers,
            snapshots=self._held,
            copies=(*self._copies, *self._gathered),
            lazy_gather=lazy_gather,
            sidecars=self._sidecars,
            weight_names=[file.name for file in self._plan.layout.files],
        )

    def release(self) -> None:
        """Give back what was reserved and is not handed on; no rank goes on waiting for this one in host memory."""
        if self._awaited_in is not None and self._exchange_group is not None:
            self._exchange_group.close(self._awaited_in)
        for copy in (*self._copies, *self._gathered):
            # The save fails with another error.
            with contextlib.suppress(Exception):
                copy.release()
        for buffer in (*self._buffers, *self._held):
            buffer.release()
        if self._sidecars is not None:
            self._sidecars.release()

    def _sources(self) -> Sequence[torch.Tensor]:
        """What this rank gives of each source: a snapshot, where it is gathered later."""
        block = self._snapshot_block
        if block is None:
            return self._local
        given = list(self._local)
        for source, place in zip(self._snapshots, block.places, strict=True):
            given[source] = block.buffer.view(place)
        return given

    def _direct_block(self, buffer: ShardBuffer) -> Block:
        """The tensors of a file that need neither other ranks nor a conversion."""
        file, plan = buffer.file, self._plan
        origins = plan.origins[file.name]
        block = Block(
            buffer=buffer,
            places=file.places,
            sources=[self._local[number] for number in origins.sources],
            names=origins.names,
        )
        if not self._rounds:
            return block
        units = [plan.conversion.unit_of[entry.product] for entry in file.entries]
        return block.chosen([number for number, unit in enumerate(units) if plan.is_direct(unit)])

    def _make_snapshot_block(self, buffer: Buffer) -> Block:
        """The copies of this rank's snapshots, which are yet to be made."""
        places: list[Place] = []
        at = 0
        for dtype, shape in self._snapshots.values():
            places.append(Place(at, at + math.prod(shape) * dtype.itemsize, dtype, shape))
            at += aligned_bytes(dtype, shape)
        return Block(
            buffer=buffer,
            places=Places(places),
            sources=[self._local[source] for source in self._snapshots],
            names=[self._plan.conversion.sources[source][0] for source in self._snapshots],
        )

    @property
    def _sharded_device(self) -> torch.device | None:
        """Where the sharded tensors are; None where no tensor is sharded."""
        sources = zip(self._local, self._plan.is_sharded, strict=True)
        return next((tensor.device for tensor, is_sharded in sources if is_sharded), None)

    @property
    def _uses_host_transport(self) -> bool:
        device = self._sharded_device
        return device is not None and (bool(self._optimizers) or not joins_devices(self._group, device))

    def _transport(self) -> TensorTransport:
        """Between devices on the caller's thread, else through host memory."""
        device = self._sharded_device
        if device is None:
            return NO_TRANSPORT
        if not self._optimizers and (transport := device_transport(self._group, device)) is not None:
            return transport
        if self._exchange_group is None:
            raise RuntimeError("tensors are sharded over ranks that have no group")
        return host_transport(self._exchange_group, self._number)

    def _fingerprint(self) -> str:
        plan = self._plan
        digest = hashlib.sha256(plan.layout.fingerprint.encode())
        known = (plan.writers, bool(self._optimizers), len(plan.conversion.units), plan.any_sharded)
        digest.update(repr(known).encode())
        if plan.any_sharded:
            digest.update(bytes(plan.is_sharded))
        if plan.conversion.converts:
            digest.update(repr(plan.conversion.sources).encode())
        # A message shows this: what people understand comes first.
        tensors, files = (
            counted(len(plan.products), "tensor"),
            counted(len(plan.layout.files), "file"),
        )
        size = sum(file.size for file in plan.layout.files)
        return f"{tensors} in {files} of {size} bytes ({digest.hexdigest()})"
