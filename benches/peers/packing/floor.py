"""The lower bound of a plan in a given order: a compiled loop that reads the lengths in that order and writes arrays.

It cuts nothing, and checks only that every sample exists. The lengths are first copied to two bytes each, so that
caches hold more of them. If caches do not hold them all, each is prefetched before it is read. Both together halve its
time.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

# Of samples or pieces; and of packs, one row an array of the plan.
Column = npt.NDArray[np.int32]
Columns = npt.NDArray[np.int32]
Order = npt.NDArray[np.int64]
Narrow = npt.NDArray[np.uint16]

# Columns with one entry a pack. The dataset ids of a plan of one dataset are zeros, which are not written.
_PACK_COLUMNS = 4
# Caches hold most of fewer lengths, and prefetching takes time.
_PREFETCH_FROM_SAMPLES = 1 << 21
# Samples between the prefetch and the read.
_PREFETCH_DISTANCE = 128


def read_and_write(
    lengths: Column, order: Order, pieces: int, packs: int, threads: int
) -> tuple[int, Column, Columns]:
    """Return the tokens of all samples, `order` padded with zeros, and columns of zeros, in four bytes an entry.

    The arrays have as many entries as those of the plan, in fresh memory. Each of the threads, one or two, takes an
    equal part. Lengths fit two bytes. Raises `ValueError` if the order names a sample that does not exist.
    """
    narrow = np.empty(lengths.size, np.uint16)
    written = np.empty(pieces, np.int32)
    columns = np.empty((_PACK_COLUMNS, packs), np.int32)
    if threads == 1:
        narrow[:] = lengths
        tokens = _loop(narrow, order, written, columns)
    else:
        numba.set_num_threads(threads)
        _copies(lengths, narrow, threads)
        tokens = _loops(narrow, order, written, columns, threads)
    if tokens < 0:
        raise ValueError("the order names a sample that does not exist")
    return tokens, written, columns


@intrinsic  # type: ignore[untyped-decorator]  # numba leaves it so
def _prefetch(_context: Any, lengths: Any, _index: Any) -> tuple[Any, Any]:
    """Prefetch the entry at the index into the second-level cache."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        address = builder.gep(array.data, [arguments[1]])
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        reading, second_level, data = number(0), number(2), number(1)
        builder.call(prefetch, [address, reading, second_level, data])
        return context.get_dummy_value()

    return types.void(lengths, types.intp), generate


@numba.njit(cache=False)  # type: ignore[untyped-decorator]  # as above
def _loop(lengths: Narrow, order: Order, written: Column, columns: Columns) -> int:
    """The tokens; -1 if a sample does not exist."""
    tokens = 0
    prefetched = order.size if lengths.size >= _PREFETCH_FROM_SAMPLES else 0
    for position in range(order.size):
        if position + _PREFETCH_DISTANCE < prefetched:
            _prefetch(lengths, order[position + _PREFETCH_DISTANCE])
        sample = order[position]
        if not 0 <= sample < lengths.size:
            return -1
        tokens += lengths[sample]
        written[position] = sample
    written[order.size :] = 0
    columns[:] = 0
    return tokens


@numba.njit(cache=False, parallel=True)  # type: ignore[untyped-decorator]  # as above
def _copies(lengths: Column, narrow: Narrow, parts: int) -> None:
    for part in numba.prange(parts):
        begin, end = part * lengths.size // parts, (part + 1) * lengths.size // parts
        narrow[begin:end] = lengths[begin:end]


@numba.njit(cache=False, parallel=True)  # type: ignore[untyped-decorator]  # as above
def _loops(lengths: Narrow, order: Order, written: Column, columns: Columns, parts: int) -> int:
    tokens = np.zeros(parts, np.int64)
    for part in numba.prange(parts):
        begin, end = part * order.size // parts, (part + 1) * order.size // parts
        last = written.size if part == parts - 1 else end
        packs = columns.shape[1]
        low, high = part * packs // parts, (part + 1) * packs // parts
        tokens[part] = _loop(lengths, order[begin:end], written[begin:last], columns[:, low:high])
    return tokens.sum() if tokens.min() >= 0 else -1
