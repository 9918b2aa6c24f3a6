"""Gathers sharded tensors on the ranks that write them.

A part of a tensor travels once, from the rank that holds it to the writer. The writers receive in rounds of a bounded
size, so that a rank holds one round beside its files.

Invariants:
    - All ranks go through the same rounds. An error between exchanges is raised after the last round.
    - An error of an exchange itself is raised at once. It closes the exchange group, so that no rank waits for this
      one; the caller's group stays open.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from tundish.checkpoint.hf.export_plan import ExportPlan
from tundish.checkpoint.hf.gather.file_sink import FileSink
from tundish.checkpoint.hf.gather.schedule import GatherBatch, GatherUnit
from tundish.checkpoint.hf.gather.transport import TAGS, TensorTransport
from tundish.checkpoint.placements import RankPart, rank_parts_of, rectangles
from tundish.checkpoint.tensors import check_memory
from tundish.distributed import torch_distributed
from tundish.errors import InvalidInputError, PeerFailedError
from tundish.tensor_bytes import raw_bytes

__all__ = ["Gather"]

# How long a rank that gives up waits for the messages that it has started.
_ABORT_WAIT = timedelta(seconds=5)


class Gather:
    """The exchanges of one save on this rank.

    Args:
        plan: the export.
        rounds: the schedule.
        local: this rank's part of each source, on any device.
        rank: this process's rank in the job.
        transport: how parts travel.
        sink: gets this rank's products.
    """

    def __init__(
        self,
        plan: ExportPlan,
        *,
        rounds: Sequence[Sequence[GatherBatch]],
        local: Sequence[torch.Tensor],
        rank: int,
        transport: TensorTransport,
        sink: FileSink,
    ) -> None:
        self._plan = plan
        self._rounds = rounds
        self._local = list(local)
        self._rank = rank
        self._transport = transport
        self._sink = sink
        self._messages = 0

    def run(self) -> None:
        """Go through all rounds, and queue the copies of products on devices. Collective if any tensor is sharded."""
        try:
            error: BaseException | None = self._replace_freed()
            for batches in self._rounds:
                whole = self._exchange(batches, to_files=error is None)
                try:
                    mine = [batch for batch in batches if batch.writer == self._rank and error is None]
                    for item in (item for batch in mine for item in batch.items):
                        self._fill(item, whole)
                except Exception as caught:  # noqa: BLE001 (raised after the last round)
                    error = caught
        except BaseException as caught:
            # The frames keep messages alive, and these keep the group alive.
            traceback.clear_frames(caught.__traceback__)
            self._transport.close()
            raise
        if error is not None:
            raise error

    def wait(self) -> None:
        """Block until all products are in the files."""
        self._sink.wait()

    def abort(self) -> None:
        """Called instead of `run`: ranks that wait for this one fail at once."""
        self._transport.close()

    def _replace_freed(self) -> InvalidInputError | None:
        """Replace parts whose memory was freed since the save was planned; returns an error about one of them.

        Reading freed memory crashes, and the other ranks wait for as many bytes as were planned.
        """
        error = None
        wanted = {source for batches in self._rounds for batch in batches for _, source in batch.sources()}
        for source in sorted(wanted):
            try:
                check_memory(self._plan.conversion.sources[source][0], self._local[source])
            except InvalidInputError as caught:
                error = error or caught
                self._local[source] = torch.empty_like(self._local[source])
        return error

    def _exchange(self, batches: Sequence[GatherBatch], *, to_files: bool) -> dict[int, torch.Tensor]:
        """Send and receive the parts of one round; returns the whole tensors that this rank receives, by source.

        `to_files`: receive into the files where possible.
        """
        sent: list[Any] = []
        incoming: list[_IncomingTensor] = []
        for batch in batches:
            for taken, source in batch.sources():
                if not self._plan.is_sharded[source]:
                    continue
                self._messages += 1
                rank_parts = rank_parts_of(self._plan.tensors[source], batch.writer)
                if batch.writer == self._rank:
                    incoming.append(self._receive(source, taken, rank_parts, to_files=to_files))
                elif any(rank_part.rank == self._rank for rank_part in rank_parts):
                    sent.append(self._operation("isend", self._outgoing(source, taken), batch.writer))
        operations = sent + [operation for tensor_in in incoming for operation in tensor_in.operations]
        if self._transport.device.type == "cpu":
            _run_on_host(operations)
        elif operations:
            for work in torch_distributed().batch_isend_irecv(operations):
                work.wait()
        return {tensor_in.source: tensor_in.whole() for tensor_in in incoming}

    def _receive(
        self, source: int, item: GatherUnit, rank_parts: Sequence[RankPart], *, to_files: bool
    ) -> _IncomingTensor:
        shape, dtype = tuple(self._plan.tensors[source].shape), self._plan.sent_dtype(item.unit, source)
        if item.unit.convert is None and to_files and self._transport.device.type == "cpu":
            target = self._sink.view_of(item.products[0])
        else:
            target = torch.empty(shape, dtype=dtype, device=self._transport.device)
        tensor_in = _IncomingTensor(source, target)
        for rank_part in rank_parts:
            if rank_part.rank == self._rank:
                tensor_in.fill(rank_part, self._local[source])
                continue
            place = tensor_in.place_for(rank_part, dtype)
            tensor_in.operations.append(self._operation("irecv", place, rank_part.rank))
        return tensor_in

    def _outgoing(self, source: int, item: GatherUnit) -> torch.Tensor:
        local = self._local[source].detach()
        return local.to(
            device=self._transport.device, dtype=self._plan.sent_dtype(item.unit, source)
        ).contiguous()

    def _operation(self, kind: str, tensor: torch.Tensor, peer: int) -> Any:
        distributed = torch_distributed()
        # As bytes, since no backend knows all dtypes.
        return distributed.P2POp(
            getattr(distributed, kind),
            raw_bytes(tensor),
            peer,
            group=self._transport.group,
            tag=self._transport.tag + self._messages % TAGS,
        )

    def _fill(self, item: GatherUnit, whole: dict[int, torch.Tensor]) -> None:
        tensors = [whole[source] if source in whole else self._local[source] for source in item.unit.sources]
        if item.unit.convert is None:
            if not (item.unit.sources[0] in whole and tensors[0].device.type == "cpu"):
                self._sink.put(item.products[0], tensors[0])
            return
        made = dict(zip(item.unit.products, item.unit.convert(tensors), strict=True))
        for product in item.products:
            self._sink.put(product, made[product])


def _run_on_host(operations: Sequence[Any]) -> None:
    """Start all operations and wait for them, even after an interrupt: they write to memory of this rank.

    Raises `PeerFailedError` if another rank gave up.
    """
    started: list[Any] = []
    waited = 0
    try:
        started.extend(
            operation.op(operation.tensor, operation.peer, group=operation.group, tag=operation.tag)
            for operation in operations
        )
        for work in started:
            # Before the wait, which cannot be repeated.
            waited += 1
            work.wait()
        return
    except BaseException as error:
        for work in started[waited:]:
            # Another rank that gives up may wait for this one.
            with contextlib.suppress(RuntimeError):
                work.wait(_ABORT_WAIT)
        if not isinstance(error, RuntimeError):
            raise
        peer = operations[waited - 1 if waited else len(started)].peer
        problem = PeerFailedError(f"rank {peer} ended the exchange of tensors: {error}", peer)
    # Outside of the handler, whose error keeps the tensors alive.
    raise problem


class _IncomingTensor:
    """A sharded tensor while its parts arrive."""

    def __init__(self, source: int, target: torch.Tensor) -> None:
        self.source = source
        self.operations: list[Any] = []
        self._target = target
        self._waiting: list[tuple[RankPart, torch.Tensor]] = []

    def fill(self, rank_part: RankPart, local: torch.Tensor) -> None:
        """Copy a part to its place."""
        with torch.no_grad():
            for place, own in rectangles(rank_part.runs):
                self._target[place].copy_(local[own])

    def place_for(self, rank_part: RankPart, dtype: torch.dtype) -> torch.Tensor:
        """Memory to receive a part in: its place if that is contiguous, else other memory."""
        places = list(rectangles(rank_part.runs))
        if len(places) == 1 and self._target[places[0][0]].is_contiguous():
            return self._target[places[0][0]]
        apart = torch.empty(rank_part.shape, dtype=dtype, device=self._target.device)
        self._waiting.append((rank_part, apart))
        return apart

    def whole(self) -> torch.Tensor:
        """The whole tensor, after all parts arrived."""
        for rank_part, apart in self._waiting:
            self.fill(rank_part, apart)
        return self._target
