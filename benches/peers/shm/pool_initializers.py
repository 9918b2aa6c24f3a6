"""Initializers that bind a worker of a standard pool to its task and array, and the calls that use them.

Each contestant has its own way for the array and for results. An array in shared memory stays attached as long as the
worker lives.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np

Task = Callable[[int, np.ndarray], Any]
# Name of a block of multiprocessing.shared_memory, shape and dtype of the array in it.
Placed = tuple[str, tuple[int, ...], np.dtype]

_bound: tuple[Task, np.ndarray]
_block: SharedMemory


def bind(task: Task, array: np.ndarray) -> None:
    """Bind the array as it was inherited or unpickled."""
    global _bound
    _bound = task, array


def bind_file(task: Task, file: Path) -> None:
    """The array in a file, mapped."""
    bind(task, np.load(file, mmap_mode="r"))


def call(item: int) -> Any:
    task, array = _bound
    return task(item, array)


def place(array: np.ndarray) -> tuple[SharedMemory, Placed]:
    """A copy of `array` in a new block."""
    block = SharedMemory(create=True, size=array.nbytes)
    np.ndarray(array.shape, array.dtype, block.buf)[...] = array
    return block, (block.name, array.shape, array.dtype)


def bind_block(task: Task, placed: Placed) -> None:
    """The array in a block that is attached by name."""
    global _block
    name, shape, dtype = placed
    _block = SharedMemory(name)
    bind(task, np.ndarray(shape, dtype, _block.buf))


def call_placing(item: int) -> Any:
    """Return an array through a block of its own; the caller gets its name."""
    result = call(item)
    if not isinstance(result, np.ndarray):
        return result
    block, placed = place(result)
    block.close()
    return placed


def take(placed: Placed) -> np.ndarray:
    """Return a copy of the array in a block, and remove the block: nothing would tell when a view of it ends."""
    name, shape, dtype = placed
    block = SharedMemory(name)
    array = np.ndarray(shape, dtype, block.buf).copy()
    block.close()
    block.unlink()
    return array


def bind_tensor(task: Task, tensor: Any) -> None:
    """The array in a tensor of torch's shared memory."""
    import torch

    # As in the workers of torch's loaders: the threads of the parent do not exist after a fork.
    torch.set_num_threads(1)
    bind(task, tensor.numpy())


def call_tensor(item: int) -> Any:
    """An array goes back as a tensor, which torch.multiprocessing moves to shared memory."""
    import torch

    result = call(item)
    return torch.from_numpy(result) if isinstance(result, np.ndarray) else result
