"""Hard packing and the shuffle as people write them with numpy.

The peers of tundish, and the oracle of its outputs. Invariants: `chunked` and `vectorised` return the same six int64
arrays for the same inputs. Nothing here imports tundish.

Source of the method: `chunked` is XTuner's HardPackDataset in one process: a batched search over chunks of 10,000 packs
on the cumulative lengths of the ordered samples, a Python loop over the packs of each chunk, then a merge.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.integer[Any]]
Arrays = dict[str, npt.NDArray[np.int64]]
PackPieces = tuple[int, list[int], list[int], list[int]]

FIELDS = ("dataset_id", "indices", "indices_cu_len", "start_offset", "end_offset", "longest")
PACKS_IN_A_CHUNK = 10_000


def _cumulative(ordered_lengths: Integers) -> npt.NDArray[np.int64]:
    cumulative = np.zeros(ordered_lengths.size + 1, dtype=np.int64)
    np.cumsum(ordered_lengths, out=cumulative[1:])
    return cumulative


def _pack_chunk(
    packs: list[int], max_length: int, cumulative: npt.NDArray[np.int64], lengths: Integers, order: Integers
) -> Arrays:
    begin = np.asarray(packs, dtype=np.int64) * max_length
    end = begin + max_length
    first = np.searchsorted(cumulative, begin, side="right") - 1
    last = np.searchsorted(cumulative, end - 1, side="right") - 1
    start_offset = begin - cumulative[first]
    end_offset = end - cumulative[last]
    longest = np.empty(len(packs), dtype=np.int64)
    slices = []
    for position in range(len(packs)):
        head, tail = int(first[position]), int(last[position])
        start, stop = int(start_offset[position]), int(end_offset[position])
        if head == tail:
            longest[position] = stop - start
        else:
            inner = int(lengths[head + 1 : tail].max()) if tail - head > 1 else 0
            longest[position] = max(int(lengths[head]) - start, inner, stop)
        slices.append(order[head : tail + 1])
    return {
        "dataset_id": np.zeros(len(packs), dtype=np.int64),
        "indices": np.concatenate(slices),
        "indices_cu_len": np.cumsum(last - first + 1, dtype=np.int64),
        "start_offset": start_offset,
        "end_offset": end_offset,
        "longest": longest,
    }


def chunked(lengths: Integers, order: npt.NDArray[np.int64], max_length: int) -> Arrays:
    """Six int64 arrays of the hard plan, by a Python loop over the packs of each chunk.

    `lengths`: token counts, integer, (samples,). `order`: int64, (ordered samples,). The tail shorter than
    `max_length` is dropped.
    """
    cumulative = _cumulative(np.take(lengths, order))
    ordered_lengths = cumulative[1:] - cumulative[:-1]
    packs = list(range(int(cumulative[-1]) // max_length))
    if not packs:
        return {field: np.empty(0, dtype=np.int64) for field in FIELDS}
    chunks = [
        _pack_chunk(packs[begin : begin + PACKS_IN_A_CHUNK], max_length, cumulative, ordered_lengths, order)
        for begin in range(0, len(packs), PACKS_IN_A_CHUNK)
    ]
    pieces_before = 0
    for chunk in chunks:
        chunk["indices_cu_len"] += pieces_before
        pieces_before = int(chunk["indices_cu_len"][-1])
    return {field: np.concatenate([chunk[field] for chunk in chunks]) for field in FIELDS}


def vectorised(lengths: Integers, order: npt.NDArray[np.int64], max_length: int) -> Arrays:
    """The same six arrays with no Python loop at all."""
    ordered_lengths = lengths[order]
    cumulative = _cumulative(ordered_lengths)
    packs = int(cumulative[-1]) // max_length
    if packs == 0:
        return {field: np.empty(0, dtype=np.int64) for field in FIELDS}
    begin = np.arange(packs, dtype=np.int64) * max_length
    end = begin + max_length
    first = np.searchsorted(cumulative, begin, side="right") - 1
    last = np.searchsorted(cumulative, end, side="left") - 1
    start_offset = begin - cumulative[first]
    end_offset = end - cumulative[last]
    pieces = last - first + 1
    pieces_after = np.cumsum(pieces)
    pieces_before = pieces_after - pieces
    position = np.arange(pieces_after[-1]) + np.repeat(first - pieces_before, pieces)
    # Every value put in below is at most its sample's length, so the lengths' own dtype holds it.
    piece_lengths = ordered_lengths[position]
    piece_lengths[pieces_before] -= start_offset
    piece_lengths[pieces_after - 1] = end_offset
    piece_lengths[pieces_before[pieces == 1]] = max_length
    return {
        "dataset_id": np.zeros(packs, dtype=np.int64),
        "indices": order[position],
        "indices_cu_len": pieces_after,
        "start_offset": start_offset,
        "end_offset": end_offset,
        "longest": np.maximum.reduceat(piece_lengths, pieces_before).astype(np.int64),
    }


def shuffled(count: int, seed: int) -> npt.NDArray[np.int64]:
    """0…count-1 in the order of numpy's legacy generator."""
    indices = np.arange(count, dtype=np.int64)
    np.random.RandomState(seed).shuffle(indices)
    return indices
