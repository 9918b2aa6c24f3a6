"""Hugging Face exports: what one save will write, and its staging.

What always holds: making a plan is no collective; staging goes through the same exchanges on all ranks, and ends on
all of them, whatever fails on one.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import operator
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tundish.checkpoint.buffers import Buffer, Place
from tundish.checkpoint.hf.conversion import ToHf, Unit
from tundish.checkpoint.hf.drawing import Drawing, draw
from tundish.checkpoint.hf.export import ImageSink, StagedExport
from tundish.checkpoint.hf.gather import Batch, Gather, Step, batched, in_rounds
from tundish.checkpoint.hf.images import FileImage
from tundish.checkpoint.hf.memory import Needs, room_for
from tundish.checkpoint.hf.shards import Entry, ShardFile
from tundish.checkpoint.hf.sidecars import Sidecars, gather_sidecars
from tundish.checkpoint.hf.through import Window, WindowSink, WrittenExport, windows_of
from tundish.checkpoint.hf.wire import Wire
from tundish.checkpoint.owngroup import OwnGroup
from tundish.checkpoint.saves import DEFAULT_SHARD_BYTES, News, PlannedFile, Staging, WriteOptions
from tundish.checkpoint.staging import Block, begin_copies, optimizers_of
from tundish.checkpoint.tensors import locals_of
from tundish.distributed.groups import Membership, membership
from tundish.distributed.jobstore import distributed_module
from tundish.errors import InvalidInputError

__all__ = ["HfPlan", "plan_hf"]

# A save that writes through shares its limit: exchanges have turns of this part of it, windows have what is left.
_TURN_PART = 8
_HOST = torch.device("cpu")
_is_cuda = operator.attrgetter("is_cuda")


def plan_hf(
    model_or_tensors: Any,
    *,
    config: Any = None,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    source_dir: str | os.PathLike[str] | None = None,
    to_hf: ToHf | None = None,
    staging: Staging = "eager",
    optimizer: Any = None,
    group: Any = None,
    background_group: OwnGroup | None = None,
) -> HfPlan:
    """Plan a Hugging Face export. On every rank of `group`; no collective, and without a side effect.

    Args:
        model_or_tensors, config, tokenizer, dtype, shard_bytes, source_dir, to_hf, staging, optimizer: as
            `Checkpointer.save_hf` takes them.
        group: the ranks that save together (None: all ranks of the job). Tensors of a CUDA device travel through
            it, on the caller's thread.
        background_group: of the same ranks, for all other exchanges; None where no tensor is spread.

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
    member = membership(group)
    drawing = draw(model_or_tensors, dtype=dtype, shard_bytes=shard_bytes, to_hf=to_hf, member=member)
    sidecars = None
    if member.rank == member.ranks[0]:
        sidecars = gather_sidecars(
            model=drawing.model,
            config=config,
            tokenizer=tokenizer,
            source_dir=source_dir,
            dtype=dtype,
            index=drawing.layout.index,
        )
    return HfPlan(
        drawing,
        member=member,
        sidecars=sidecars,
        optimizers=optimizers,
        group=group,
        background_group=background_group,
    )


@dataclass(frozen=True, kw_only=True)
class _Through:
    """How a save is written while it is staged: this rank's windows, what they may take, and the exchanges."""

    limit_bytes: int
    own: list[Window]
    rounds: list[list[Batch]]
    windows_bytes: int
    exchange_bytes: int


class HfPlan:
    """A `tundish.checkpoint.saves.Plan`; made by `plan_hf`."""

    def __init__(
        self,
        drawing: Drawing,
        *,
        member: Membership,
        sidecars: Sidecars | None,
        optimizers: Sequence[Any],
        group: Any,
        background_group: OwnGroup | None,
    ) -> None:
        self._drawing = drawing
        self._member = member
        self._sidecars = sidecars
        self._optimizers = optimizers
        self._group = group
        self._background_group = background_group
        self._local = locals_of(drawing.tensors)
        self._any_spread = any(drawing.is_spread)
        files = list(zip(drawing.layout.files, drawing.writers, strict=True))
        self._own = [file for file, writer in files if writer == member.rank]
        self._rounds = in_rounds([list(self._batches_of(writer)) for writer in self._writers_met()])
        self._needs = Needs(drawing=drawing, rounds=self._rounds, is_lazy=bool(optimizers))
        self._snapshots = self._needs.snapshots(member.rank)
        self._images: list[FileImage] = []
        self._held: list[Buffer] = []
        self._parts: _Through | None = None
        # Whether other ranks wait for this one to begin the exchanges.
        self._is_awaited = False
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
        return max(map(self._needs.total, self._writers_met()))

    @property
    def news(self) -> News:
        """Whether this rank gave up in the middle of an earlier exchange."""
        background = self._background_group
        is_broken = self._any_spread and background is not None and background.is_broken
        return News.BROKEN_GROUP if is_broken else News.NONE

    def hear(self, news: News) -> None:
        """Collective where some rank has news: make a new group in place of the one that was let go of."""
        # What is exchanged later, is after another vote.
        self._is_awaited = self._any_spread and not self._optimizers
        if news is News.BROKEN_GROUP and self._background_group is not None:
            self._background_group.renew()

    def reserve(self) -> None:
        """Take the memory for this rank's files, and for what it sends later."""
        is_pinned = any(map(_is_cuda, self._local))
        for file in self._own:
            self._images.append(FileImage(file, is_pinned=is_pinned))
        size = sum(room_for(*known) for known in self._snapshots.values())
        if size:
            self._held.append(Buffer(size, is_pinned=is_pinned))

    def stage(self) -> StagedExport:
        """Copy tensors into the files' images; collective where tensors are spread over ranks.

        What fails on this rank is raised at the end, after all exchanges: the other ranks do not fail with it, and
        have to be told.
        """
        images, held, self._images, self._held = self._images, self._held, [], []
        try:
            return self._stage(images, held)
        except BaseException:
            for buffer in (*images, *held):
                buffer.release()
            raise

    def through_bytes(self, limit_bytes: int) -> int:
        """Host memory that `write_through` takes."""
        parts = self._through(limit_bytes)
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
        self._is_awaited = self._any_spread
        parts = self._through(limit_bytes)
        sink = WindowSink(parts.own, self._drawing.products, folder, options, parts.windows_bytes)
        try:
            self._gather(self._local, self._wire(is_background=False)).run(parts.rounds, sink)
            self._is_awaited = False
        except BaseException:
            sink.abort()
            raise
        return WrittenExport(sink=sink, sidecars=self._sidecars, weights=[file.name for file in self.files])

    def release(self) -> None:
        """Give back what was reserved and not staged; no rank goes on waiting for this one in host memory."""
        if self._is_awaited and self._background_group is not None:
            self._background_group.close()
        for buffer in (*self._images, *self._held):
            buffer.release()
        self._images, self._held = [], []
        if self._sidecars is not None:
            self._sidecars.release()

    # ---- Staging ----

    def _stage(self, images: list[FileImage], held: list[Buffer]) -> StagedExport:
        sink = ImageSink(images if self._rounds else ())
        local, gather = self._local, None
        blocks = [self._direct_block(image) for image in images]
        if self._optimizers and self._snapshots:
            block = self._snapshots_in(held[0])
            blocks.append(block)
            local = list(self._local)
            for source, place in zip(self._snapshots, block.places, strict=True):
                local[source] = block.buffer.view(place)
        if self._rounds:
            exchange = self._gather(local, self._wire(is_background=bool(self._optimizers)))
            gather = functools.partial(exchange.run, self._rounds, sink)
            if not self._optimizers:
                # Before anything else can fail, since other ranks take part.
                gather()
                self._is_awaited = False
                gather = None
        copies = begin_copies(blocks, self._optimizers)
        return StagedExport(
            images=images,
            held=held,
            copies=[*copies, *sink.copies],
            gather=gather,
            sidecars=self._sidecars,
            weights=[file.name for file in self.files],
        )

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
        if not self._rounds:
            return block
        is_direct = [self._is_direct(drawing.conversion.unit_of[entry.product]) for entry in file.entries]
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
            places=places,
            sources=[self._local[source] for source in self._snapshots],
            names=[self._drawing.conversion.sources[source][0] for source in self._snapshots],
        )

    def _gather(self, local: Sequence[torch.Tensor], wire: Wire) -> Gather:
        return Gather(
            tensors=self._drawing.tensors,
            is_spread=self._drawing.is_spread,
            local=local,
            names=[name for name, _, _ in self._drawing.conversion.sources],
            dtypes=[dtype for _, _, dtype in self._drawing.products],
            rank=self._member.rank,
            wire=wire,
        )

    def _wire(self, *, is_background: bool) -> Wire:
        """How tensors travel: between devices on the caller's thread, else through host memory."""
        if not self._any_spread:
            return Wire(own=None, generation=0, callers_group=None, device=_HOST, tag=0)
        device = next(
            tensor.device
            for tensor, is_spread in zip(self._local, self._drawing.is_spread, strict=True)
            if is_spread
        )
        if device.type == "cuda" and not is_background and _is_nccl(self._group, device):
            # Ranks that send nothing to each other may be the first to use the group, which takes all of them.
            distributed_module().all_reduce(torch.zeros(1, device=device), group=self._group)
            return Wire(own=None, generation=0, callers_group=self._group, device=device, tag=0)
        own = self._background_group
        if own is None:
            raise RuntimeError("tensors are spread over ranks that have no group")
        tag = _next_tag(own.group)
        return Wire(own=own, generation=own.generation, callers_group=None, device=_HOST, tag=tag)

    # ---- What the plan is made of ----

    def _writers_met(self) -> tuple[int, ...]:
        """The ranks whose files this rank has a part in."""
        return self._member.ranks if self._any_spread else (self._member.rank,)

    def _files_of(self, writer: int) -> list[ShardFile]:
        files = zip(self._drawing.layout.files, self._drawing.writers, strict=True)
        return [file for file, other in files if other == writer]

    @functools.cached_property
    def _sizes(self) -> list[int]:
        return [math.prod(shape) * dtype.itemsize for _, shape, dtype in self._drawing.conversion.sources]

    def _is_direct(self, unit: Unit) -> bool:
        return unit.convert is None and not self._drawing.is_spread[unit.sources[0]]

    def _batches_of(self, writer: int) -> Iterator[Batch]:
        if self._any_spread or self._drawing.conversion.converts:
            entries = [entry for file in self._files_of(writer) for entry in file.entries]
            yield from batched(writer, 0, self._steps(entries, all_of_them=False), self._sizes)

    def _steps(self, entries: Sequence[Entry], *, all_of_them: bool) -> list[Step]:
        """What fills `entries`, but for what is direct unless `all_of_them` is meant."""
        wanted: dict[int, tuple[Unit, list[int]]] = {}
        for entry in entries:
            unit = self._drawing.conversion.unit_of[entry.product]
            if all_of_them or not self._is_direct(unit):
                wanted.setdefault(id(unit), (unit, []))[1].append(entry.product)
        return [Step(unit=unit, products=tuple(products)) for unit, products in wanted.values()]

    def _through(self, limit_bytes: int) -> _Through:
        """How files larger than the limit are written; windows have what the exchanges leave of it."""
        if self._parts is None or self._parts.limit_bytes != limit_bytes:
            self._parts = self._divide(limit_bytes)
        return self._parts

    def _divide(self, limit_bytes: int) -> _Through:
        # Of which windows leave how much is known when they are cut: first as if exchanges took nothing.
        first = self._cut(limit_bytes // 2, limit_bytes)
        exchange = max(
            Needs(drawing=self._drawing, rounds=first[1], is_lazy=False).exchange(rank) for rank in first[0]
        )
        windows_bytes = max(1, limit_bytes - exchange)
        windows, rounds = self._cut(windows_bytes // 2, limit_bytes)
        needs = Needs(drawing=self._drawing, rounds=rounds, is_lazy=False)
        return _Through(
            limit_bytes=limit_bytes,
            own=windows[self._member.rank],
            rounds=rounds,
            windows_bytes=windows_bytes,
            exchange_bytes=needs.exchange(self._member.rank),
        )

    def _cut(self, window_bytes: int, limit_bytes: int) -> tuple[dict[int, list[Window]], list[list[Batch]]]:
        """Windows by writer, and the exchanges that fill them."""
        windows = {writer: windows_of(self._files_of(writer), window_bytes) for writer in self._writers_met()}
        turn_bytes = max(1, limit_bytes // _TURN_PART)
        batches = [
            [
                batch
                for number, window in enumerate(cut)
                for batch in batched(
                    writer, number, self._steps(window.entries, all_of_them=True), self._sizes, turn_bytes
                )
            ]
            for writer, cut in windows.items()
        ]
        return windows, in_rounds(batches)

    def _fingerprint_of(self) -> str:
        drawing = self._drawing
        digest = hashlib.sha256(drawing.layout.fingerprint.encode())
        known = (drawing.writers, bool(self._optimizers), len(drawing.conversion.units), self._any_spread)
        digest.update(repr(known).encode())
        if self._any_spread:
            digest.update(bytes(drawing.is_spread))
        if drawing.conversion.converts:
            digest.update(repr(drawing.conversion.sources).encode())
        return digest.hexdigest()


def _is_nccl(group: Any, device: torch.device) -> bool:
    distributed = distributed_module()
    try:
        name = (group or distributed.group.WORLD)._get_backend(device).name()
    except RuntimeError:
        return False  # the group knows no such device
    return bool(name == "nccl")


# All ranks of a group stage the same saves in the same order, so they count alike.
_staged: weakref.WeakKeyDictionary[Any, itertools.count[int]] = weakref.WeakKeyDictionary()


def _next_tag(group: Any) -> int:
    """Where the tags of one save begin, so that they are not those of another that is still being gathered."""
    return next(_staged.setdefault(group, itertools.count())) % 1024 << 20
