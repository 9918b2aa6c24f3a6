"""The floors: `Tensor.copy_`, bare copies and bare writes of the same bytes."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from checkpoint.contestants import State
from checkpoint.contestants.safetensors_saves import Done
from checkpoint.state import local, whole_of
from tundish._native import FileImage
from tundish.checkpoint.tensors import INSPECTOR


class EagerCopy:
    """The floor of a stall: `Tensor.copy_` of the same tensors into buffers that were used before."""

    def __init__(self, root: Path, state: State) -> None:
        self._buffers = whole_of(state)
        self._pairs = [(local(self._buffers[name]), local(state[name])) for name in state]

    def save(self, folder: Path, state: State) -> Done:
        for target, source in self._pairs:
            target.copy_(source)
        return Done()

    def read(self, folder: Path, state: State) -> State:
        return self._buffers

    def close(self) -> None:
        pass


class BareCopies:
    """The floor of a stall: one call of tundish's own copy, of the same bytes into memory that was used before.

    Past the caches and on all processors, which takes less time than `Tensor.copy_`. Nothing is planned or named.
    """

    def __init__(self, root: Path, state: State) -> None:
        self._sources = [local(tensor) for tensor in state.values()]
        ends = list(itertools.accumulate(source.nbytes for source in self._sources))
        self._image = FileImage(ends[-1])
        self._places = [
            (end - source.nbytes, end, source.dtype) for source, end in zip(self._sources, ends, strict=True)
        ]
        self._threads = torch.get_num_threads()

    def save(self, folder: Path, state: State) -> Done:
        copy = self._image.begin_copy(self._places, self._sources, self._threads, INSPECTOR)
        copy.finish()
        if copy.left:
            raise RuntimeError("a tensor cannot be copied as it lies in memory")
        return Done()

    def read(self, folder: Path, state: State) -> State:
        read = whole_of(state)
        for name, (start, end, _) in zip(state, self._places, strict=True):
            memory = torch.frombuffer(self._image, dtype=torch.uint8, count=end - start, offset=start)
            local(read[name]).view(-1).view(torch.uint8).copy_(memory)
        return read

    def close(self) -> None:
        pass


class DirectWrites:
    """The floor of a durable save: bytes that lie ready in memory go to one preallocated file a rank.

    Past the page cache where the file system lets them, from a few threads, and an fsync. Nothing is copied, named or
    checked.
    """

    _THREADS = 8
    _PIECE = 8 << 20

    def __init__(self, root: Path, state: State) -> None:
        root.mkdir(exist_ok=True)
        self._rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        is_sharded = any(hasattr(tensor, "to_local") for tensor in state.values())
        self._files = [list(state)] if is_sharded else [list(state)[rank::world] for rank in range(world)]
        self._own = 0 if is_sharded else self._rank
        size = sum(local(state[name]).nbytes for name in self._files[self._own])
        self._memory = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        for name, place in self._places(self._own, self._memory, state):
            place.copy_(local(state[name]).view(-1))

    def save(self, folder: Path, state: State) -> Done:
        folder.mkdir(exist_ok=True)
        descriptor = _open_direct(folder / str(self._rank))
        try:
            os.posix_fallocate(descriptor, 0, len(self._memory))
            with ThreadPoolExecutor(self._THREADS) as threads, memoryview(self._memory) as memory:

                def write(start: int) -> None:
                    piece = memory[start : start + self._PIECE]
                    if os.pwrite(descriptor, piece, start) != len(piece):
                        raise OSError(errno.EIO, "a short write", folder)

                list(threads.map(write, range(0, len(self._memory), self._PIECE)))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        return Done()

    def read(self, folder: Path, state: State) -> State:
        read = whole_of(state)
        for rank in range(len(self._files)):
            with (folder / str(rank if len(self._files) > 1 else self._rank)).open("rb") as file:
                content = bytearray(file.read())
            for name, place in self._places(rank, content, state):
                local(read[name]).view(-1).copy_(place)
        return read

    def _places(
        self, rank: int, memory: bytearray | mmap.mmap, state: State
    ) -> Iterator[tuple[str, torch.Tensor]]:
        at = 0
        for name in self._files[rank]:
            tensor = local(state[name])
            yield name, torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=at)
            at += tensor.nbytes

    def close(self) -> None:
        pass


def _open_direct(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        path.unlink(missing_ok=True)
        return os.open(path, flags, 0o644)
