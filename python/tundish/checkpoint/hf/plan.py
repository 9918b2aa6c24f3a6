"""Hugging Face exports: what one save will write, and its staging.

What always holds: making a plan is no collective; staging goes through the same exchanges on all ranks, and ends on
all of them, whatever fails on one.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tundish.checkpoint.buffers import Buffer
from tundish.checkpoint.hf.conversion import ToHf, Unit
from tundish.checkpoint.hf.drawing import Drawing, draw
from tundish.checkpoint.hf.export import ImageSink, StagedExport
from tundish.checkpoint.hf.gather import TURN_BYTES, Batch, Gather, Step, Wire, batched, in_rounds
from tundish.checkpoint.hf.images import FileImage
from tundish.checkpoint.hf.shards import Entry, ShardFile
from tundish.checkpoint.hf.sidecars import Sidecars, gather_sidecars
from tundish.checkpoint.hf.through import WindowSink, WrittenExport, windows_of
from tundish.checkpoint.placements import shares_for
from tundish.checkpoint.saves import DEFAULT_SHARD_BYTES, PlannedFile, Staging, WriteOptions
from tundish.checkpoint.staging import Pair, begin_copies, optimizers_of
from tundish.checkpoint.tensors import local_of
from tundish.distributed.groups import Membership, membership
from tundish.distributed.jobstore import distributed_module
from tundish.errors import InvalidInputError

__all__ = ["HfPlan", "plan_hf"]

# Buffers begin at multiples of this, so that any dtype can be seen in them.
_ALIGNMENT = 64
_HOST = torch.device("cpu")


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
    background_group: Any = None,
) -> HfPlan:
    """Plan a Hugging Face export. On every rank of `group`; no collective, and without a side effect.

    Args:
        model_or_tensors, config, tokenizer, dtype, shard_bytes, source_dir, to_hf, staging, optimizer: as
            `Checkpointer.save_hf` takes them.
        group: the ranks that save together (None: all ranks of the job). Tensors of a CUDA device travel through
            it, on the caller's thread.
        background_group: a gloo group of the same ranks that nothing else uses, for all other exchanges.

    Raises:
        InvalidTypeError: for what is no tensor, or of a kind or dtype that cannot be saved; for arguments of other
            types.
        InvalidInputError: for names, layouts and values that cannot be used; lazy staging without an optimizer.
        NotFoundError: `source_dir` is no folder.
        Whatever `to_hf` raises, and the `save_pretrained` of a config that cannot be saved.
    """
    if staging not in ("eager", "lazy"):
        raise InvalidInputError(f'staging is {staging!r}: give "eager" or "lazy"')
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
        optimizers=optimizers_of(optimizer) if staging == "lazy" else (),
        group=group,
        background_group=background_group,
    )


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
        background_group: Any,
    ) -> None:
        self._drawing = drawing
        self._member = member
        self._sidecars = sidecars
        self._optimizers = optimizers
        self._group = group
        self._background_group = background_group
        self._local = [local_of(tensor) for tensor in drawing.tensors]
        self._any_spread = any(drawing.is_spread)
        files = list(zip(drawing.layout.files, drawing.writers, strict=True))
        self._own = [file for file, writer in files if writer == member.rank]
        self._rounds = in_rounds([list(self._batches_of(writer)) for writer in self._writers_met()])
        self._snapshots = self._snapshots_needed() if optimizers else {}
        self._images: list[FileImage] = []
        self._held: list[Buffer] = []
        self.files = tuple(
            [
                PlannedFile(name=file.name, size=file.size, rank=member.ranks.index(writer))
                for file, writer in files
            ]
        )
        self.staged_bytes = (
            sum(file.size for file in self._own)
            + sum(_room_for(*known) for known in self._snapshots.values())
            + self._scratch_bytes()
        )
        self.written_bytes = (
            sum(file.size for file, _ in files)
            + len(drawing.layout.index or b"")
            + (0 if sidecars is None else sidecars.size)
        )
        self.fingerprint = self._fingerprint_of()

    def reserve(self) -> None:
        """Take the memory for this rank's files, and for what it sends later."""
        is_pinned = any(tensor.is_cuda for tensor in self._local)
        for file in self._own:
            self._images.append(FileImage(file, self._drawing.products, is_pinned=is_pinned))
        size = sum(_room_for(*known) for known in self._snapshots.values())
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

    def write_through(self, folder: Path, options: WriteOptions, limit_bytes: int) -> WrittenExport:
        """Write while tensors are still being taken, in host memory of up to `limit_bytes`.

        Instead of `reserve` and `stage`, for saves larger than the memory there is; a lazy one becomes an eager one. On
        the caller's thread, collective where tensors are spread over ranks. When it returns, nothing that the
        caller does to the model changes what is saved, and the end of the files is still being written.

        What fails on this rank is raised at the end, after all exchanges. A tensor that is larger than the limit
        takes its own size.
        """
        files_of = {writer: self._files_of(writer) for writer in self._writers_met()}
        windows = {writer: windows_of(files, limit_bytes // 2) for writer, files in files_of.items()}
        rounds = in_rounds(
            [
                [
                    batch
                    for number, window in enumerate(windows[writer])
                    for batch in batched(
                        writer, number, self._steps(window.entries, all_of_them=True), self._sizes
                    )
                ]
                for writer in windows
            ]
        )
        sink = WindowSink(windows[self._member.rank], self._drawing.products, folder, options, limit_bytes)
        try:
            self._gather(self._local, self._wire(is_background=False)).run(rounds, sink)
        except BaseException:
            sink.abort()
            raise
        return WrittenExport(sink=sink, sidecars=self._sidecars, weights=[file.name for file in self.files])

    def release(self) -> None:
        """Give back what was reserved and not staged."""
        for buffer in (*self._images, *self._held):
            buffer.release()
        self._images, self._held = [], []

    # ---- Staging ----

    def _stage(self, images: list[FileImage], held: list[Buffer]) -> StagedExport:
        sink = ImageSink(images)
        local, gather = self._local, None
        pairs, names = self._direct_pairs(images)
        if self._optimizers:
            local = self._add_snapshots(held, pairs, names)
        if self._rounds:
            exchange = self._gather(local, self._wire(is_background=bool(self._optimizers)))
            gather = functools.partial(exchange.run, self._rounds, sink)
            if not self._optimizers:
                # Before anything else can fail, since other ranks take part.
                gather()
                gather = None
        copies = begin_copies(pairs, names, self._optimizers)
        return StagedExport(
            images=images,
            held=held,
            copies=[*copies, *sink.copies],
            gather=gather,
            sidecars=self._sidecars,
            weights=[file.name for file in self.files],
        )

    def _direct_pairs(self, images: Sequence[FileImage]) -> tuple[list[Pair], list[str]]:
        """Places and tensors that need neither other ranks nor a conversion, and the names of the tensors."""
        pairs: list[Pair] = []
        names: list[str] = []
        unit_of, sources = self._drawing.conversion.unit_of, self._drawing.conversion.sources
        for image in images:
            for entry, view in zip(image.file.entries, image.views(), strict=True):
                unit = unit_of[entry.product]
                if self._is_direct(unit):
                    pairs.append((view, self._local[unit.sources[0]]))
                    names.append(sources[unit.sources[0]][0])
        return pairs, names

    def _add_snapshots(
        self, held: Sequence[Buffer], pairs: list[Pair], names: list[str]
    ) -> list[torch.Tensor]:
        """What this rank will give of each source, in its own memory; it has yet to be copied there."""
        given = list(self._local)
        at = 0
        for source, (dtype, shape) in self._snapshots.items():
            room = _room_for(dtype, shape)
            view = held[0].view(at, at + math.prod(shape) * dtype.itemsize, dtype, shape)
            at += room
            pairs.append((view, self._local[source]))
            names.append(self._drawing.conversion.sources[source][0])
            given[source] = view
        return given

    def _gather(self, local: Sequence[torch.Tensor], wire: Wire) -> Gather:
        return Gather(
            tensors=self._drawing.tensors,
            is_spread=self._drawing.is_spread,
            local=local,
            dtypes=[dtype for _, _, dtype in self._drawing.products],
            rank=self._member.rank,
            wire=wire,
        )

    def _wire(self, *, is_background: bool) -> Wire:
        """How tensors travel: between devices on the caller's thread, else through host memory."""
        if not self._any_spread:
            return Wire(group=None, device=_HOST, tag=0)
        device = next(
            tensor.device
            for tensor, is_spread in zip(self._local, self._drawing.is_spread, strict=True)
            if is_spread
        )
        if device.type == "cuda" and not is_background and _is_nccl(self._group, device):
            # Ranks that send nothing to each other may be the first to use the group, which takes all of them.
            distributed_module().all_reduce(torch.zeros(1, device=device), group=self._group)
            return Wire(group=self._group, device=device, tag=0)
        return Wire(group=self._background_group, device=_HOST, tag=_next_tag(self._background_group))

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

    def _snapshots_needed(self) -> dict[int, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of what this rank has to remember of each source until it can be gathered."""
        needed: dict[int, tuple[torch.dtype, tuple[int, ...]]] = {}
        batches = [batch for turn in self._rounds for batch in turn]
        taken = [
            (batch.writer, step, source)
            for batch in batches
            for step in batch.steps
            for source in step.unit.sources
        ]
        for writer, step, source in taken:
            tensor = self._drawing.tensors[source]
            is_spread = self._drawing.is_spread[source]
            givers = [share.rank for share in shares_for(tensor, writer)] if is_spread else [writer]
            if self._member.rank in givers:
                dtype = tensor.dtype if step.unit.convert else self._drawing.products[step.products[0]][2]
                needed[source] = dtype, tuple(self._local[source].shape)
        return needed

    def _scratch_bytes(self) -> int:
        """Host memory that exchanges and conversions take beside the images, at most."""
        most = 0
        for batch in (batch for turn in self._rounds for batch in turn if batch.writer == self._member.rank):
            made = [product for step in batch.steps if step.unit.convert for product in step.unit.products]
            taken = [
                source
                for step in batch.steps
                for source in step.unit.sources
                if self._drawing.is_spread[source]
            ]
            products = (self._drawing.products[product] for product in made)
            most = max(
                most,
                sum(self._sizes[source] for source in taken)
                + sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in products),
            )
        return most + (TURN_BYTES if self._any_spread else 0)

    def _fingerprint_of(self) -> str:
        drawing = self._drawing
        digest = hashlib.sha256(drawing.layout.fingerprint.encode())
        digest.update(repr((drawing.writers, bool(self._optimizers), len(drawing.conversion.units))).encode())
        digest.update(bytes(drawing.is_spread))
        if drawing.conversion.converts:
            digest.update(repr(drawing.conversion.sources).encode())
        return digest.hexdigest()


def _room_for(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


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
    return 0 if group is None else next(_staged.setdefault(group, itertools.count())) % 1024 << 20
