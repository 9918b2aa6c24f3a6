"""Copies of tensors into host memory: at once, or during the next forward and backward.

Owns when a copy has to be over. What always holds: a copy made at once reads its sources as they are in the order
of the caller's stream, whatever the caller queues afterwards; a copy that runs in the background is over before a step
of the optimizers that own its sources begins, and fails where anything else changed a source before.
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
    check_on_devices,
    copy_from_device,
    copy_on_host,
    filling_of,
    side_stream_of,
)
from tundish.checkpoint.tensors import any_on_cuda, locals_of
from tundish.errors import InvalidInputError, InvalidTypeError, TimedOutError
from tundish.waiting import Moment, run_aside, wait_for

__all__ = ["BackgroundCopy", "Copies", "begin_copies", "optimizers_of", "run_copies"]


class Copies:
    """Copies that are started together. Made on the caller's thread; holds its sources until they are over.

    On CUDA they run on a side stream, after what the caller's stream was given before this was made; a target must be
    pinned for that to be unobtrusive. On the host they take `threads`; None: as many as torch does.
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
        # Of the block that is being copied.
        self._filling: TensorCopy | None = None

    def begin(self) -> None:
        """Have other threads begin with what is on the host, if that is worth them; `run` does the rest."""
        if self._blocks:
            self._filling = filling_of(self._blocks[0], self._threads)

    def run(self) -> None:
        """Copy; returns when all is copied, or queued on a side stream."""
        with torch.no_grad():
            if self._devices:
                check_on_devices(self._blocks)
            for device, ready in zip(self._devices, self._ready, strict=True):
                side = side_stream_of(device)
                # A thread begins on the first device, and goes back there: where this process has nothing else, the
                # runtime takes half a gigabyte for it.
                with torch.cuda.device(device), torch.cuda.stream(side):
                    side.wait_event(ready)
                    try:
                        for block in self._blocks:
                            copy_from_device(device, block, side)
                        self._over.append(side.record_event())
                    except BaseException:
                        # The memory that it copies into is given back next.
                        side.synchronize()
                        raise
            for block in self._blocks:
                # Kept until it is over: `end` gives up what is under way.
                if self._filling is None:
                    self._filling = filling_of(block, self._threads)
                copy_on_host(block, self._filling, self._threads)
                self._filling = None
        if not self._devices:
            self._blocks = ()

    def hold_up_caller(self) -> None:
        """Let the caller's streams wait until the copies are over; the caller itself does not wait."""
        for device, over in zip(self._devices, self._over, strict=False):
            torch.cuda.current_stream(device).wait_event(over)

    def wait(self, deadline: float | None) -> None:
        """Block until all is copied; raises `TimedOutError` at `deadline`, a time of `time.monotonic`."""
        for device, over in zip(self._devices, self._over, strict=False):
            # Asking, too, is on a device.
            with torch.cuda.device(device):
                while not over.query():  # type: ignore[no-untyped-call]  # torch leaves it so
                    if deadline is not None and time.monotonic() > deadline:
                        raise TimedOutError("the device has not copied everything into host memory yet")
                    time.sleep(0.001)
        self._blocks = ()

    def settle(self) -> None:
        """Nothing: whatever the caller does comes after these copies."""

    def confirm(self) -> None:
        """Nothing, as `settle`."""

    def let_go(self) -> None:
        """Nothing: nothing waits for these copies."""

    def end(self) -> None:
        """Copy no more, whether or not it was begun; block until that is so."""
        if self._filling is not None:
            self._filling.give_up()
        self.wait(None)


class BackgroundCopy:
    """Copies on a thread of their own, fenced by the steps of `optimizers`.

    Args:
        blocks: what to copy; sources that the optimizers own.
        optimizers: a step of any of them begins only after the copies.
    """

    def __init__(self, blocks: Sequence[Block], optimizers: Sequence[Any]) -> None:
        # The caller goes on meanwhile, and is not to wait for a processor.
        self._copies = Copies(blocks, max(1, torch.get_num_threads() - 1))
        # Without their buffer, which is given back before the sources are let go of.
        self._watched = [(block.names, block.sources, _versions(block.sources)) for block in blocks]
        self._lock = threading.Lock()
        self._issued = Moment()
        self._error: BaseException | None = None
        self._fences = [_fence_of(optimizer) for optimizer in optimizers]
        self._is_wanted = True
        # Held while it is copied.
        self._copying = threading.Lock()
        # Held until the fences stand, so that no copy runs of which a step does not know.
        self._gate = threading.Lock()
        self._gate.acquire()

    def start(self) -> None:
        """Begin; once."""
        try:
            # First: where no thread can be started, no step waits for one.
            run_aside(self._run)
            for fence in self._fences:
                fence.add(self)
        finally:
            self._gate.release()

    def end(self) -> None:
        """Copy no more, whether or not it was begun; block until that is so."""
        self._is_wanted = False
        with self._copying:
            pass
        self._copies.wait(None)
        self.let_go()

    def fence(self) -> None:
        """Make sure that what the caller does from here on changes nothing of what is copied."""
        wait_for(self._issued.wait)
        self._judge(for_good=True)
        self._copies.hold_up_caller()

    def wait(self, deadline: float | None) -> None:
        """Block until all is copied.

        Raises what went wrong, and `TimedOutError` at `deadline`, a time of `time.monotonic`.
        """
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not wait_for(self._issued.wait, left):
            raise TimedOutError("not everything is copied into host memory yet")
        self._copies.wait(deadline)
        self._judge(for_good=False)
        if self._error is not None:
            self.let_go()
            raise self._error

    def settle(self) -> None:
        """Once `wait` has returned, on the caller's thread: from here on it may change the sources."""
        self._judge(for_good=True)

    def confirm(self) -> None:
        """Once more, when all is written: raise what went wrong.

        torch counts a change when it is made, so one that was being made as the copy ended was not to be seen then.
        """
        self._judge(for_good=True)
        self.let_go()
        if self._error is not None:
            raise self._error

    def let_go(self) -> None:
        """No step has to be held up any more, and no source to be watched."""
        for fence in self._fences:
            fence.discard(self)
        with self._lock:
            self._watched = []

    def _run(self) -> None:
        with self._gate, self._copying:
            try:
                if self._is_wanted:
                    self._copies.run()
            except BaseException as caught:  # noqa: BLE001 (raised where the save is finished)
                self._error = caught
        self._issued.come()

    def _judge(self, *, for_good: bool) -> None:
        """Find whether something changed a source while it was copied. `for_good`: from here on, they may change."""
        with self._lock:
            changed = [
                name
                for names, sources, before in self._watched
                for name, then, now in zip(names, before, _versions(sources), strict=True)
                if then != now
            ]
            if for_good or changed:
                self._watched = []
            if changed:
                self._error = InvalidInputError(
                    f"{', '.join(changed[:3])}{' and more' if changed[3:] else ''} changed while a lazy save copied: "
                    "until the optimizer's step only that step may change parameters, and anything else has to wait "
                    "for the save's staged()"
                )


class _Fence:
    """What stands before the steps of one optimizer."""

    def __init__(self) -> None:
        self._pending: list[BackgroundCopy] = []
        self._lock = threading.Lock()

    def add(self, copy: BackgroundCopy) -> None:
        with self._lock:
            self._pending.append(copy)

    def discard(self, copy: BackgroundCopy) -> None:
        with self._lock:
            if copy in self._pending:
                self._pending.remove(copy)

    def hold(self, *_: Any) -> None:
        with self._lock:
            pending = list(self._pending)
        for copy in pending:
            copy.fence()
            # Only now: where Ctrl-C ended the wait, the next step waits again.
            self.discard(copy)


# A hook cannot be taken off by a thread while a step runs through the hooks: it stays as long as the optimizer.
_fences: weakref.WeakKeyDictionary[Any, _Fence] = weakref.WeakKeyDictionary()
_fences_lock = threading.Lock()


def _fence_of(optimizer: Any) -> _Fence:
    with _fences_lock:
        fence = _fences.get(optimizer)
        if fence is None:
            fence = _fences[optimizer] = _Fence()
            optimizer.register_step_pre_hook(fence.hold)
    return fence


def optimizers_of(optimizer: Any) -> tuple[Any, ...]:
    """The optimizers that a lazy staging is fenced by: one is given, or several.

    Raises `InvalidInputError` where there is none, `InvalidTypeError` for what is no torch optimizer.
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
    blocks: Sequence[Block], optimizers: Sequence[Any], begun: list[Copies | BackgroundCopy]
) -> None:
    """Begin what `run_copies` goes on with; of what the steps of `optimizers` change, nothing yet.

    `begun`: gets what there is to run, or to end, before anything is copied.
    """
    now, later = _divided(blocks, optimizers) if optimizers else (blocks, ())
    copies = Copies(now)
    begun.append(copies)
    if later:
        begun.append(BackgroundCopy(later, optimizers))
    copies.begin()


def run_copies(begun: Sequence[Copies | BackgroundCopy]) -> None:
    """Copy: what the steps of optimizers alone change in the background, all else at once."""
    for copies in begun:
        if isinstance(copies, BackgroundCopy):
            copies.start()
        else:
            copies.run()
            copies.hold_up_caller()


def _divided(blocks: Sequence[Block], optimizers: Sequence[Any]) -> tuple[list[Block], list[Block]]:
    """What has to be copied at once, and what steps of the optimizers alone change."""
    is_stepped = iter(_stepped_by(optimizers, [source for block in blocks for source in block.sources]))
    now, later = [], []
    for block in blocks:
        numbers = range(len(block.sources))
        of_steps = list(itertools.islice(is_stepped, len(numbers)))
        others = list(itertools.compress(numbers, map(operator.not_, of_steps)))
        if others:
            now.append(block.chosen(others))
        if len(others) < len(numbers):
            # Not the parameters themselves, to which somebody may assign other memory.
            stepped = block.chosen(list(itertools.compress(numbers, of_steps)))
            later.append(replace(stepped, sources=list(map(torch.Tensor.detach, stepped.sources))))
    return now, later


def _stepped_by(optimizers: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Which of `tensors` lie in memory that the steps of the optimizers change: of parameters, and of their states."""
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
    # There are several states a parameter, and a save of parameters alone need not look at them.
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
        # Those of inference have none.
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
