"""Accelerate's `dispatch_batches=True`.

Rank 0 reads for all ranks and broadcasts all batches as one; each rank keeps its slice. The loader is endless and its
batches are in memory, so reading takes no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset


class Endless(IterableDataset[Any]):
    """The same batches, over and over."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self._batches


def only_batch(batches: list[Any]) -> Any:
    [batch] = batches
    return batch


class Dispatcher:
    """A prepared loader over the batches of the first call, which are dicts of tensors with a dimension for samples.

    `split_batches`: the loader reads one batch for all ranks; else one for each, which Accelerate joins.
    """

    def __init__(self, split_batches: bool) -> None:
        self._split = split_batches
        configuration = DataLoaderConfiguration(dispatch_batches=True, split_batches=split_batches)
        self._accelerator = Accelerator(cpu=True, dataloader_config=configuration)
        self._steps: Iterator[Any] | None = None

    def __call__(self, batches: list[Any] | None) -> Any:
        if self._steps is None:
            self._steps = iter(self._accelerator.prepare(self._loader(batches or [])))
        return next(self._steps)

    def _loader(self, batches: list[Any]) -> DataLoader[Any]:
        if not self._split:
            return DataLoader(Endless(batches), batch_size=None)
        whole = {name: torch.cat([batch[name] for batch in batches]) for name in (batches or [{}])[0]}
        # Without a batch size Accelerate does not split.
        return DataLoader(Endless([whole]), batch_size=1, collate_fn=only_batch)
