"""Hugging Face exports: what one save will write, and its staging.

What always holds: making a plan is no collective; staging goes through the same exchanges on all ranks, and ends on
all of them, whatever fails on one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tundish.checkpoint.hf.conversion import ToHf
from tundish.checkpoint.hf.export_plan import ExportPlan, draw
from tundish.checkpoint.hf.file_image import FileImage
from tundish.checkpoint.hf.gather.exchange import Gather
from tundish.checkpoint.hf.gather.schedule import GatherSchedule
from tundish.checkpoint.hf.gather.staging_size import Needs, room_for
from tundish.checkpoint.hf.gather.transport import (
    NO_TRANSPORT,
    TensorTransport,
    joins_devices,
    wire_between_devices,
    wire_over_host,
)
from tundish.checkpoint.hf.sidecars import Sidecars, gather_sidecars
from tundish.checkpoint.hf.staged_export import ImageSink, Later, StagedExport
from tundish.checkpoint.hf.write_through import WindowSink, WrittenExport
from tundish.checkpoint.private_group import Hurry, PrivateGroup
from tundish.checkpoint.save import DEFAULT_SHARD_BYTES, News, PlannedFile, Staging, WriteOptions
from tundish.checkpoint.staging.buffers import Buffer, Place, Places
from tundish.checkpoint.staging.copies import BackgroundCopy, Copies, begin_copies, optimizers_of, run_copies
from tundish.checkpoint.staging.tensor_copy import Block
from tundish.checkpoint.tensors import any_on_cuda, locals_of
from tundish.distributed import GroupInfo, VoteId, group_info
from tundish.errors import InvalidInputError, counted
from tundish.waiting import to_its_end

__all__ = ["HfStager", "plan_hf"]


def plan_hf(
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
    background_group: PrivateGroup | None = None,
    are_nodes_alike: bool = True,
) -> HfStager:
    """Plan a Hugging Face export. On every rank of `group`; no collective, and without a side effect.

    Args:
        model_or_tensors, config, tokenizer, dtype, shard_bytes, source_dir, to_hf, staging, optimizer: as
            `Checkpointer.save_hf` takes them.
        root: where the export goes, which is no source.
        group: the ranks that save together (None: all ranks of the job). Tensors of a CUDA device travel through
            it, on the caller's thread.
        background_group: of the same ranks, for all other exchanges; None where no tensor is spread.
        are_nodes_alike: whether all nodes have as many ranks as this one; the same on all ranks.

    Raises:
        InvalidTypeError: for what is no tensor, or of a kind or dtype that cannot be saved; for arguments of other
            types.
        InvalidInputError: for names, layouts and values that cannot be used; lazy staging without an optimizer.
        NotFoundError: `source_dir` is no folder.
        Whatever `to_hf` raises, and the `save_pretrained` of a config that cannot be saved.
    """
    if staging not in ("eager", "lazy"):
        raise InvalidInputError(f'staging is {staging!r}: give "eager" or "lazy"')
    optimizers = optimizers_of(optimizer) if staging == "lazy" else ()
    member = group_info(group)
    drawing = draw(
        model_or_tensors,
        dtype=dtype,
        shard_bytes=shard_bytes,
        to_hf=to_hf,
        member=member,
        are_nodes_alike=are_nodes_alike,
    )
    sidecars = None
    if member.rank == member.ranks[0]:
        sidecars = gather_sidecars(
            model=drawing.model,
            adapters=drawing.adapters,
            config=config,
            tokenizer=tokenizer,
            source_dir=source_dir,
            root=root,
            dtype=dtype,
            index=drawing.layout.index,
        )
    return HfStager(
        drawing,
        member=member,
        sidecars=sidecars,
        optimizers=optimizers,
        group=group,
        background_group=background_group,
    )


class HfStager:
    """A `tundish.checkpoint.save.Plan`; made by `plan_hf`."""

    def __init__(
        self,
        drawing: ExportPlan,
        *,
        member: GroupInfo,
        sidecars: Sidecars | None,
        optimizers: Sequence[Any],
        group: Any,
        background_group: PrivateGroup | None,
    ) -> None:
        self._drawing = drawing
        self._member = member
        self._sidecars = sidecars
        self._optimizers = optimizers
        self._group = group
        self._background_group = background_group
        self._local = locals_of(drawing.tensors)
        self._turns = GatherSchedule(drawing, member)
        self._any_spread = self._turns.any_spread
        files = list(zip(drawing.layout.files, drawing.writers, strict=True))
        self._needs = Needs(drawing=drawing, rounds=self._turns.rounds, is_lazy=bool(optimizers))
        self._snapshots = self._needs.snapshots(member.rank)
        self._images: list[FileImage] = []
        self._held: list[Buffer] = []
        self._remembered: Block | None = None
        # Of what needs no exchange, begun in `reserve`; and of what was exchanged.
        self._copies: list[Copies | BackgroundCopy] = []
        self._put: list[Copies] = []
        # Of the exchanges of this save.
        self._number = 0
        # The generation of the group in which other ranks wait for this one to begin the exchanges, if they do.
        self._awaited_in: int | None = None
        self.files = tuple(
            [
                PlannedFile(name=file.name, size=file.size, rank=member.ranks.index(writer))
                for file, writer in files
            ]
        )
        self.staged_bytes = self._needs.total(member.rank)
        self.written_bytes = (
            sum(file.size for file, _ in files)
            + len(drawing.layout.index or b"")
            + (0 if sidecars is None else sidecars.size)
        )
        self.fingerprint = self._fingerprint_of()

    @functools.cached_property
    def most_staged_bytes(self) -> int:
        """Of the rank that stages most, where ranks stage together, else of this one."""
        return max(map(self._needs.total, self._turns.writers))

    @property
    def news(self) -> News:
        """Whether this rank lacks the group for the exchanges to come: it is the first, or one before was given up."""
        background = self._background_group
        is_absent = background is not None and background.is_absent
        return News.NO_GROUP if is_absent and self._goes_over_host else News.NONE

    def react_to(self, news: News, meeting: VoteId) -> None:
        """Collective where some rank has news: make the group."""
        self._number = meeting.number
        group = self._background_group
        try:
            if news is News.NO_GROUP and group is not None:
                hurry = Hurry()
                to_its_end(lambda: group.renew(meeting.name, hurry), hurry=hurry.begin)
        finally:
            # What is exchanged later, is after another vote.
            if not self._optimizers:
                self._note_awaited()

    def compare(self) -> bool:
        """No: the vote compared all of it."""
        return False

    def reserve(self) -> None:
        """Take the memory for this rank's files, and for what it sends later; begin to copy."""
        is_pinned = any_on_cuda(self._local)
        for file in self._turns.files_of(self._member.rank):
            self._images.append(FileImage(file, is_pinned=is_pinned))
        size = sum(room_for(*known) for known in self._snapshots.values())
        if size:
            self._held.append(Buffer(size, is_pinned=is_pinned))
            self._remembered = self._snapshots_in(self._held[0])
        blocks = [self._direct_block(image) for image in self._images]
        begin_copies(
            blocks if self._remembered is None else [*blocks, self._remembered],
            self._optimizers,
            self._copies,
        )

    def stage(self) -> StagedExport:
        """Copy tensors into the files' images; collective where tensors are spread over ranks.

        What fails on this rank is raised at the end, after all exchanges: the other ranks do not fail with it, and
        have to be told.
        """
        later = None
        if self._turns.rounds:
            sink = ImageSink(self._images, self._put)
            gather = self._gather(self._given, self._wire(is_background=bool(self._optimizers)))
            if self._optimizers:
                later = Later(gather=gather, rounds=self._turns.rounds, sink=sink)
            else:
                # Before anything else can fail, since other ranks take part.
                gather.run(self._turns.rounds, sink)
                self._awaited_in = None
        run_copies(self._copies)
        return StagedExport(
            images=self._images,
            held=self._held,
            copies=(*self._copies, *self._put),
            later=later,
            sidecars=self._sidecars,
            weights=[file.name for file in self.files],
        )

    def through_bytes(self, limit_bytes: int) -> int:
        """Host memory that `write_through` takes."""
        parts = self._turns.through(limit_bytes)
        largest = max((window.span.size for window in parts.own), default=0)
        windows = min(self._needs.files(self._member.rank), max(parts.windows_bytes, largest))
        return windows + parts.exchange_bytes

    def write_through(self, folder: Path, options: WriteOptions, limit_bytes: int) -> WrittenExport:
        """Write while tensors are still being taken, in host memory of up to `limit_bytes`.

        Instead of `reserve` and `stage`, for saves larger than the memory there is; a lazy one becomes an eager one. On
        the caller's thread, collective where tensors are spread over ranks. When it returns, nothing that the
        caller does to the model changes what is saved, and the end of the files is still being written.

        What fails on this rank is raised at the end, after all exchanges. A tensor that is larger than the limit
        takes its own size.
        """
        self._note_awaited()
        parts = self._turns.through(limit_bytes)
        sink = WindowSink(parts.own, self._drawing.products, folder, options, parts.windows_bytes)
        try:
            self._gather(self._local, self._wire(is_background=False)).run(parts.rounds, sink)
            self._awaited_in = None
        except BaseException:
            sink.abort()
            raise
        return WrittenExport(sink=sink, sidecars=self._sidecars, weights=[file.name for file in self.files])

    def release(self) -> None:
        """Give back what was reserved and is not handed on; no rank goes on waiting for this one in host memory."""
        if self._awaited_in is not None and self._background_group is not None:
            self._background_group.break_off(self._awaited_in)
        for copies in (*self._copies, *self._put):
            # Whatever went wrong with them, the save fails with.
            with contextlib.suppress(Exception):
                copies.end()
        for buffer in (*self._images, *self._held):
            buffer.release()
        if self._sidecars is not None:
            self._sidecars.release()

    def _note_awaited(self) -> None:
        if self._any_spread and self._background_group is not None:
            self._awaited_in = self._background_group.generation

    # ---- Staging ----

    @property
    def _given(self) -> Sequence[torch.Tensor]:
        """What this rank gives of each source in exchanges: a snapshot, where those are made later."""
        if self._remembered is None:
            return self._local
        given = list(self._local)
        for source, place in zip(self._snapshots, self._remembered.places, strict=True):
            given[source] = self._remembered.buffer.view(place)
        return given

    def _direct_block(self, image: FileImage) -> Block:
        """What needs neither other ranks nor a conversion."""
        file, drawing = image.file, self._drawing
        origins = drawing.origins[file.name]
        block = Block(
            buffer=image,
            places=file.places,
            sources=[self._local[number] for number in origins.sources],
            names=origins.names,
        )
        if not self._turns.rounds:
            return block
        is_direct = [
            self._turns.is_direct(drawing.conversion.unit_of[entry.product]) for entry in file.entries
        ]
        return block.chosen([number for number, direct in enumerate(is_direct) if direct])

    def _snapshots_in(self, held: Buffer) -> Block:
        """What this rank will give of sources when they are gathered; it has yet to be copied there."""
        places: list[Place] = []
        at = 0
        for dtype, shape in self._snapshots.values():
            places.append(Place(at, at + math.prod(shape) * dtype.itemsize, dtype, shape))
            at += room_for(dtype, shape)
        return Block(
            buffer=held,
            places=Places(places),
            sources=[self._local[source] for source in self._snapshots],
            names=[self._drawing.conversion.sources[source][0] for source in self._snapshots],
        )

    def _gather(self, local: Sequence[torch.Tensor], wire: TensorTransport) -> Gather:
        return Gather(
            tensors=self._drawing.tensors,
            is_spread=self._drawing.is_spread,
            local=local,
            names=[name for name, _, _ in self._drawing.conversion.sources],
            dtypes=[dtype for _, _, dtype in self._drawing.products],
            rank=self._member.rank,
            wire=wire,
        )

    @functools.cached_property
    def _spread_device(self) -> torch.device | None:
        """Where the tensors are that are spread over ranks; None where none is."""
        spread = zip(self._local, self._drawing.is_spread, strict=True)
        return next((tensor.device for tensor, is_spread in spread if is_spread), None)

    @property
    def _goes_over_host(self) -> bool:
        """Whether tensors travel through host memory, for all that is known before the ranks met."""
        device = self._spread_device
        return device is not None and (bool(self._optimizers) or not joins_devices(self._group, device))

    def _wire(self, *, is_background: bool) -> TensorTransport:
        """How tensors travel: between devices on the caller's thread, else through host memory."""
        device = self._spread_device
        if device is None:
            return NO_TRANSPORT
        if not is_background and (wire := wire_between_devices(self._group, device)) is not None:
            return wire
        if self._background_group is None:
            raise RuntimeError("tensors are spread over ranks that have no group")
        return wire_over_host(self._background_group, self._number)

    def _fingerprint_of(self) -> str:
        drawing = self._drawing
        digest = hashlib.sha256(drawing.layout.fingerprint.encode())
        known = (drawing.writers, bool(self._optimizers), len(drawing.conversion.units), self._any_spread)
        digest.update(repr(known).encode())
        if self._any_spread:
            digest.update(bytes(drawing.is_spread))
        if drawing.conversion.converts:
            digest.update(repr(drawing.conversion.sources).encode())
        # What people can make something of comes first.
        tensors, files = counted(len(drawing.products), "tensor"), counted(len(self.files), "file")
        size = sum(file.size for file in self.files)
        return f"{tensors} in {files} of {size} bytes ({digest.hexdigest()})"
