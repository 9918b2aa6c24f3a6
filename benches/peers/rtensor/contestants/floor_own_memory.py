"""Reads every byte of tensors that the consumer has made itself: the lower bound on one node."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rtensor.tensors import make


class Owner:
    place = ""

    def __init__(self, cases: Iterable[str]) -> None:
        """Owns nothing."""


class Consumer:
    def __init__(self, place: str) -> None:
        self._made: dict[str, list[torch.Tensor]] = {}

    def fetch(self, case: str) -> list[torch.Tensor]:
        if case not in self._made:
            self._made[case] = make(case)
        return self._made[case]

    def forget(self, case: str) -> None:
        """Keeps them: they are read again."""
