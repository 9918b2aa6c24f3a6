"""Ray's object store: with tensors, stored as AReaL's `RayRTensorBackend` does, and with numpy arrays.

Arrays are read from shared memory and are read-only.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterable
from typing import Any

import torch

# Ray reads it when it is imported.
os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}

import ray

from rtensor.tensors import make

# torch warns of read-only memory; nobody writes to it.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

_STORE_BYTES = 2 << 30


class Owner:
    """Owns nothing: the consumer starts the cluster, and an actor in it owns the tensors."""

    def __init__(self, cases: Iterable[str]) -> None:
        self.place = " ".join(case.replace(" ", "_") for case in cases)


class TensorConsumer:
    as_arrays = False

    def __init__(self, place: str) -> None:
        folder = tempfile.mkdtemp(prefix="ray-")
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=_STORE_BYTES,
            _temp_dir=folder,
        )
        cases = [case.replace("_", " ") for case in place.split()]
        self._owner = ray.remote(num_cpus=1)(_Actor).remote(self.as_arrays)
        self._references = {case: ray.get(self._owner.put.remote(case)) for case in cases}
        self._put: list[Any] = []

    def fetch(self, case: str) -> list[torch.Tensor]:
        found = ray.get(self._references[case])
        return [torch.from_numpy(array) for array in found] if self.as_arrays else found

    def forget(self, case: str) -> None:
        """Nothing is kept."""


class ArrayConsumer(TensorConsumer):
    as_arrays = True


class _Actor:
    def __init__(self, as_arrays: bool) -> None:
        self._as_arrays = as_arrays
        self._kept: list[Any] = []

    def put(self, case: str) -> list[Any]:
        references = [ray.put(tensor.numpy() if self._as_arrays else tensor) for tensor in make(case)]
        self._kept += references
        return references
