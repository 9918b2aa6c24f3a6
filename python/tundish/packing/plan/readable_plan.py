"""The interface of a plan that statistics and plots read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tundish.packing.plan.pack import PackBatch

__all__ = ["ReadablePlan"]


class ReadablePlan(Protocol):
    """The arrays and attributes of `PackPlan` that statistics and plots use."""

    dataset_id: NDArray[np.integer[Any]]
    indices: NDArray[np.integer[Any]]
    indices_cu_len: NDArray[np.integer[Any]]
    start_offset: NDArray[np.integer[Any]]
    end_offset: NDArray[np.integer[Any]]
    longest: NDArray[np.integer[Any]]
    piece_start: NDArray[np.integer[Any]] | None
    piece_stop: NDArray[np.integer[Any]] | None
    max_length: int
    mode: str
    seed: int | None
    overlong: str | None
    global_pack: bool
    packs_repeated: int
    num_tokens: int
    fingerprint: str

    @property
    def has_lengths(self) -> bool: ...

    @property
    def lengths(self) -> Sequence[NDArray[np.integer[Any]]] | None: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    def __len__(self) -> int: ...

    def lookup(self, pack_ids: Any) -> PackBatch: ...

    def stats(self) -> dict[str, int | float]: ...
