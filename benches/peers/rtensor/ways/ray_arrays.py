"""Ray's object store with numpy's arrays, which are read where they lie, and are nobody's to write to."""

from __future__ import annotations

import warnings

from rtensor.ways import ray_tensors

__all__ = ["Consumer", "Owner"]

Owner = ray_tensors.Owner

# They are not written to.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


class Consumer(ray_tensors.Consumer):
    as_arrays = True
