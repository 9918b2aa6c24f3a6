"""Gathers sharded tensors on the ranks that write them.

A part of a tensor travels once, from the rank that holds it to the writer: between devices over the caller's group, or
through host memory. The writers receive in rounds of a bounded size, so that a rank holds one round beside its files.

Invariants:
    - The schedule is arithmetic on facts that all ranks know, so all ranks compute the same.
    - All ranks go through the same rounds. An error between exchanges is raised after the last round.
    - An error of an exchange itself is raised at once. It closes the exchange group, so that no rank waits for this
      one; the caller's group stays open.
"""

from __future__ import annotations

import contextlib
import math
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from tundish.checkpoint.buffers import Buffer
from tundish.checkpoint.copies import BufferCopy, Copies, EagerCopy
from tundish.checkpoint.hf.conversion import ConversionUnit
from tundish.checkpoint.hf.plan import ExportPlan
from tundish.checkpoint.hf.safetensors import ShardFile
from tundish.checkpoint.placements import RankPart, rank_parts_of, rectangles
from tundish.checkpoint.tensors import check_memory
from tundish.distributed import Voter, second_client, store_load_factor, temporary_group, torch_distributed
from tundish.errors import InvalidInputError, PeerFailedError
from tundish.tensor_bytes import raw_bytes

# How long ranks, which come from a vote, wait for one another to connect; more for many ranks, which share the store.
_CONNECT_SECONDS = 60.0
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
            _run_on_host(operations, self._transport)
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


def _run_on_host(operations: Sequence[Any], transport: TensorTransport) -> None:
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
            if transport.connection is None:
                work.wait()
            else:
                work.wait(transport.connection.timeout)
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


# Bytes that a writer receives in one round, unless one unit is larger.
ROUND_BYTES = 64 << 20

# Dtype and shape of a rank's part of a source.
Snapshot = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class GatherUnit:
    """A unit, and the numbers of those of its products that a writer needs."""

    unit: ConversionUnit
    products: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GatherBatch:
    """The items of one writer in one round. `writer`: its rank in the job."""

    writer: int
    items: tuple[GatherUnit, ...]

    def sources(self) -> Iterator[tuple[GatherUnit, int]]:
        """Each source of each item."""
        return ((item, source) for item in self.items for source in item.unit.sources)


def gather_rounds(plan: ExportPlan, writers: Sequence[int]) -> list[list[GatherBatch]]:
    """The rounds of an export: in each, every writer that is not done receives its next batch.

    Only tensors that are sharded or converted take part.
    """
    if not plan.any_sharded and not plan.conversion.converts:
        return []
    sizes = [math.prod(shape) * dtype.itemsize for _, shape, dtype in plan.conversion.sources]
    batches = [list(_batches(plan, writer, sizes)) for writer in writers]
    count = max(map(len, batches), default=0)
    return [[batch[number] for batch in batches if number < len(batch)] for number in range(count)]


def snapshots(plan: ExportPlan, rounds: Sequence[Sequence[GatherBatch]], rank: int) -> dict[int, Snapshot]:
    """The parts of sources, by their numbers, that `rank` has to keep until a lazy save gathers them."""
    needed: dict[int, Snapshot] = {}
    for batch in (batch for batches in rounds for batch in batches):
        for item, source in batch.sources():
            shape = _sent_shape(plan, rank, batch.writer, source)
            if shape is not None:
                needed[source] = plan.sent_dtype(item.unit, source), shape
    return needed


def exchange_bytes(plan: ExportPlan, rounds: Sequence[Sequence[GatherBatch]], rank: int) -> int:
    """Most bytes that exchanges and conversions take beside the files, in any round.

    Staging takes no more, except for memory that a conversion needs beside its sources and products.
    """
    return max((sum(_batch_bytes(plan, batch, rank) for batch in batches) for batches in rounds), default=0)


def _batches(plan: ExportPlan, writer: int, sizes: Sequence[int]) -> Iterator[GatherBatch]:
    taken: list[GatherUnit] = []
    filled = 0
    for item in _items(plan, writer):
        size = sum(sizes[source] for source in item.unit.sources)
        if taken and filled + size > ROUND_BYTES:
            yield GatherBatch(writer=writer, items=tuple(taken))
            taken, filled = [], 0
        taken.append(item)
        filled += size
    if taken:
        yield GatherBatch(writer=writer, items=tuple(taken))


def _items(plan: ExportPlan, writer: int) -> list[GatherUnit]:
    """All units in the files of `writer` that are sharded or converted."""
    wanted: dict[int, tuple[ConversionUnit, list[int]]] = {}
    for file in plan.files_of(writer):
        for product in file.products:
            unit = plan.conversion.unit_of[product]
            if not plan.is_direct(unit):
                wanted.setdefault(id(unit), (unit, []))[1].append(product)
    return [GatherUnit(unit=unit, products=tuple(products)) for unit, products in wanted.values()]


def _batch_bytes(plan: ExportPlan, batch: GatherBatch, rank: int) -> int:
    if batch.writer != rank:
        # A part may have to be converted, or made contiguous, before it is sent.
        return sum(
            math.prod(shape) * plan.sent_dtype(item.unit, source).itemsize
            for item, source in batch.sources()
            if (shape := _sent_shape(plan, rank, batch.writer, source)) is not None
        )
    made = [product for item in batch.items if item.unit.convert for product in item.unit.products]
    taken = sum(map(plan.product_bytes, made))
    for item, source in batch.sources():
        if plan.is_sharded[source]:
            # Parts that are not contiguous in the tensor arrive beside it, and a converted tensor beside the file.
            tensors = 2 if item.unit.convert else 1
            taken += tensors * plan.tensors[source].numel() * plan.sent_dtype(item.unit, source).itemsize
    return taken


def _sent_shape(plan: ExportPlan, rank: int, writer: int, source: int) -> tuple[int, ...] | None:
    """The shape of the part of a source that `rank` gives to `writer`; None if it gives none."""
    tensor = plan.tensors[source]
    if not plan.is_sharded[source]:
        return tuple(tensor.shape) if rank == writer else None
    shapes = [rank_part.shape for rank_part in rank_parts_of(tensor, writer) if rank_part.rank == rank]
    return shapes[0] if shapes else None


# Message tags of one save; tags have 31 bits.
TAGS = 1 << 20
_SAVES = 1 << 11
_HOST = torch.device("cpu")


class ExchangeGroup:
    """A gloo group of the ranks of a checkpointer, made by the first save whose tensors travel through host memory.

    A gloo group has a connection between every two ranks, so a checkpointer that needs none never makes it. A rank that
    gives up in the middle of an exchange closes its connection, so that the other ranks fail at once; the next save
    connects again.

    Args:
        voter: of the members, on the caller's thread. An exchange waits for the other ranks as long as a vote.

    Attributes:
        connection: None before `connect`.
    """

    def __init__(self, voter: Voter) -> None:
        self._voter = voter
        self.connection: HostConnection | None = None

    @property
    def is_connected(self) -> bool:
        """Whether this rank has a connection that is open."""
        return self.connection is not None and self.connection.is_open

    def connect(self, name: str) -> None:
        """Collective: connect anew, under a `name` that was never used before."""
        self.close()
        what = "connecting the ranks, which exchange tensors"
        # gloo holds the thread that connects, even against Ctrl-C.
        self.connection = self._voter.run(lambda: self._connected(name), what=what, undo=HostConnection.close)

    def _connected(self, name: str) -> HostConnection:
        with contextlib.ExitStack() as resources:
            # gloo blocks the client of the job's store while it waits for a rank, so the group has its own.
            client = second_client(torch_distributed().distributed_c10d._get_default_store())
            # The group's reference to the client is not visible to Python.
            resources.callback(id, client)
            ranks, timeout = self._voter.ranks, self._voter.timeout
            limit = min(timeout, _CONNECT_SECONDS * store_load_factor(len(ranks)))
            group = resources.enter_context(temporary_group(name, limit, ranks, store=client))
            return HostConnection(group, timeout, resources.pop_all())

    def close(self) -> None:
        """Close the connection; ranks that wait in it for this one fail at once."""
        if self.connection is not None:
            self.connection.close()


class HostConnection:
    """The gloo group of some saves. Sockets close with its last reference, so that nobody keeps one for long.

    Attributes:
        timeout: how long an exchange waits for the other ranks.
    """

    def __init__(self, group: Any, timeout: float, resources: contextlib.ExitStack) -> None:
        self._group = group
        self.timeout = timedelta(seconds=timeout)
        self._resources = resources
        # A background thread may close it while the caller's thread does.
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether it was not closed."""
        return self._group is not None

    @property
    def group(self) -> Any:
        """The `ProcessGroup`; raises `PeerFailedError` if it was closed."""
        group = self._group
        if group is None:
            raise PeerFailedError(
                "a rank gave up while the ranks exchanged tensors: its own error says why", -1
            )
        return group

    def close(self) -> None:
        """Close it; the second time does nothing."""
        with self._lock:
            self._group = None
            self._resources.close()


@dataclass(frozen=True, kw_only=True)
class TensorTransport:
    """How parts travel.

    Attributes:
        connection: for parts that travel through host memory. None: they travel over `callers_group`, on the caller's
            thread.
        callers_group: the process group of the user.
        device: parts are sent from here and received here.
        tag: the first message tag; no two saves at a time have the same.
    """

    connection: HostConnection | None = None
    callers_group: Any = None
    device: torch.device = _HOST
    tag: int = 0

    @property
    def group(self) -> Any:
        """The `ProcessGroup`; raises `PeerFailedError` if it was closed."""
        return self.callers_group if self.connection is None else self.connection.group

    def close(self) -> None:
        """Close the connection in the middle of an exchange, so that the other ranks fail at once."""
        if self.connection is not None:
            self.connection.close()


def device_transport(group: Any, device: torch.device) -> TensorTransport:
    """Collective over `group`, which joins devices, on the caller's thread: between devices."""
    # NCCL connects at the first call, which all ranks of the group have to make.
    torch_distributed().all_reduce(torch.zeros(1, device=device), group=group)
    return TensorTransport(callers_group=group, device=device)


def host_transport(connection: HostConnection, number: int) -> TensorTransport:
    """Through host memory. `number`: of the save, different from one that still travels."""
    return TensorTransport(connection=connection, tag=number % _SAVES * TAGS)


def joins_devices(group: Any, device: torch.device) -> bool:
    """Whether `group` sends between CUDA devices; not collective."""
    if device.type != "cuda":
        return False
    distributed = torch_distributed()
    try:
        name = (group or distributed.group.WORLD)._get_backend(device).name()
    except RuntimeError:
        return False  # the group knows no such device
    return bool(name == "nccl")


# Most bytes of running copies from devices, unless one product is larger: they take memory on the device.
_MOST_RUNNING_BYTES = 2 * ROUND_BYTES


class FileSink:
    """Copies products to their places in files.

    Args:
        files: this rank's.
        buffers: of the files, in order.
        copies: gets the copies from devices.
    """

    def __init__(self, files: Sequence[ShardFile], buffers: Sequence[Buffer], copies: Copies) -> None:
        self._places = {
            product: (buffer, place)
            for file, buffer in zip(files, buffers, strict=True)
            for product, place in zip(file.products, file.places, strict=True)
        }
        self._copies = copies
        # The copies that may still run, and the bytes of each.
        self._running: deque[tuple[EagerCopy, int]] = deque()
        self._running_bytes = 0

    def view_of(self, product: int) -> torch.Tensor:
        """The place of a product in host memory."""
        buffer, place = self._places[product]
        return buffer.view(place)

    def put(self, product: int, tensor: torch.Tensor) -> None:
        """Copy a whole product to its place; from a CUDA device, queue the copy."""
        buffer, place = self._places[product]
        copy = EagerCopy([BufferCopy(buffer=buffer, places=[place], sources=[tensor], names=["a product"])])
        if tensor.is_cuda:
            self._copies.add(copy)
        copy.run()
        copy.hold_up_streams()
        if tensor.is_cuda:
            self._running.append((copy, tensor.nbytes))
            self._running_bytes += tensor.nbytes
            self.wait(_MOST_RUNNING_BYTES)

    def wait(self, most: int = 0) -> None:
        """Block until at most this many bytes are still copied."""
        while self._running_bytes > most:
            copy, size = self._running[0]
            copy.wait(None)
            self._running.popleft()
            self._running_bytes -= size
