"""Ray's object store with numpy arrays, which are read from shared memory and are read-only."""

from __future__ import annotations

import warnings

from rtensor.contestants import ray_tensors

__all__ = ["Consumer", "Owner"]

Owner = ray_tensors.Owner

# torch warns of read-only memory; nobody writes to it.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


class Consumer(ray_tensors.Consumer):
    as_arrays = True
