"""Exports a plan of mode "hard" as the index files of Megatron-Core's `GPTDataset`.

The layout is that of `megatron/core/datasets/gpt_dataset.py`, which loads the files from its `path_to_cache` if all
four are there:

- `document_index.npy`: int32, the samples in their order
- `sample_index.npy`: (sequences + 1, 2): where each sequence starts, a place in `document_index` and a token
- `shuffle_index.npy`: uint32, numbers of sequences in the order in which they are taken
- `description.txt`: what they were made for; its content is not read
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from tundish.errors import InvalidInputError
from tundish.packing.arguments.integer_arrays import IntegerArray, as_integer_array
from tundish.packing.new_folder import NewFolder
from tundish.packing.plan.pack_plan import PackPlan
from tundish.packing.shuffle import shuffled_indices

__all__ = ["write_indices"]

_MOST_DOCUMENTS = 2**31 - 1


def write_indices(
    plan: PackPlan, folder: NewFolder, prefix: str, order: Any, pack_order: IntegerArray | None
) -> None:
    """Write the four files, whose names begin with `prefix`.

    Raises:
        InvalidInputError: The plan is not of mode "hard", is of several datasets or too large, or the order is
            missing.
        PlanMismatchError: The plan was made with another order.
    """
    index = plan.sample_index(order)
    sequences = len(index) - 1
    documents = _documents(plan, order)
    taken = np.arange(sequences) if pack_order is None else pack_order
    folder.write_array(f"{prefix}document_index.npy", documents.astype(np.int32))
    folder.write_array(f"{prefix}sample_index.npy", index)
    folder.write_array(f"{prefix}shuffle_index.npy", taken.astype(np.uint32))
    description = {"plan": plan.fingerprint, "sequence_length": plan.max_length, "sequences": sequences}
    with folder.open(f"{prefix}description.txt") as file:
        file.write(json.dumps(description, indent=4).encode())


def _documents(plan: PackPlan, order: Any) -> IntegerArray:
    """The samples in their order."""
    (count,) = plan.num_samples
    if count > _MOST_DOCUMENTS:
        raise InvalidInputError(f"the plan has {count} samples, and Megatron's document_index is int32")
    kind = plan.metadata["order"]
    if kind == "given":
        if order is None:
            raise InvalidInputError("the plan was made with an order: give it as order=")
        return as_integer_array(order, "order")
    return np.arange(count) if plan.seed is None else shuffled_indices(count, plan.seed)
