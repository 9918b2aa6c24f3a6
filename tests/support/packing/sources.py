"""Samples to be kept in files, and what must come of them: counted and packed one by one, in plain Python."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tundish as td


def draw_rows(count: int, seed: int = 0, longest: int = 9) -> list[dict[str, list[int]]]:
    """Samples with tokens, labels and a mask; some are empty."""
    generator = np.random.default_rng(seed)
    rows = []
    for length in generator.integers(0, longest + 1, count).tolist():
        tokens = generator.integers(1, 30_000, length)
        rows.append({"input_ids": tokens.tolist(), "labels": (-tokens).tolist()})
    return rows


def assert_packs_alike(source: Any, rows: Sequence[Any], column: str | None = None) -> None:
    """The lengths of `source` are those of `rows`, and its packs are equal to packs of `rows`, also after pickling."""
    counts = [len(row["input_ids"] if isinstance(row, dict) else row) for row in rows]
    lengths = td.packing.lengths(source, column)
    assert lengths.tolist() == counts
    plan = td.pack(lengths, 16, seed=1, drop_last=False)
    expected = td.PackedDataset(list(rows), plan)
    samples = td.packing.open_samples(source, column)
    assert len(samples) == len(rows)
    for given in (samples, pickle.loads(pickle.dumps(samples))):
        for item, own in zip(td.PackedDataset(given, plan), expected, strict=True):
            for key in ("input_ids", "labels", "position_ids", "cu_seqlens"):
                assert item[key].equal(own[key]), key


def write_megatron(
    path: Path,
    sequences: Sequence[Sequence[int]],
    documents: Sequence[int],
    *,
    code: int = 8,
    dtype: str = "<u2",
) -> None:
    """Write `path` (a .idx file) and its .bin file. `documents` has the number of sequences in each document."""
    tokens = [np.array(sequence, dtype=dtype) for sequence in sequences]
    path.with_suffix(".bin").write_bytes(b"".join(array.tobytes() for array in tokens))
    pointers = [sum(array.nbytes for array in tokens[:number]) for number in range(len(tokens))]
    bounds = [sum(documents[:number]) for number in range(len(documents) + 1)]
    path.write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(tokens), len(bounds))
        + struct.pack(f"<{len(tokens)}i", *map(len, tokens))
        + struct.pack(f"<{len(tokens)}q", *pointers)
        + struct.pack(f"<{len(bounds)}q", *bounds)
    )
