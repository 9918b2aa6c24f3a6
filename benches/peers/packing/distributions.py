"""The inputs of the bench: token lengths and orders.

Invariants: the same distribution and count give the same lengths, in memory and on disk. A length lies in 1…32768.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

RANDOM_SEED = 20240917
SHORTEST = 1
LONGEST = 32768
# Lengths are drawn in chunks, so that 10⁸ of them never stand in memory as floats.
CHUNK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """A lognormal distribution of token counts, clipped to SHORTEST…LONGEST."""

    name: str
    median: float
    sigma: float


TEXT = Distribution(name="text", median=600, sigma=1.2)
CHAT = Distribution(name="chat", median=150, sigma=1.0)
DISTRIBUTIONS = (TEXT, CHAT)


def fill_lengths(destination: npt.NDArray[np.int32], distribution: Distribution) -> None:
    """Draw token counts into an int32 array of shape (samples,)."""
    generator = np.random.default_rng(RANDOM_SEED)
    for begin in range(0, destination.size, CHUNK):
        part = destination[begin : begin + CHUNK]
        drawn = generator.lognormal(np.log(distribution.median), distribution.sigma, part.size)
        part[:] = np.clip(drawn, SHORTEST, LONGEST)


def draw_lengths(count: int, distribution: Distribution) -> npt.NDArray[np.int32]:
    """Token counts, int32, shape (count,)."""
    lengths = np.empty(count, dtype=np.int32)
    fill_lengths(lengths, distribution)
    return lengths


def draw_order(count: int) -> npt.NDArray[np.int64]:
    """A random permutation of 0…count-1, int64."""
    return np.random.default_rng(RANDOM_SEED + 1).permutation(count)


def write_lengths(path: Path, count: int, distribution: Distribution) -> None:
    """The same lengths as an .npy file, drawn chunk by chunk into the mapped file."""
    mapped = np.lib.format.open_memmap(path, mode="w+", dtype=np.int32, shape=(count,))
    fill_lengths(mapped, distribution)
    mapped.flush()
