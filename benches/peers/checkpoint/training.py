"""Measures the cost of a save to a training loop: its stall, and how much slower the steps beside it are.

Owns the loops. What always holds: steps with a save and steps without are the same work in the same process, one
right after the other; the time lost is that of all steps until the save is over, less what as many take without one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from checkpoint.child import Rank

# Steps after the save, for what it leaves behind.
_AFTER = 5
_BASE_SECONDS = 1.0
_TINY_OPERATIONS = 400


def matrix_products() -> Callable[[], None]:
    """A step on all processors, without the interpreter."""
    left, right = torch.rand(1536, 1536), torch.rand(1536, 1536)
    product = torch.empty(1536, 1536)

    def step() -> None:
        torch.mm(left, right, out=product)

    return step


def tiny_operations() -> Callable[[], None]:
    """A step of the interpreter."""
    value = torch.zeros(8)

    def step() -> None:
        for _ in range(_TINY_OPERATIONS):
            value.add_(1.0)

    return step


LOOPS = {"matrix products": matrix_products, "400 tiny operations": tiny_operations}


def _steps(step: Callable[[], None], go_on: Callable[[int], bool]) -> list[float]:
    seconds = []
    begin = time.perf_counter()
    while go_on(len(seconds)):
        step()
        end = time.perf_counter()
        seconds.append(end - begin)
        begin = end
    return seconds


def lost(loop: Callable[[], Callable[[], None]], rank: Rank) -> dict[str, float]:
    """Save once beside a loop: seconds lost, of the longest step beside the save, of the median one without."""
    step = loop()
    until = time.perf_counter() + 0.2
    _steps(step, lambda _: time.perf_counter() < until)
    until = time.perf_counter() + _BASE_SECONDS
    before = _steps(step, lambda _: time.perf_counter() < until)
    folder = rank.folder()
    begin = time.perf_counter()
    handle = rank.saver.save(folder, rank.state)
    stall = time.perf_counter() - begin
    over: list[int] = []

    def go_on(number: int) -> bool:
        if not over and handle.done():
            over.append(number)
        return not over or number < over[0] + _AFTER

    beside = _steps(step, go_on)
    handle.wait()
    rank.remove(folder)
    until = time.perf_counter() + _BASE_SECONDS
    after = _steps(step, lambda _: time.perf_counter() < until)
    base = statistics.fmean(before + after)
    return {
        "lost": stall + sum(beside) - base * len(beside),
        "worst": max(beside),
        "base": statistics.median(before + after),
    }
