"""`HfExport`, one Hugging Face export of one rank: from the arguments of `save_hf` to a `WritePlan`.

Invariants:
    - Making one is not collective.
    - Its exchange goes through the same rounds on all ranks, and ends on all of them, even if it fails on one.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tundish.checkpoint.buffers import Buffer
from tundish.checkpoint.copies import Copies, optimizers_of
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
from tundish.checkpoint.hf.safetensors import ShardFile
from tundish.checkpoint.hf.sidecars import Sidecars, collect_sidecars
from tundish.checkpoint.replicas import compare, digest_of
from tundish.checkpoint.tensors import any_on_cuda, locals_of
from tundish.checkpoint.write_plan import (
    DEFAULT_SHARD_BYTES,
    Place,
    PlannedBuffer,
    PlannedFile,
    SmallFile,
    Staging,
    WritePlan,
)
from tundish.distributed import VoteId, Voter, group_info
from tundish.errors import format_count

# Places in a buffer of several tensors are aligned to this, so that any dtype can be viewed in them.
_ALIGNMENT = 64


class HfExport:
    """A `SavePlan` of an export. Its constructor is not collective and has no side effects.

    Args:
        model_or_tensors, config, tokenizer, dtype, shard_bytes, source_dir, to_hf, staging, optimizer: as
            `Checkpointer.save_hf` takes them.
        root: the root, which must not be `source_dir`.
        group: the ranks that save together (None: all ranks of the job). Parts of tensors travel over it between CUDA
            devices, on the caller's thread.
        exchange_group: of the same ranks, for parts that travel through host memory; None for a single rank.
        voter: of the caller's thread; None for a single rank.
        of_first_rank: names of buffers that differ between ranks; the first rank's are saved. The same on all
            ranks; `agree` adds to it.
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
        self._number = 0
        # The connection to close if this rank gives up.
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
        self.fingerprint = self._fingerprint()

    @property
    def needs_ranks(self) -> bool:
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

    def agree(self, vote: VoteId, *, any_needs: bool, do_replicas_differ: bool) -> bool:
        """Collective if a rank needs it: find the tensors that differ, and connect the ranks."""
        self._number = vote.number
        if do_replicas_differ:
            if self._voter is None:
                raise RuntimeError("one rank alone has no replicas")
            named = self._replicas()
            self._of_first_rank.update(
                compare(self._voter, [name for name, _ in named], [one for _, one in named])
            )
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

    def write_plan(self) -> WritePlan:
        """The files of this rank."""
        plan = self._plan
        snapshots = []
        if self._snapshot_bytes:
            snapshots.append(
                PlannedBuffer(
                    size=self._snapshot_bytes,
                    places=self._snapshot_places,
                    sources=[self._local[source] for source in self._snapshot_sources],
                    names=self._names(self._snapshot_sources),
                )
            )
        return WritePlan(
            files=[self._planned_file(file) for file in self._files],
            snapshots=snapshots,
            late_files=None if self._sidecars is None else self._late_files,
            optimizers=self._optimizers,
            is_pinned=any_on_cuda(self._local),
            exchange=self._make_gather if self._rounds else None,
            exchange_bytes=exchange_bytes(plan, self._rounds, self._rank),
            checkpoint_bytes=sum(file.size for file in plan.layout.files)
            + (0 if self._sidecars is None else self._sidecars.size),
        )

    def release(self) -> None:
        """Close the files beside the weights; ranks that wait for this one in an exchange through host memory fail."""
        if self._awaited_in is not None:
            self._awaited_in.close()
        self._awaited_in = None
        if self._sidecars is not None:
            self._sidecars.release()

    def _planned_file(self, file: ShardFile) -> PlannedFile:
        """A file, with those of its tensors that need neither other ranks nor a conversion."""
        units = [self._plan.conversion.unit_of[product] for product in file.products]
        places: Sequence[Place] = file.places
        if self._rounds:
            direct = [number for number, unit in enumerate(units) if self._plan.is_direct(unit)]
            units, places = [units[number] for number in direct], [places[number] for number in direct]
        sources = [unit.sources[0] for unit in units]
        return PlannedFile(
            name=file.name,
            size=file.size,
            places=places,
            sources=[self._local[source] for source in sources],
            names=self._names(sources),
            frames=lambda: [(0, file.header)],
        )

    def _names(self, sources: Sequence[int]) -> list[str]:
        return [self._plan.conversion.sources[source][0] for source in sources]

    def _late_files(self, notes: Sequence[str]) -> Iterable[SmallFile]:  # noqa: ARG002 (the first rank knows all)
        return [] if self._sidecars is None else self._sidecars.contents()

    def _make_gather(self, buffers: Sequence[Buffer], copies: Copies) -> Gather:
        """The exchange of this save. It takes snapshots in place of the tensors that it sends later."""
        given = list(self._local)
        count = len(self._files)
        for buffer in buffers[count:]:
            for source, place in zip(self._snapshot_sources, self._snapshot_places, strict=True):
                given[source] = buffer.view(place)
        gather = Gather(
            self._plan,
            rounds=self._rounds,
            local=given,
            rank=self._rank,
            transport=self._transport(),
            sink=FileSink(self._files, buffers[:count], copies),
        )
        # From here on it closes the connection itself where it fails.
        self._awaited_in = None
        return gather

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
