"""Functions of the processes in the soak test: the rollout makes batches, consumers use them, the controller drains.

Each runs in its process; see `peers.py`.
"""

from __future__ import annotations

import json
import logging
import random
from contextlib import AbstractContextManager
from typing import Any

import torch

from tundish import rtensor
from tundish.rtensor import Controller, Worker
from tundish.rtensor.tensor_store import default_store

COLUMNS = 64
# Rows of a batch, which vary.
ROWS = (256, 512, 768, 1024)


def rollout(number: int, rows: int) -> dict[str, Any]:
    """Makes the batch of a step: large and small tensors filled with its number."""
    made: dict[str, Any] = rtensor.remotize(
        {
            "input_ids": torch.full((rows, COLUMNS), number, dtype=torch.int64),
            "logprobs": torch.full((rows, COLUMNS), number, dtype=torch.bfloat16),
            "rewards": torch.full((rows,), number, dtype=torch.float32),
            "versions": [torch.tensor(number), None, "text"],
        },
        trim=False,
    )
    return made


def consume(batch: dict[str, Any], number: int, seed: int) -> None:
    """Fetches a batch in one of several ways, checks it, and writes to the tensors."""
    draw = random.Random(seed)
    rtensor.set_backend(rtensor.HttpBackend(shared_memory=draw.random() < 0.5))
    if draw.random() < 0.3:
        first = draw.randrange(batch["input_ids"].shape[0])
        _use(rtensor.localize(batch["input_ids"][first : first + 100]), number)
    if draw.random() < 0.2:
        room = torch.empty(batch["rewards"].shape)
        _use(rtensor.localize(batch["rewards"], out=room), number)
    # Several roles of one process: the second sees nothing that the first wrote.
    for _ in range(draw.choice((1, 1, 2))):
        given = rtensor.localize(batch)
        for tensor in (given["input_ids"], given["logprobs"], given["rewards"], given["versions"][0]):
            _use(tensor, number)


def _use(tensor: torch.Tensor, number: int) -> None:
    meant = torch.tensor(number).to(tensor.dtype)
    assert bool((tensor == meant).all()), f"a tensor of step {number} has other values"
    tensor.fill_(-1)


class _Control:
    """State of the controller's process: its step and its warnings."""

    controller: Controller
    step: AbstractContextManager[Any]
    warnings: list[str]


class _Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _Control.warnings.append(record.getMessage())


def control(workers: list[Worker]) -> None:
    _Control.controller = Controller(workers, timeout=20)
    _Control.warnings = []
    logger = logging.getLogger("tundish.rtensor")
    logger.addHandler(_Listener(logging.WARNING))
    logger.propagate = False


def update(workers: list[Worker]) -> None:
    _Control.controller.update(workers)


def begin(batch: dict[str, Any]) -> int:
    """Begins a step that claims `batch`."""
    _Control.step = _Control.controller.step(claim=batch)
    number: int = _Control.step.__enter__().number
    return number


def end() -> list[str]:
    """Ends the step; returns the warnings since the last one."""
    _Control.step.__exit__(None, None, None)
    said, _Control.warnings = _Control.warnings, []
    return said


def unbalanced(number: int, gone: set[str], unclaimed: dict[str, int]) -> dict[str, Any]:
    """Stats of living processes that have leftovers (other than unclaimed shards), or have not ended the step."""
    found: dict[str, Any] = {worker.addr: stats for worker, stats in _Control.controller.stats().items()}
    found["controller"] = json.loads(default_store.shards.stats())
    return {
        addr: stats
        for addr, stats in found.items()
        if addr not in gone and not _is_balanced(stats, number, unclaimed.get(addr, 0))
    }


def _is_balanced(stats: Any, number: int, unclaimed: int) -> bool:
    if not isinstance(stats, dict):
        return False
    storage, buffer, ledgers = stats["storage"], stats["buffer"], stats["steps"]
    return (
        storage["num_entries"] == storage["unclaimed_entries"] == unclaimed
        and storage["total_bytes"] == storage["unclaimed_bytes"]
        and (storage["total_bytes"] > 0) == (unclaimed > 0)
        and buffer["num_entries"] == buffer["total_bytes"] == buffer["in_flight"] == 0
        and buffer["memory"]["used_bytes"] == buffer["memory"]["escaped_bytes"] == 0
        and [ledger["has_ended"] for ledger in ledgers if ledger["step"] == number] == [True]
        and all(
            ledger["stored_bytes"] + ledger["fetched_bytes"] == ledger["freed_bytes"]
            and ledger["held_bytes"] == ledger["viewed_bytes"] == ledger["escaped_bytes"] == 0
            for ledger in ledgers
        )
    )
