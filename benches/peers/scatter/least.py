"""What any way takes that brings a batch's bytes to its receiver once, and has them read: the limits of a scatter.

`Least` writes them into shared memory and wakes the receiver; `LeastFar` sends them as one message of gloo. Owns memory
that rank 0 and each receiver map, and a pipe for each receiver. What always holds: whatever could be done beforehand
is, though a scatter cannot count on it: the bytes of a batch lie one after the other, its receiver has tensors over the
memory that they come to, and no other batch comes there.

Or, with `torchs_part`, its receiver has new tensors each time, which it makes before the bytes come; and rank 0 has
asked torch about each tensor before it gives any rank anything, because each tensor must be checked before it is sent.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from scatter.batches import tensors_of
from tundish import _native
from tundish.tree import DLPACK_DTYPES, DLPACK_EXCHANGE

__all__ = ["Least", "LeastFar"]

# Bytes: of which a tensor begins at a multiple, and between what one rank and another look at.
_LINE = 64
# What a round is: one as before, or, as anyone who is told so has to get ready, with batches of another kind.
_AGAIN, _NEW = 1, 2
# Bytes. Larger batches are sooner copied past the caches and by several threads, as tundish does, than by a plain copy.
_LARGE = 1 << 25
# How many copy those: nobody else works meanwhile.
_THREADS = len(os.sched_getaffinity(0))


class _Torch:
    """What torch takes for the tensors of batches, by the functions by which it is quickest with many.

    `asked`: those that rank 0 asks about, of each batch; `places`: where a receiver's are in memory of these bytes.
    """

    def __init__(self) -> None:
        self.asked: list[list[torch.Tensor]] = []
        self._plan: _native.TensorPlan | None = None

    def prepare(self, places: _Places) -> None:
        codes = {dtype: code for code, dtype in DLPACK_DTYPES.items()}
        if DLPACK_EXCHANGE is not None:
            self._plan = DLPACK_EXCHANGE.plan(
                [(*codes[dtype], [count], start) for dtype, count, start in places]
            )

    def ask(self) -> None:
        if DLPACK_EXCHANGE is not None:
            for tensors in self.asked:
                DLPACK_EXCHANGE.read(tensors)

    def make(self, memory: NDArray[np.uint8]) -> list[torch.Tensor] | None:
        return None if self._plan is None else self._plan.tensors(memory)


class Least:
    """Collective over all ranks; rank 0 has the batches."""

    def __init__(self, torchs_part: bool = False) -> None:
        self._torch = _Torch() if torchs_part else None
        self._rank, world = dist.get_rank(), dist.get_world_size()
        # Who has a processor to itself looks for its batch until it is there; others sleep.
        self._is_awake = len(os.sched_getaffinity(0)) >= world
        with tempfile.TemporaryDirectory(prefix="tundish-least-", dir="/dev/shm") as own:
            folder = Path(_agreed(own))
            self._words = _shared(folder / "words", world * _LINE).view(np.uint64).reshape(world, -1)
            if self._rank == 0:
                for rank in range(1, world):
                    os.mkfifo(folder / str(rank))
            dist.barrier()
            ranks = [self._rank] if self._rank else range(1, world)
            # For both directions, so that nobody waits for anyone who has the other.
            self._pipes = {rank: os.open(folder / str(rank), os.O_RDWR) for rank in ranks}
            dist.barrier()
        self._seen = 0
        self._batches: list[Any] | None = None
        # Of each receiver, what writes its batch.
        self._copies: dict[int, Callable[[], None]] = {}
        self._arena, self._receiver = _native.SegmentArena(1 << 30), _native.BufferReceiver()
        self._mine: list[torch.Tensor] = []
        self._memory: NDArray[np.uint8] | None = None

    def __call__(self, batches: list[Any] | None) -> Any:
        if batches is None:
            mine = self._made()
            if self._hear() == _NEW:
                self._prepare(None)
                mine = self._made()
                self._hear()
            return mine
        if batches is not self._batches:
            self._batches = batches
            for rank in self._pipes:
                self._tell(rank, _NEW)
            self._prepare(batches)
        if self._torch is not None:
            self._torch.ask()
        for rank, copy in self._copies.items():
            copy()
            self._tell(rank, _AGAIN)
        return batches[0]

    def _made(self) -> list[torch.Tensor]:
        if self._torch is None or self._memory is None:
            return self._mine
        return self._torch.make(self._memory) or self._mine

    def _tell(self, rank: int, what: int) -> None:
        if self._is_awake:
            # Not twice the same in a row.
            self._words[rank, 0] = (int(self._words[rank, 0]) // 4 + 1) * 4 + what
        else:
            os.write(self._pipes[rank], bytes([what]))

    def _hear(self) -> int:
        if not self._is_awake:
            return os.read(self._pipes[self._rank], 1)[0]
        words, seen = self._words[self._rank], self._seen
        while (heard := int(words[0])) == seen:
            os.sched_yield()
        self._seen = heard
        return heard % 4

    def _prepare(self, batches: list[Any] | None) -> None:
        forms = _agreed(None if batches is None else [_form(batch) for batch in batches])
        if self._torch is not None and batches is not None:
            self._torch.asked = [list(tensors_of(batch)) for batch in batches[1:]]
        with tempfile.TemporaryDirectory(prefix="tundish-least-", dir="/dev/shm") as own:
            folder = Path(_agreed(own))
            for rank in range(1, dist.get_world_size()):
                size, places = forms[rank]
                if size < _LARGE:
                    memory = _shared(folder / str(rank), size) if rank in self._pipes else None
                    copy = partial(np.copyto, memory)
                else:
                    memory, copy = self._buffer(rank, size)
                if batches is not None:
                    self._copies[rank] = partial(copy, _contents(batches[rank], size, places))
                    self._copies[rank]()
                elif memory is not None:
                    self._mine, self._memory = _tensors(memory, places), memory
                    if self._torch is not None:
                        self._torch.prepare(places)
            dist.barrier()

    def _buffer(
        self, rank: int, size: int
    ) -> tuple[NDArray[np.uint8] | None, Callable[[NDArray[np.uint8]], None]]:
        """Collective: what the receiver, this rank, reads; and on rank 0 what copies a batch there."""
        buffer = self._arena.take(size) if self._rank == 0 else None
        reference = _agreed(None if buffer is None else buffer.reference())
        view = self._receiver.open(reference) if rank == self._rank else None

        def copy(contents: NDArray[np.uint8]) -> None:
            address, length, start = (np.int64(word).tobytes() for word in (contents.ctypes.data, size, 0))
            buffer.fill(address, length, start, 0, _THREADS)

        return None if view is None else np.frombuffer(view, np.uint8), copy


class LeastFar:
    """Collective over all ranks; rank 0 has the batches, of which `prepare` is told beforehand."""

    def __init__(self, torchs_part: bool = False) -> None:
        self._torch = _Torch() if torchs_part else None
        self._contents: dict[int, torch.Tensor] = {}
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._mine: list[torch.Tensor] = []

    def prepare(self, batches: list[Any] | None) -> None:
        """Collective: batches like these are what comes next."""
        forms = _agreed(None if batches is None else [_form(batch) for batch in batches])
        if batches is None:
            size, places = forms[dist.get_rank()]
            self._memory = torch.zeros(size, dtype=torch.uint8)
            self._mine = _tensors(self._memory.numpy(), places)
            if self._torch is not None:
                self._torch.prepare(places)
            return
        if self._torch is not None:
            self._torch.asked = [list(tensors_of(batch)) for batch in batches[1:]]
        for rank in range(1, dist.get_world_size()):
            self._contents[rank] = torch.from_numpy(_contents(batches[rank], *forms[rank]))

    def __call__(self, batches: list[Any] | None) -> Any:
        if batches is None:
            made = None if self._torch is None else self._torch.make(self._memory.numpy())
            dist.recv(self._memory, src=0)
            return made or self._mine
        if self._torch is not None:
            self._torch.ask()
        for send in [dist.isend(contents, dst=rank) for rank, contents in self._contents.items()]:
            send.wait()
        return batches[0]


# Of each tensor its dtype, how many values, and its first byte.
_Places = list[tuple[torch.dtype, int, int]]


def _contents(batch: Any, size: int, places: _Places) -> NDArray[np.uint8]:
    """The bytes of a batch, one after the other."""
    contents = np.zeros(size, np.uint8)
    for tensor, (_, _, start) in zip(tensors_of(batch), places, strict=True):
        values = tensor.reshape(-1).view(torch.uint8).numpy()
        contents[start : start + values.size] = values
    return contents


def _tensors(memory: NDArray[np.uint8], places: _Places) -> list[torch.Tensor]:
    """Those of a batch whose bytes are in `memory`."""
    return [
        torch.frombuffer(memory, dtype=dtype, count=count, offset=start) for dtype, count, start in places
    ]


def _form(batch: Any) -> tuple[int, _Places]:
    """How many bytes a batch has, one tensor after the other, and where each is."""
    end, places = 0, []
    for tensor in tensors_of(batch):
        places.append((tensor.dtype, tensor.numel(), end))
        end += -(-tensor.nbytes // _LINE) * _LINE
    return end, places


def _agreed(thing: Any) -> Any:
    """What rank 0 has."""
    told = [thing]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def _shared(path: Path, size: int) -> NDArray[np.uint8]:
    """Memory of all who name the same file, from this process's first write on without a fault."""
    memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8).numpy()
    memory |= 0
    return memory
