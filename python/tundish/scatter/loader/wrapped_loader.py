"""Reads the source's loader and its parts for a `DispatchLoader`: lengths, states, epochs and sharding."""

from __future__ import annotations

from typing import Any

from tundish.errors import InvalidInputError, format_type

__all__ = ["is_stateful", "length_of", "refuse_sharded", "set_epoch"]

# Attributes with the number of processes among which a part of a loader splits the data.
_COUNTS = ("num_replicas", "num_processes", "world_size")
# And with its own number among them. An object with a count alone may be prepared by so many processes.
_RANKS = ("rank", "process_index")


def length_of(loader: Any) -> int | None:
    """How many batches an epoch has; None where the loader does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def is_stateful(loader: Any) -> bool:
    """Whether a loader has a state to resume from."""
    return callable(getattr(loader, "state_dict", None)) and callable(
        getattr(loader, "load_state_dict", None)
    )


def set_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of all parts of a loader that have one."""
    # The loader and its batch sampler often have one sampler.
    for part in {id(part): part for part in _parts_of(loader).values()}.values():
        if callable(method := getattr(part, "set_epoch", None)):
            method(epoch)


def refuse_sharded(loader: Any) -> None:
    """Raise `InvalidInputError` where a loader, or a part of it, reads only one rank's part of the data."""
    if type(loader).__module__ == "accelerate.data_loader":
        raise InvalidInputError(
            f"the loader is Accelerate's {type(loader).__qualname__}, which deals its batches out to the ranks "
            "already: give DispatchLoader the one that was given to accelerator.prepare, and do not prepare it"
        )
    parts = _parts_of(loader)
    # Datasets of Hugging Face that were split by node, which are loaders too.
    parts["its split"] = getattr(loader, "_distributed", None)
    parts["its dataset's split"] = getattr(parts["its dataset"], "_distributed", None)
    for name, part in parts.items():
        if not any(isinstance(getattr(part, rank, None), int) for rank in _RANKS):
            continue
        for count in _COUNTS:
            number = getattr(part, count, None)
            if isinstance(number, int) and number > 1:
                raise InvalidInputError(
                    f"the loader reads one of {number} parts of the data ({name} is {format_type(part)} with "
                    f"{count}={number}), and each rank would get only a share of that: make it for one process, which "
                    "reads for all ranks"
                )


def _parts_of(loader: Any) -> dict[str, Any]:
    """A loader and its parts, by their names in messages."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return {
        "it": loader,
        "its dataset": getattr(loader, "dataset", None),
        "its sampler": getattr(loader, "sampler", None),
        "its batch_sampler": batch_sampler,
        "the sampler of its batch_sampler": getattr(batch_sampler, "sampler", None),
    }
