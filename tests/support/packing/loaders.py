"""Loaders of packs in which no token occurs twice, and the packs that they give."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

import tundish as td
from support.packing.samples import make_samples

LENGTHS = np.random.default_rng(3).integers(1, 17, 90).tolist()
SAMPLES = make_samples(LENGTHS)
PLAN = td.pack(LENGTHS, 16, mode="best_fit")
# The tokens of the second dataset follow those of the first.
CODE = make_samples(LENGTHS[:40], first=sum(LENGTHS))
CODE_PLAN = td.pack(LENGTHS[:40], 16, mode="hard", seed=1)
MIX = td.mix([PLAN, CODE_PLAN], [2, 1], num_packs=46, seed=5)
SOURCES: dict[str, tuple[Any, td.PackPlan | td.PackMix]] = {
    "plan": (SAMPLES, PLAN),
    "mix": ([SAMPLES, CODE], MIX),
}


def stored(state: dict[str, Any]) -> dict[str, Any]:
    """A state as a file gives it back."""
    loaded: dict[str, Any] = json.loads(json.dumps(state))
    return loaded


def tokens_of(batch: dict[str, Any]) -> list[int]:
    """The tokens of a batch; they say which packs it has."""
    tokens: list[int] = batch["input_ids"][0].tolist()
    return tokens


def all_tokens(batches: Iterable[dict[str, Any]]) -> list[list[int]]:
    return list(map(tokens_of, batches))


def assert_same_batches(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for batch, own in zip(found, expected, strict=True):
        assert batch.keys() == own.keys()
        for key, value in own.items():
            if isinstance(value, torch.Tensor):
                assert batch[key].dtype == value.dtype and torch.equal(batch[key], value), key
            else:
                assert batch[key] == value, key
