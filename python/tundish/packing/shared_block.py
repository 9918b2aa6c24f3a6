"""A plan as one block of bytes, in memory that the ranks of a node share.

The block holds the length of a JSON text in eight bytes, the text, and the columns, each aligned to `ALIGNMENT` bytes.
Processes of one job write and read it; it is never saved.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tundish.shm import SharedArray

__all__ = ["as_block", "columns_in"]

# A cache line.
ALIGNMENT = 64
LENGTH = np.dtype("<u8")
# Bytes that are copied between two ticks.
CHUNK_BYTES = 32 << 20


def as_block(
    metadata: str, columns: list[NDArray[Any]], tick: Callable[[str, int, int], None]
) -> SharedArray:
    """Copy a plan into shared memory.

    Args:
        metadata: The content of `plan.json`.
        columns: The plan's columns; each is removed from the list once it is copied, so that its memory can be freed.
        tick: Receives progress in bytes; an exception that it raises ends the copy.
    """
    from tundish.shm import SharedArray

    index = json.dumps(
        {"metadata": metadata, "columns": [[column.dtype.str, len(column)] for column in columns]}
    ).encode()
    end = LENGTH.itemsize + len(index)
    starts: list[int] = []
    for column in columns:
        starts.append(_aligned(end))
        end = starts[-1] + column.nbytes
    block = SharedArray.create((end,), np.uint8)
    target = block.array
    target[: LENGTH.itemsize] = np.array([len(index)], LENGTH).view(np.uint8)
    target[LENGTH.itemsize : LENGTH.itemsize + len(index)] = np.frombuffer(index, np.uint8)
    for start in starts:
        source = columns.pop(0).view(np.uint8)
        for offset in range(0, len(source), CHUNK_BYTES):
            tick("copying the plan", start + offset, end)
            chunk = source[offset : offset + CHUNK_BYTES]
            target[start + offset : start + offset + len(chunk)] = chunk
    return block


def columns_in(block: NDArray[np.uint8]) -> tuple[str, list[NDArray[Any]]]:
    """Return the metadata and the columns of the plan in a block; the columns keep the block alive."""
    length = int(block[: LENGTH.itemsize].view(LENGTH)[0])
    end = LENGTH.itemsize + length
    index = json.loads(block[LENGTH.itemsize : end].tobytes())
    # A plain array: a view of a part must not be pickled as the whole block.
    plain = np.asarray(block)
    columns = []
    for name, count in index["columns"]:
        dtype, start = np.dtype(name), _aligned(end)
        end = start + count * dtype.itemsize
        columns.append(plain[start:end].view(dtype))
    return index["metadata"], columns


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
