"""Samples for tests, datasets that count their reads, and the pieces of items."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch


class Rows:
    """A dataset that counts what is read from it."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.rows[index]


class BatchedRows(Rows):
    """A dataset that must be asked for many rows at once."""

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a single row was asked for")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.read += indices
        return [self.rows[index] for index in indices]


def make_samples(lengths: Sequence[int], first: int = 0) -> list[list[int]]:
    """Samples in which no token occurs twice, so that a token out of place is seen."""
    tokens = iter(range(first, first + sum(lengths)))
    return [[next(tokens) for _ in range(length)] for length in lengths]


def pieces_of(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each piece of the items as a feature of its own."""
    return [
        {key: item[key][start:stop] for key in ("input_ids", "labels")}
        for item in items
        for start, stop in pairwise(item["cu_seqlens"].tolist())
    ]


def make_nested() -> torch.Tensor:
    """A nested tensor, which has no shape that can be asked for."""
    with warnings.catch_warnings():
        # torch says that they are a prototype.
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.arange(3), torch.arange(2)])
