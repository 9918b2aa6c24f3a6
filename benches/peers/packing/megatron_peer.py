"""The index builder of megatron-core, run as its GPT dataset runs it.

Invariant: a missing or different megatron-core is an error at import, never a skipped row.
"""

from __future__ import annotations

import warnings
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt

WANTED_VERSION = "0.16.1"

if version("megatron-core") != WANTED_VERSION:
    raise ImportError(
        f"the bench compares with megatron-core {WANTED_VERSION}, found {version('megatron-core')}"
    )
with warnings.catch_warnings():
    # The package warns about the accelerator libraries it goes without; none of them takes part here.
    warnings.simplefilter("ignore")
    from megatron.core.datasets.helpers_cpp import build_sample_idx_int32


def sample_index(
    lengths: npt.NDArray[np.int32], order: npt.NDArray[np.int32], max_length: int, num_tokens: int
) -> npt.NDArray[Any]:
    """Pairs (position in `order`, offset) where each sequence starts: int32, (sequences + 1, 2).

    One epoch, the partial last sequence dropped, one extra token a sequence: the defaults of Megatron's GPT dataset.
    `num_tokens` is the sum of `lengths`, which that dataset knows beforehand, so its cost is not counted here.
    """
    pairs: npt.NDArray[Any] = build_sample_idx_int32(lengths, order, max_length, 1, num_tokens, True, 1)
    return pairs
