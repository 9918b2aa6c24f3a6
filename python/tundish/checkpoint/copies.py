"""Copies of tensors into host memory: at once (`EagerCopy`), or during the next forward and backward (`LazyCopy`).

Invariants:
    - Bits that are not converted are copied as they are.
    - A copy changes no byte that is used outside of its tensor's place.
    - An eager copy reads its sources as they are in the order of the caller's stream.
    - A lazy copy is over before a step of the optimizers that own its sources begins.
    - A lazy copy fails if anything else changed a source before it was over.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tundish._native import TensorCopy
from tundish.checkpoint.buffers import Buffer
from tundish.checkpoint.tensors import INSPECTOR, any_on_cuda, check_memories, check_memory, locals_of
from tundish.checkpoint.write_plan import Place
from tundish.errors import InvalidInputError, InvalidTypeError, TimedOutError, format_type
from tundish.tensor_bytes import INTEGER_DTYPES


class Copies:
    """All copies of one save."""

    def __init__(self) -> None:
        self._eager: list[EagerCopy] = []
        self._lazy: list[LazyCopy] = []

    def begin(self, blocks: Sequence[BufferCopy], optimizers: Sequence[Any]) -> None:
        """Begin to copy; `run` goes on. Tensors that steps of `optimizers` change are copied lazily."""
        now, later = _divided(blocks, optimizers) if optimizers else (blocks, ())
        # Noted before they begin, so that `release` stops them.
        self._eager.append(EagerCopy(now))
        if later:
            self._lazy.append(LazyCopy(later, optimizers))
        self._eager[-1].begin()

    def run(self) -> None:
        """Run the eager copies and start the lazy ones."""
        for copy in self._eager:
            copy.run()
            copy.hold_up_streams()
        for lazy in self._lazy:
            lazy.start()

    def add(self, copy: EagerCopy) -> None:
        """Take over a copy that the caller runs."""
        self._eager.append(copy)

    def wait(self, timeout: float | None) -> None:
        """Block until everything is copied, up to `timeout` seconds.

        Raises:
            TimedOutError: not everything is copied in time.
            Exception: the error of a copy.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for copy in self._all():
            copy.wait(deadline)

    def allow_changes(self) -> None:
        """Check for changes so far; from here on the sources may change."""
        for lazy in self._lazy:
            lazy.allow_changes()

    def confirm(self) -> None:
        """After everything is written: raise the error of a lazy copy, such as a change of its sources."""
        for lazy in self._lazy:
            lazy.confirm()

    def release(self) -> None:
        """Stop copying, and block until no copy runs. Never raises."""
        for copy in self._all():
            # Its error was raised by `wait`, or the save fails with another one.
            with contextlib.suppress(Exception):
                copy.release()

    def _all(self) -> list[EagerCopy | LazyCopy]:
        return [*self._eager, *self._lazy]


class EagerCopy:
    """A copy that the caller waits for. Made on the caller's thread; holds its sources until they are copied.

    CUDA sources are copied on a side stream, after everything that the caller's stream was given before. The caller
    does not wait for them if the buffer is pinned.

    Args:
        blocks: the tensors and their places.
        threads: for tensors on the host; None takes as many as torch does.
    """

    def __init__(self, blocks: Sequence[BufferCopy], threads: int | None = None) -> None:
        self._blocks = blocks
        self._threads = torch.get_num_threads() if threads is None else threads
        devices = {
            source.device
            for block in blocks
            if any_on_cuda(block.sources)
            for source in block.sources
            if source.is_cuda
        }
        self._devices = sorted(devices, key=lambda device: device.index)
        self._ready = [torch.cuda.current_stream(device).record_event() for device in self._devices]
        self._over: list[torch.cuda.Event] = []
        # The running copy on the host.
        self._host_copy: TensorCopy | None = None

    def begin(self) -> None:
        """Let Rust threads begin with the first block; `run` does the rest."""
        if self._blocks:
            self._host_copy = begin_host_copy(self._blocks[0], self._threads)

    def run(self) -> None:
        """Copy; returns when everything is copied, or queued on a side stream."""
        with torch.no_grad():
            for block in self._blocks if self._devices else ():
                # Before anything is queued: reading freed memory ends the use of the device.
                check_memories(block.names, block.sources)
            for device, ready in zip(self._devices, self._ready, strict=True):
                side = _side_stream_of(device)
                with torch.cuda.device(device), torch.cuda.stream(side):
                    side.wait_event(ready)
                    try:
                        for block in self._blocks:
                            copy_from_device(device, block, side)
                        self._over.append(side.record_event())
                    except BaseException:
                        # The caller releases the target memory next.
                        side.synchronize()
                        raise
            for block in self._blocks:
                if self._host_copy is None:
                    self._host_copy = begin_host_copy(block, self._threads)
                finish_host_copy(block, self._host_copy)
                self._host_copy = None
        if not self._devices:
            self._blocks = ()

    def hold_up_streams(self) -> None:
        """Let the caller's streams wait until the copies are over; the caller itself does not wait."""
        for device, over in self._queued():
            torch.cuda.current_stream(device).wait_event(over)

    def wait(self, deadline: float | None) -> None:
        """Block until everything is copied; raises `TimedOutError` at `deadline`, of `time.monotonic`."""
        for device, over in self._queued():
            # A query with another current device would take memory there.
            with torch.cuda.device(device):
                while not over.query():  # type: ignore[no-untyped-call]  # torch leaves it so
                    if deadline is not None and time.monotonic() > deadline:
                        raise TimedOutError("the device has not copied everything into host memory yet")
                    time.sleep(0.001)
        self._blocks = ()

    def release(self) -> None:
        """Stop copying, and block until no copy runs."""
        if self._host_copy is not None:
            self._host_copy.abort()
        self.wait(None)

    def _queued(self) -> Iterator[tuple[torch.device, torch.cuda.Event]]:
        return zip(self._devices, self._over, strict=False)


class LazyCopy:
    """A copy on a background thread, which the steps of `optimizers` wait for.

    Args:
        blocks: the tensors, which belong to the optimizers, and their places.
        optimizers: a step of any of them begins only after the copy.
    """

    def __init__(self, blocks: Sequence[BufferCopy], optimizers: Sequence[Any]) -> None:
        # One processor is left to the training.
        self._copy = EagerCopy(blocks, max(1, torch.get_num_threads() - 1))
        # Does not keep the buffer alive.
        self._watched = [(block.names, block.sources, _versions(block.sources)) for block in blocks]
        self._lock = threading.Lock()
        self._issued = threading.Event()
        self._error: BaseException | None = None
        self._gates = [_gate_of(optimizer) for optimizer in optimizers]
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to copy; once."""
        for gate in self._gates:
            gate.add(self)
        try:
            thread = threading.Thread(target=self._run, name="tundish-lazy-copy", daemon=True)
            thread.start()
            self._thread = thread
        except RuntimeError:
            self.release()
            raise

    def before_step(self) -> None:
        """Wait until the sources may change, on the thread that changes them."""
        self._issued.wait()
        self.allow_changes()
        self._copy.hold_up_streams()

    def wait(self, deadline: float | None) -> None:
        """Block until everything is copied.

        Raises:
            TimedOutError: at `deadline`, of `time.monotonic`.
            Exception: the error of the copy.
        """
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not self._issued.wait(left):
            raise TimedOutError("not everything is copied into host memory yet")
        self._copy.wait(deadline)
        if self._error is not None:
            raise self._error

    def allow_changes(self) -> None:
        """Check for changes so far; from here on the sources may change."""
        with self._lock:
            changed = [
                name
                for names, sources, before in self._watched
                for name, then, now in zip(names, before, _versions(sources), strict=True)
                if then != now
            ]
            self._watched = []
            if changed:
                self._error = InvalidInputError(
                    f"{', '.join(changed[:3])}{' and more' if changed[3:] else ''} changed while a lazy save copied: "
                    "until the optimizer's step only that step may change parameters, and anything else has to wait "
                    "for the save's staged()"
                )

    def confirm(self) -> None:
        """Raise the error of the copy, including changes of the sources."""
        self.allow_changes()
        if self._error is not None:
            raise self._error

    def release(self) -> None:
        """Block until no copy runs, and hold up no step any more."""
        if self._thread is not None:
            self._thread.join()
        self._copy.wait(None)
        for gate in self._gates:
            gate.discard(self)
        with self._lock:
            self._watched = []

    def _run(self) -> None:
        try:
            self._copy.run()
        except BaseException as caught:  # noqa: BLE001 (raised when the save is finished)
            self._error = caught
        self._issued.set()


class _StepGate:
    """The hook before the steps of one optimizer: it waits for lazy copies."""

    def __init__(self) -> None:
        self._pending: list[LazyCopy] = []
        self._lock = threading.Lock()

    def add(self, copy: LazyCopy) -> None:
        with self._lock:
            self._pending.append(copy)

    def discard(self, copy: LazyCopy) -> None:
        with self._lock:
            if copy in self._pending:
                self._pending.remove(copy)

    def hold(self, *_: Any) -> None:
        with self._lock:
            pending = list(self._pending)
        for copy in pending:
            copy.before_step()
            # Remove after waiting, so that an interrupted wait is repeated.
            self.discard(copy)


# A thread cannot remove a hook while a step runs the hooks, so a hook stays as long as its optimizer.
_gates: weakref.WeakKeyDictionary[Any, _StepGate] = weakref.WeakKeyDictionary()
_gates_lock = threading.Lock()


def _gate_of(optimizer: Any) -> _StepGate:
    with _gates_lock:
        gate = _gates.get(optimizer)
        if gate is None:
            gate = _gates[optimizer] = _StepGate()
            optimizer.register_step_pre_hook(gate.hold)
    return gate


@functools.cache
def _side_stream_of(device: torch.device) -> torch.cuda.Stream:
    """The only side stream of a device: torch keeps memory that is freed on a stream for that stream alone."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it so


def optimizers_of(staging: str, optimizer: Any) -> tuple[Any, ...]:
    """The optimizers whose steps a save holds up, from its arguments: none for an eager save.

    Raises:
        InvalidInputError: `staging` is neither "eager" nor "lazy", or a lazy save has no optimizer.
        InvalidTypeError: `optimizer` is no torch optimizer.
    """
    if staging not in ("eager", "lazy"):
        raise InvalidInputError(f'staging is {staging!r}: give "eager" or "lazy"')
    if staging == "eager":
        return ()
    given = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    if optimizer is None or not given:
        raise InvalidInputError(
            'staging="lazy" copies while training goes on, until the optimizer steps: give optimizer=, or '
            'staging="eager"'
        )
    for candidate in given:
        if not isinstance(candidate, torch.optim.Optimizer) or not hasattr(
            candidate, "_optimizer_step_pre_hooks"
        ):
            raise InvalidTypeError(
                f"cannot wait for the steps of {format_type(candidate)}: give the torch.optim.Optimizer itself, "
                "without a wrapper"
            )
    return given


def _divided(
    blocks: Sequence[BufferCopy], optimizers: Sequence[Any]
) -> tuple[list[BufferCopy], list[BufferCopy]]:
    """The tensors to copy at once, and those that share memory with parameters or states of optimizers."""
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    states = [state.values() for optimizer in optimizers for state in optimizer.state.values()]
    owned = [value for values in (*groups, *states) for value in values if isinstance(value, torch.Tensor)]
    memory = set(_addresses(owned))
    now, later = [], []
    for block in blocks:
        is_owned = [address in memory for address in _addresses(block.sources)]
        if not all(is_owned):
            now.append(block.chosen([number for number, is_later in enumerate(is_owned) if not is_later]))
        if any(is_owned):
            stepped = block.chosen([number for number, is_later in enumerate(is_owned) if is_later])
            # Detached, since other memory may be assigned to a parameter.
            later.append(replace(stepped, sources=[source.detach() for source in stepped.sources]))
    return now, later


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The start of each tensor's storage."""
    return [tensor.untyped_storage().data_ptr() for tensor in locals_of(tensors)]


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    # Inference tensors have no version.
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


# Smaller tensors are packed on the device: one transfer of many costs less than a transfer of each.
_PACKED_BELOW_BYTES = 1 << 20
_MOST_PACKED_BYTES = 16 << 20
# Most bytes between two packed tensors; they are transferred too.
_MOST_GAP_BYTES = 4096
# Every device converts these into each other.
_CONVERTED = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
# Torch copies this much between two checks for signals: some ten milliseconds.
_PIECE_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferCopy:
    """Local tensors and their places in one buffer.

    Attributes:
        buffer: the target.
        places: the place of each tensor, sorted and without overlap.
        sources: the tensors, on any device.
        names: of the tensors, for messages.
        are_gaps_free: whether bytes between the places may be overwritten.
    """

    buffer: Buffer
    places: Sequence[Place]
    sources: Sequence[torch.Tensor]
    names: Sequence[str]
    are_gaps_free: bool = False

    def chosen(self, numbers: Sequence[int]) -> BufferCopy:
        """The block of some of the tensors, by number, in order."""
        if len(numbers) == len(self.sources):
            return self
        return BufferCopy(
            buffer=self.buffer,
            places=[self.places[number] for number in numbers],
            sources=[self.sources[number] for number in numbers],
            names=[self.names[number] for number in numbers],
        )


def copy_from_device(device: torch.device, block: BufferCopy, side: torch.cuda.Stream) -> None:
    """Queue the copies of tensors on `device` on the current stream, which is `side`."""
    for numbers in transfers(block, device):
        sources = [block.sources[number] for number in numbers]
        places = [block.places[number] for number in numbers]
        if len(numbers) == 1:
            # Converted on the device: torch would convert in host memory before the transfer is over.
            ready = sources[0].to(places[0].dtype).resolve_conj().resolve_neg().contiguous()
        else:
            ready = _pack(sources, places, device)
        whole = Place(places[0].start, places[-1].stop, ready.dtype, ready.shape)
        block.buffer.view(whole).copy_(ready, non_blocking=True)
        for source in sources:
            source.record_stream(side)


def transfers(block: BufferCopy, device: torch.device) -> Iterator[list[int]]:
    """The numbers of the tensors of each transfer from `device`: a large one, or small ones that lie close together."""
    packed: list[int] = []
    packed_key, start, end = None, 0, 0
    for number, (place, source) in enumerate(zip(block.places, block.sources, strict=True)):
        if not source.numel():
            continue
        is_here = source.device == device
        key = (source.dtype, place.dtype) if is_here and _can_be_packed(source, place) else None
        gap = place.start - end
        fits = (
            key is not None
            and key == packed_key
            and gap <= (_MOST_GAP_BYTES if block.are_gaps_free else 0)
            and place.stop - start <= _MOST_PACKED_BYTES
        )
        if packed and not fits:
            yield packed
            packed = []
        if not is_here:
            continue
        if not packed:
            packed_key, start = key, place.start
        packed.append(number)
        end = place.stop
    if packed:
        yield packed


def _can_be_packed(source: torch.Tensor, place: Place) -> bool:
    return (
        place.stop - place.start < _PACKED_BELOW_BYTES
        and (source.dtype == place.dtype or {source.dtype, place.dtype} <= _CONVERTED)
        and place.dtype.itemsize in INTEGER_DTYPES
        and source.is_contiguous()
        and not source.is_conj()
        and not source.is_neg()
    )


def _pack(sources: Sequence[torch.Tensor], places: Sequence[Place], device: torch.device) -> torch.Tensor:
    """One tensor on the device that holds all sources as they lie in the buffer, gaps included."""
    dtype = places[0].dtype
    if sources[0].dtype == dtype:
        # As integers, since copies of floats change the bits of NaNs.
        dtype = INTEGER_DTYPES[dtype.itemsize]
        sources = [source.view(dtype) for source in sources]
    # Lengths of sources and of the gaps between them, in turn.
    bounds = [bound - places[0].start for place in places for bound in (place.start, place.stop)]
    lengths = [(stop - start) // dtype.itemsize for start, stop in itertools.pairwise(bounds)]
    flat = torch.empty(sum(lengths), dtype=dtype, device=device)
    torch._foreach_copy_(list(flat.split_with_sizes(lengths)[::2]), [source.view(-1) for source in sources])
    return flat


def begin_host_copy(block: BufferCopy, threads: int) -> TensorCopy:
    """Let Rust threads begin with the tensors on the host that are copied as they are."""
    return block.buffer.image.begin_copy(block.places, block.sources, threads, INSPECTOR)


def finish_host_copy(block: BufferCopy, copy: TensorCopy) -> None:
    """Finish `copy`, and let torch copy the tensors on the host that are converted or not contiguous."""
    copy.finish()
    for number in copy.left:
        source = block.sources[number]
        if not source.is_cuda:
            check_memory(block.names[number], source)
            for target, part in _cut(block.buffer.view(block.places[number]), source.detach()):
                target.copy_(part)


def _cut(target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of parts along the first dimension, of some `_PIECE_BYTES` each."""
    if target.nbytes <= _PIECE_BYTES:
        return iter([(target, source)])
    rows = max(1, len(target) * _PIECE_BYTES // target.nbytes)
    return zip(torch.split(target, rows), torch.split(source, rows), strict=True)
