"""Refuses a source's loader that reads only one rank's part of the data, as it would on each rank by itself."""

from __future__ import annotations

from typing import Any

from tundish.errors import InvalidInputError

__all__ = ["refuse_sharded"]

# Attributes of samplers, datasets and loaders that hold the number of processes among which they split the data.
_COUNTS = ("num_replicas", "num_processes", "world_size")
# And the number of their part. An object with a count alone may be prepared by so many processes.
_RANKS = ("rank", "process_index")


def refuse_sharded(loader: Any) -> None:
    """Raise `InvalidInputError` where a loader, or a part of it, reads only one rank's part of the data."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    dataset = getattr(loader, "dataset", None)
    parts = {
        "it": loader,
        "its dataset": dataset,
        # Datasets of Hugging Face that were split by node, which are loaders too.
        "what it is split by": getattr(loader, "_distributed", None),
        "what its dataset is split by": getattr(dataset, "_distributed", None),
        "its sampler": getattr(loader, "sampler", None),
        "its batch_sampler": batch_sampler,
        "the sampler of its batch_sampler": getattr(batch_sampler, "sampler", None),
    }
    module = type(loader).__module__
    if module == "accelerate.data_loader":
        raise InvalidInputError(
            f"the loader is Accelerate's {type(loader).__qualname__}, which deals its batches out to the ranks "
            "already: give DispatchLoader the one that was given to accelerator.prepare, and do not prepare it"
        )
    for name, part in parts.items():
        if not any(isinstance(getattr(part, rank, None), int) for rank in _RANKS):
            continue
        for count in _COUNTS:
            number = getattr(part, count, None)
            if isinstance(number, int) and number > 1:
                what = f"{name} is a {type(part).__qualname__} with {count}={number}"
                raise InvalidInputError(
                    f"the loader reads one of {number} parts of the data ({what}), of which each rank would get a part "
                    "once more: make it for one process, which reads for all ranks"
                )
