"""What packs whole samples elsewhere, called as its users call it.

Each function takes token counts, int32, shape (samples,), and returns how many packs there are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import binpacking
import datasets
import lightbinpack
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import seqpacker
import trl
from import_alone import import_alone

Lengths = npt.NDArray[np.int32]
# Samples that ms-swift's PackingDataset packs at a time.
SWIFT_SAMPLES = 1000
# The largest number of samples a pack, as the sample_packing_bin_size of an Axolotl configuration is by default.
AXOLOTL_BIN_SIZE = 200
AXOLOTL_EMPTY: dict[str, dict[str, object]] = {
    "axolotl": {},
    "axolotl.utils": {},
    "axolotl.utils.distributed": {"reduce_and_broadcast": None},
    "axolotl.utils.logging": {"get_logger": logging.getLogger},
}


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One packer. Beyond `most_samples` its time is taken for that many, and multiplied."""

    name: str
    # From token counts, which is not timed, to a call that packs and returns how many packs there are.
    prepare: Callable[[Lengths, int], Callable[[], int]]
    most_samples: int


def trl_call(lengths: Lengths, max_length: int) -> Callable[[], int]:
    """TRL's `pack_dataset` over the tokens of a dataset, of which each takes one byte."""
    bounds = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=bounds[1:])
    tokens = np.zeros(bounds[-1], dtype=np.uint8)
    table = pa.table({"input_ids": pa.LargeListArray.from_arrays(bounds, tokens)})
    dataset = datasets.Dataset(table)
    datasets.disable_progress_bars()
    options = {"keep_in_memory": True, "load_from_cache_file": False}
    return lambda: len(trl.pack_dataset(dataset, max_length, "bfd", options))


def axolotl_call(lengths: Lengths, max_length: int) -> Callable[[], int]:
    """Axolotl's `pack_parallel`, as its MultipackBatchSampler calls it."""
    multipack = import_alone("axolotl", "axolotl.utils.samplers.multipack", AXOLOTL_EMPTY)

    def call() -> int:
        packs: Sequence[Any] = multipack.pack_parallel(
            lengths, max_length, group_size=100_000, bin_size=AXOLOTL_BIN_SIZE
        )
        return len(packs)

    # Compiled here, so that the first round does not pay for it.
    multipack.pack_parallel(lengths[:10], max_length, group_size=100_000, bin_size=AXOLOTL_BIN_SIZE)
    return call


def swift_call(lengths: Lengths, max_length: int) -> Callable[[], int]:
    """`binpacking.to_constant_volume`, as ms-swift calls it."""
    pairs = list(enumerate(lengths.tolist()))
    batches = [pairs[begin : begin + SWIFT_SAMPLES] for begin in range(0, len(pairs), SWIFT_SAMPLES)]
    return lambda: sum(
        len(binpacking.to_constant_volume(batch, max_length, weight_pos=1)) for batch in batches
    )


def lightbinpack_call(lengths: Lengths, max_length: int) -> Callable[[], int]:
    """lightbinpack's optimized best-fit decreasing."""
    numbers = lengths.tolist()
    return lambda: len(lightbinpack.obfd(numbers, max_length))


def seqpacker_call(lengths: Lengths, max_length: int) -> Callable[[], int]:
    """seqpacker's default strategy, with its result in two flat arrays."""
    packer = seqpacker.Packer(capacity=max_length)
    numbers = lengths.astype(np.int64)

    def call() -> int:
        items, bounds = packer.pack_flat(numbers)
        assert len(items) == len(numbers)
        return len(bounds) + 1

    return call


PEERS = (
    Peer(name="TRL pack_dataset", prepare=trl_call, most_samples=10**5),
    Peer(name="Axolotl pack_parallel", prepare=axolotl_call, most_samples=10**5),
    Peer(name="ms-swift (binpacking)", prepare=swift_call, most_samples=10**5),
    Peer(name="lightbinpack obfd", prepare=lightbinpack_call, most_samples=10**6),
    Peer(name="seqpacker obfd", prepare=seqpacker_call, most_samples=10**6),
)
