"""Datasets that count what is read from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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
