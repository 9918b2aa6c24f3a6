"""Copies of tensors into host memory: at once (`EagerCopy`), or during the next forward and backward (`LazyCopy`).

Invariants:
    - An eager copy reads its sources as they are in the order of the caller's stream.
    - A lazy copy is over before a step of the optimizers that own its sources begins.
    - A lazy copy fails where anything else changed a source before it was over.
"""

from __future__ import annotations

import itertools
import operator
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tundish._native import TensorCopy
from tundish.checkpoint.staging.tensor_copy import (
    Block,
    begin_host_copy,
    check_on_devices,
    copy_from_device,
    finish_host_copy,
)
from tundish.checkpoint.tensors import any_on_cuda, locals_of
from tundish.errors import InvalidInputError, InvalidTypeError, TimedOutError

__all__ = ["EagerCopy", "LazyCopy", "begin_copies", "optimizers_of", "run_copies"]

# One a device: torch hands out the same 32 streams in turn, and keeps the memory freed on each for that one alone.
_side_streams: dict[torch.device, torch.cuda.Stream] = {}


class EagerCopy:
    """Copies that the caller waits for. Made on the caller's thread; holds its sources until they are copied.

    CUDA sources are copied on a side stream, after everything that the caller's stream was given before. The caller
    does not wait for them where the buffer is pinned.

    Args:
        blocks: what to copy.
        threads: of the copies on the host; None takes as many as torch does.
    """

    def __init__(self, blocks: Sequence[Block], threads: int | None = None) -> None:
        self._blocks = blocks
        self._threads = torch.get_num_threads() if threads is None else threads
        self._devices = sorted(
            {
                source.device
                for block in blocks
                if any_on_cuda(block.sources)
                for source in block.sources
                if source.is_cuda
            },
            key=lambda device: device.index,
        )
        self._ready = [torch.cuda.current_stream(device).record_event() for device in self._devices]
        self._over: list[torch.cuda.Event] = []
        # The copy on the host that is under way.
        self._host_copy: TensorCopy | None = None

    def begin(self) -> None:
        """Let Rust threads begin with the first block; `run` does the rest."""
        if self._blocks:
            self._host_copy = begin_host_copy(self._blocks[0], self._threads)

    def run(self) -> None:
        """Copy; returns when everything is copied, or queued on a side stream."""
        with torch.no_grad():
            if self._devices:
                check_on_devices(self._blocks)
            for device, ready in zip(self._devices, self._ready, strict=True):
                side = _side_stream_of(device)
                with torch.cuda.device(device), torch.cuda.stream(side):
                    side.wait_event(ready)
                    try:
                        for block in self._blocks:
                            copy_from_device(device, block, side)
                        self._over.append(side.record_event())
                    except BaseException:
                        # The caller gives the target memory back next.
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
        for device, over in zip(self._devices, self._over, strict=False):
            torch.cuda.current_stream(device).wait_event(over)

    def wait(self, deadline: float | None) -> None:
        """Block until everything is copied; raises `TimedOutError` at `deadline`, of `time.monotonic`."""
        for device, over in zip(self._devices, self._over, strict=False):
            # A query on another device would take memory there.
            with torch.cuda.device(device):
                while not over.query():  # type: ignore[no-untyped-call]  # torch leaves it so
                    if deadline is not None and time.monotonic() > deadline:
                        raise TimedOutError("the device has not copied everything into host memory yet")
                    time.sleep(0.001)
        self._blocks = ()

    def allow_changes(self) -> None:
        """Nothing to do: the caller's changes come after these copies."""

    def confirm(self) -> None:
        """Nothing to do, as `allow_changes`."""

    def release(self) -> None:
        """Stop copying, and block until that is so."""
        if self._host_copy is not None:
            self._host_copy.give_up()
        self.wait(None)


class LazyCopy:
    """Copies on a background thread, which the steps of `optimizers` wait for.

    Args:
        blocks: what to copy; the sources belong to the optimizers.
        optimizers: a step of any of them begins only after the copies.
    """

    def __init__(self, blocks: Sequence[Block], optimizers: Sequence[Any]) -> None:
        # One processor is left to the training.
        self._copy = EagerCopy(blocks, max(1, torch.get_num_threads() - 1))
        # Without the buffer, which is given back before the sources.
        self._watched = [(block.names, block.sources, _versions(block.sources)) for block in blocks]
        self._lock = threading.Lock()
        self._issued = threading.Event()
        self._error: BaseException | None = None
        self._gates = [_gate_of(optimizer) for optimizer in optimizers]
        self._is_wanted = True
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
            Exception: what copying failed with.
        """
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not self._issued.wait(left):
            raise TimedOutError("not everything is copied into host memory yet")
        self._copy.wait(deadline)
        if self._error is not None:
            raise self._error

    def allow_changes(self) -> None:
        """Look for changes so far; from here on the sources may change."""
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
        """When everything is written: raise what went wrong, changes of the sources included."""
        self.allow_changes()
        if self._error is not None:
            raise self._error

    def release(self) -> None:
        """Stop copying, block until that is so, and hold up no step any more."""
        self._is_wanted = False
        if self._thread is not None:
            self._thread.join()
        self._copy.wait(None)
        for gate in self._gates:
            gate.discard(self)
        with self._lock:
            self._watched = []

    def _run(self) -> None:
        try:
            if self._is_wanted:
                self._copy.run()
        except BaseException as caught:  # noqa: BLE001 (raised where the save is finished)
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
            # Only now: where Ctrl-C ended the wait, the next step waits again.
            self.discard(copy)


# A thread cannot remove a hook while a step runs through the hooks, so it stays as long as the optimizer.
_gates: weakref.WeakKeyDictionary[Any, _StepGate] = weakref.WeakKeyDictionary()
_gates_lock = threading.Lock()


def _gate_of(optimizer: Any) -> _StepGate:
    with _gates_lock:
        gate = _gates.get(optimizer)
        if gate is None:
            gate = _gates[optimizer] = _StepGate()
            optimizer.register_step_pre_hook(gate.hold)
    return gate


def _side_stream_of(device: torch.device) -> torch.cuda.Stream:
    stream = _side_streams.get(device)
    if stream is None:
        made = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it so
        stream = _side_streams.setdefault(device, made)
    return stream


def optimizers_of(optimizer: Any) -> tuple[Any, ...]:
    """The optimizers of a lazy save, from the argument: one, or several.

    Raises:
        InvalidInputError: there is none.
        InvalidTypeError: it is no torch optimizer.
    """
    given = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    if optimizer is None or not given:
        raise InvalidInputError(
            'staging="lazy" copies while training goes on, until the optimizer steps: give optimizer=, or '
            'staging="eager"'
        )
    for one in given:
        if not isinstance(one, torch.optim.Optimizer) or not hasattr(one, "_optimizer_step_pre_hooks"):
            raise InvalidTypeError(
                f"cannot wait for the steps of a {type(one).__name__}: give the torch.optim.Optimizer itself, "
                "without a wrapper"
            )
    return given


def begin_copies(
    blocks: Sequence[Block], optimizers: Sequence[Any], begun: list[EagerCopy | LazyCopy]
) -> None:
    """Begin what `run_copies` goes on with.

    Args:
        blocks: what to copy.
        optimizers: tensors that their steps change are copied lazily, all others eagerly.
        begun: gets the copies, before any of them begins, so that the caller can release them.
    """
    now, later = _divided(blocks, optimizers) if optimizers else (blocks, ())
    copy = EagerCopy(now)
    begun.append(copy)
    if later:
        begun.append(LazyCopy(later, optimizers))
    copy.begin()


def run_copies(begun: Sequence[EagerCopy | LazyCopy]) -> None:
    """Run the eager copies and start the lazy ones."""
    for copy in begun:
        if isinstance(copy, LazyCopy):
            copy.start()
        else:
            copy.run()
            copy.hold_up_streams()


def _divided(blocks: Sequence[Block], optimizers: Sequence[Any]) -> tuple[list[Block], list[Block]]:
    """What has to be copied at once, and what only steps of the optimizers change."""
    is_stepped = iter(_stepped_by(optimizers, [source for block in blocks for source in block.sources]))
    now, later = [], []
    for block in blocks:
        numbers = range(len(block.sources))
        of_steps = list(itertools.islice(is_stepped, len(numbers)))
        others = list(itertools.compress(numbers, map(operator.not_, of_steps)))
        if others:
            now.append(block.chosen(others))
        if len(others) < len(numbers):
            # Detached, since other memory may be assigned to a parameter.
            stepped = block.chosen(list(itertools.compress(numbers, of_steps)))
            later.append(replace(stepped, sources=list(map(torch.Tensor.detach, stepped.sources))))
    return now, later


def _stepped_by(optimizers: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Which of `tensors` share memory with parameters or states of the optimizers."""
    parameters = [
        parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    is_stepped = list(map(set(map(id, parameters)).__contains__, map(id, tensors)))
    if all(is_stepped):
        return is_stepped
    memory = _addresses(tensors)
    stepped = set(_addresses(parameters))
    # A save of parameters alone need not look at the states, of which there are several a parameter.
    if not stepped.issuperset(memory):
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        values = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        stepped |= set(_addresses(values))
    return [address in stepped for address in memory]


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where the memory of each begins."""
    return [storage.data_ptr() for storage in map(torch.Tensor.untyped_storage, locals_of(tensors))]


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        # Inference tensors have no version.
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
