"""Tensors that are spread over ranks, brought together on the rank that writes them.

Owns every exchange of tensors between ranks. What always holds:

1. A tensor travels once, in parts, from the ranks that hold them straight to its writer; no other rank sees the whole
   of it. The writers take turns of a bounded size together, so that a rank holds one turn beside what it writes.
2. All ranks go through the same turns. What fails on one rank between exchanges (a conversion, a full disk) is raised
   there after the last turn. What ends an exchange itself (no memory, Ctrl-C) is raised at once, and with it the
   group is broken off: so no rank waits for one that gave up, but for exchanges between devices, whose group is the
   caller's.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch

from tundish.checkpoint.hf.conversion import Unit
from tundish.checkpoint.hf.gather.transport import TAGS, TensorTransport
from tundish.checkpoint.placements import Share, boxes, shares_for
from tundish.checkpoint.tensors import check_memory
from tundish.distributed import torch_distributed
from tundish.errors import InvalidInputError, PeerFailedError
from tundish.rawbytes import raw_bytes

__all__ = ["TURN_BYTES", "Batch", "Gather", "Sink", "Step", "batched", "in_rounds"]

# What a writer takes in one turn, unless one unit is larger.
TURN_BYTES = 64 << 20
# How long a rank that gives up waits for what it has started.
_GIVING_UP = timedelta(seconds=5)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A unit, and those of its products that are wanted, by number."""

    unit: Unit
    products: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one writer takes in one turn. `writer`: its rank in the job; `window`: where it puts it."""

    writer: int
    window: int
    steps: tuple[Step, ...]


class Sink(Protocol):
    """Where a writer puts products."""

    def turn_to(self, window: int) -> None:
        """What follows belongs into `window`."""

    def view_of(self, product: int) -> torch.Tensor:
        """The place of a product in host memory."""

    def put(self, product: int, tensor: torch.Tensor) -> None:
        """Copy a whole product to its place."""


def batched(
    writer: int, window: int, steps: Sequence[Step], sizes: Sequence[int], turn_bytes: int | None = None
) -> Iterator[Batch]:
    """Cut `steps` into batches of up to `TURN_BYTES`, or `turn_bytes` if less; `sizes`: bytes of all sources."""
    most = TURN_BYTES if turn_bytes is None else min(TURN_BYTES, turn_bytes)
    taken: list[Step] = []
    filled = 0
    for step in steps:
        size = sum(sizes[source] for source in step.unit.sources)
        if taken and filled + size > most:
            yield Batch(writer=writer, window=window, steps=tuple(taken))
            taken, filled = [], 0
        taken.append(step)
        filled += size
    if taken:
        yield Batch(writer=writer, window=window, steps=tuple(taken))


def in_rounds(writers: Sequence[Sequence[Batch]]) -> list[list[Batch]]:
    """The turns of several writers at once: in each, the next batch of every writer that has one."""
    length = max((len(batches) for batches in writers), default=0)
    return [[batches[turn] for batches in writers if turn < len(batches)] for turn in range(length)]


class Gather:
    """The exchange of one save, as one rank takes part in it.

    Args:
        tensors: all sources; those that are spread over ranks are DTensors.
        is_spread: which of the sources those are.
        local: what this rank holds of each source, on any device.
        names: of all sources, for messages.
        dtypes: of all products.
        rank: this process's rank in the job.
        wire: how what is spread travels.
    """

    def __init__(
        self,
        *,
        tensors: Sequence[torch.Tensor],
        is_spread: Sequence[bool],
        local: Sequence[torch.Tensor],
        names: Sequence[str],
        dtypes: Sequence[torch.dtype],
        rank: int,
        wire: TensorTransport,
    ) -> None:
        self._tensors = tensors
        self._is_spread = is_spread
        self._local = local
        self._names = names
        self._dtypes = dtypes
        self._rank = rank
        self._wire = wire
        self._messages = 0

    def run(self, rounds: Sequence[Sequence[Batch]], sink: Sink) -> None:
        """Go through all turns; this rank's products end in `sink`. Collective where something is spread."""
        try:
            error: BaseException | None = self._replace_freed(rounds)
            for batches in rounds:
                error = self._turn(batches, sink, error)
        except BaseException as caught:
            # What waits for memory of this rank holds on to the group.
            traceback.clear_frames(caught.__traceback__)
            self._wire.break_off()
            raise
        if error is not None:
            raise error

    def break_off(self) -> None:
        """Let those fail who wait for this rank, where it does not `run`."""
        self._wire.break_off()

    def _turn(
        self, batches: Sequence[Batch], sink: Sink, error: BaseException | None
    ) -> BaseException | None:
        """One turn, after `error` if there was one; what there is of errors after it."""
        mine = next((batch for batch in batches if batch.writer == self._rank), None)
        try:
            if mine is not None and error is None:
                sink.turn_to(mine.window)
        except Exception as caught:  # noqa: BLE001 (raised after the last turn)
            error = caught
        whole = self._exchange(batches, sink if error is None else None)
        try:
            if mine is not None and error is None:
                for step in mine.steps:
                    self._fill(step, whole, sink)
        except Exception as caught:  # noqa: BLE001 (raised after the last turn)
            error = caught
        return error

    def _replace_freed(self, rounds: Sequence[Sequence[Batch]]) -> InvalidInputError | None:
        """Take memory without values for what was freed since the save was planned, and tell of it.

        Reading it would be a crash, and the other ranks wait for as many bytes as were planned.
        """
        error = None
        wanted = {
            source
            for batches in rounds
            for batch in batches
            for step in batch.steps
            for source in step.unit.sources
        }
        local = list(self._local)
        for source in sorted(wanted):
            try:
                check_memory(self._names[source], local[source])
            except InvalidInputError as caught:
                error = error or caught
                local[source] = torch.empty_like(local[source])
        self._local = local
        return error

    def _exchange(self, batches: Sequence[Batch], sink: Sink | None) -> dict[int, torch.Tensor]:
        """Send what others want of this rank in this turn, and take in what it wants; the whole tensors, by source."""
        sent: list[Any] = []
        arriving: list[_Arrival] = []
        for batch in batches:
            wanted = [(step, source) for step in batch.steps for source in step.unit.sources]
            for taken, source in wanted:
                if not self._is_spread[source]:
                    continue
                self._messages += 1
                shares = shares_for(self._tensors[source], batch.writer)
                if batch.writer == self._rank:
                    arriving.append(self._receive(source, taken, shares, sink))
                elif any(share.rank == self._rank for share in shares):
                    sent.append(self._operation("isend", self._outgoing(source, taken), batch.writer))
        operations = sent + [operation for arrival in arriving for operation in arrival.operations]
        if self._wire.device.type == "cpu":
            _carry_out(operations)
        elif operations:
            for work in torch_distributed().batch_isend_irecv(operations):
                work.wait()
        return {arrival.source: arrival.whole() for arrival in arriving}

    def _receive(self, source: int, step: Step, shares: Sequence[Share], sink: Sink | None) -> _Arrival:
        shape, dtype = tuple(self._tensors[source].shape), self._dtype_on_wire(source, step)
        if step.unit.convert is None and sink is not None and self._wire.device.type == "cpu":
            target = sink.view_of(step.products[0])
        else:
            target = torch.empty(shape, dtype=dtype, device=self._wire.device)
        arrival = _Arrival(source, target)
        for share in shares:
            if share.rank == self._rank:
                arrival.fill(share, self._local[source])
                continue
            place = arrival.place_for(share, dtype)
            arrival.operations.append(self._operation("irecv", place, share.rank))
        return arrival

    def _outgoing(self, source: int, step: Step) -> torch.Tensor:
        local = self._local[source].detach()
        return local.to(device=self._wire.device, dtype=self._dtype_on_wire(source, step)).contiguous()

    def _dtype_on_wire(self, source: int, step: Step) -> torch.dtype:
        """What is saved as it is travels in the dtype of the file, which is often the smaller one."""
        return self._tensors[source].dtype if step.unit.convert else self._dtypes[step.products[0]]

    def _operation(self, kind: str, tensor: torch.Tensor, peer: int) -> Any:
        distributed = torch_distributed()
        # Bytes, since no backend knows all dtypes.
        return distributed.P2POp(
            getattr(distributed, kind),
            raw_bytes(tensor),
            peer,
            group=self._wire.group,
            tag=self._wire.tag + self._messages % TAGS,
        )

    def _fill(self, step: Step, whole: dict[int, torch.Tensor], sink: Sink) -> None:
        tensors = [whole[source] if source in whole else self._local[source] for source in step.unit.sources]
        if step.unit.convert is None:
            if not (step.unit.sources[0] in whole and tensors[0].device.type == "cpu"):
                sink.put(step.products[0], tensors[0])
            return
        made = dict(zip(step.unit.products, step.unit.convert(tensors), strict=True))
        for product in step.products:
            sink.put(product, made[product])


def _carry_out(operations: Sequence[Any]) -> None:
    """Start all operations and wait for them.

    What was started is waited for whatever ends this: while another rank still writes to memory of this one, the group
    lives on, and with it the wait of the others.

    Raises `PeerFailedError` where another rank gave up.
    """
    started: list[Any] = []
    waited = 0
    try:
        started.extend(one.op(one.tensor, one.peer, group=one.group, tag=one.tag) for one in operations)
        for work in started:
            # Before the wait, which cannot be repeated: no signal is handled in between.
            waited += 1
            work.wait()
        return
    except BaseException as error:
        for work in started[waited:]:
            # Another one that gives up may wait for this one; what takes longer ends the group for all.
            with contextlib.suppress(RuntimeError):
                work.wait(_GIVING_UP)
        if not isinstance(error, RuntimeError):
            raise
        peer = operations[waited - 1 if waited else len(started)].peer
        problem = PeerFailedError(f"the exchange of tensors with rank {peer} broke off: {error}", peer)
    # Not from within, where it would hold on to what torch was given.
    raise problem


class _Arrival:
    """A spread tensor while its parts come in."""

    def __init__(self, source: int, target: torch.Tensor) -> None:
        self.source = source
        self.operations: list[Any] = []
        self._target = target
        self._waiting: list[tuple[Share, torch.Tensor]] = []

    def fill(self, share: Share, local: torch.Tensor) -> None:
        """Put a part that is at hand into its place."""
        with torch.no_grad():
            for place, part in boxes(share.runs):
                self._target[place].copy_(local[part])

    def place_for(self, share: Share, dtype: torch.dtype) -> torch.Tensor:
        """Memory that a part may arrive in: its place, where that is one piece."""
        rectangles = list(boxes(share.runs))
        if len(rectangles) == 1 and self._target[rectangles[0][0]].is_contiguous():
            return self._target[rectangles[0][0]]
        apart = torch.empty(share.shape, dtype=dtype, device=self._target.device)
        self._waiting.append((share, apart))
        return apart

    def whole(self) -> torch.Tensor:
        """The whole tensor, once all parts arrived."""
        for share, apart in self._waiting:
            self.fill(share, apart)
        return self._target
