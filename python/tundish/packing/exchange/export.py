"""`export`: a plan in the format of another trainer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from tundish.errors import InvalidInputError, InvalidTypeError, format_count, format_type
from tundish.packing.arguments.choices import check_choice
from tundish.packing.arguments.integer_arrays import IntegerArray, as_integer_array
from tundish.packing.arguments.paths import as_new_folder
from tundish.packing.exchange.megatron_indices import write_indices
from tundish.packing.exchange.packed_tokens import write_nemo, write_trl
from tundish.packing.exchange.xtuner_preset import write_preset
from tundish.packing.new_folder import NewFolder
from tundish.packing.plan.pack_plan import PackPlan

__all__ = ["FORMATS", "as_pack_order", "export"]

# The arguments that each format takes beside the plan and the path. The first of each is required.
FORMATS: dict[str, tuple[str, ...]] = {
    "xtuner-preset": ("paths", "pack_order"),
    "trl": ("samples",),
    "nemo-parquet": ("samples",),
    "megatron": ("order", "pack_order", "prefix"),
}
_REQUIRED = {"xtuner-preset": "paths", "trl": "samples", "nemo-parquet": "samples"}


def export(
    plan: PackPlan,
    path: str | os.PathLike[str],
    format: str,  # noqa: A002 (the field's word)
    *,
    samples: Any = None,
    paths: Sequence[str] | None = None,
    order: Any = None,
    pack_order: Any = None,
    prefix: str | None = None,
) -> None:
    """Write a plan as the folder `path`, in the format of another trainer.

    | format | for | what is written |
    |---|---|---|
    | "xtuner-preset" | XTuner v1, `pack_level="preset"` | which tokens of which sample are in each pack |
    | "megatron" | Megatron-Core's `GPTDataset` | its index files, of a plan of mode "hard" |
    | "nemo-parquet" | NeMo (Megatron-Bridge), packed Parquet | the tokens, and which are learned |
    | "trl" | TRL, or any reader of `datasets` | the tokens, labels and lengths of the pieces |

    The folder appears whole and durable, or not at all. Memory is bounded, but for 8 bytes a pack.

    Args:
        plan: The plan. For "xtuner-preset" it needs the lengths.
        path: The folder to make; its parent must exist.
        format: A format of the table.
        samples: For "trl" and "nemo-parquet", which need them: the samples, as `PackedDataset` takes them.
        paths: For "xtuner-preset", which needs them: the path of each dataset of the plan, as XTuner is given it.
        order: For "megatron": the order that was given to `pack`, if any.
        pack_order: For "xtuner-preset" and "megatron": numbers of packs in the order in which the trainer takes them,
            integers, shape (k,). It may repeat packs and leave some out. By default all packs in the plan's order.
        prefix: For "megatron": the beginning of the files' names, by which `GPTDataset` finds them in its cache.

    Raises:
        InvalidInputError: The format is unknown, an argument is missing or not one of the format's, the plan lacks
            lengths or cannot be expressed in the format.
        InvalidTypeError: An argument is of a wrong type.
        PlanMismatchError: The samples or the order are not those of the plan.
        AlreadyExistsError: Something lies at `path`.
        NotFoundError: The parent folder does not exist.
        StorageError: The file system refused, or is full.
        MissingExtraError: pyarrow is not installed, and the format needs it.

    Example:
        >>> import tempfile, numpy as np, tundish as td
        >>> folder = tempfile.mkdtemp() + "/preset"
        >>> plan = td.pack([5, 3, 9], 8, mode="sequential", overlong="truncate")
        >>> td.packing.export(plan, folder, "xtuner-preset", paths=["train.jsonl"])
        >>> np.load(folder + "/samples.npy").tolist()
        [[0, 0, -1, -1, 0, 5], [0, 1, -1, -1, 0, 3], [0, 2, -1, -1, 0, 8]]
    """
    if not isinstance(plan, PackPlan):
        raise InvalidTypeError(f"plan is {format_type(plan)}: give a PackPlan, as pack returns it")
    check_choice(format, "format", tuple(FORMATS))
    given = {"samples": samples, "paths": paths, "order": order, "pack_order": pack_order, "prefix": prefix}
    _check_use(format, given)
    folder = as_new_folder(path, "path")
    taken = None if pack_order is None else as_pack_order(pack_order, len(plan), "plan")
    if format == "xtuner-preset":
        names = _as_paths(paths, len(plan.num_samples))
        with NewFolder(folder) as files:
            write_preset(plan, files, names, np.arange(len(plan)) if taken is None else taken)
    elif format == "megatron":
        with NewFolder(folder) as files:
            write_indices(plan, files, _as_prefix(prefix), order, taken)
    else:
        write = write_trl if format == "trl" else write_nemo
        with NewFolder(folder) as files:
            write(plan, files, samples)


def _check_use(format: str, given: dict[str, Any]) -> None:  # noqa: A002 (as above)
    """Refuse arguments that the format would ignore, and ask for the one that it needs."""
    for name, value in given.items():
        if value is not None and name not in FORMATS[format]:
            users = ", ".join(repr(other) for other, names in FORMATS.items() if name in names)
            raise InvalidInputError(f"format {format!r} takes no {name}: leave it out; it is for {users}")
    required = _REQUIRED.get(format)
    if required is not None and given[required] is None:
        what = (
            "the samples, as PackedDataset takes them" if required == "samples" else "a path for each dataset"
        )
        raise InvalidInputError(f"format {format!r} needs {required}=: {what}")


def as_pack_order(pack_order: Any, packs: int, what: str) -> IntegerArray:
    """The argument `pack_order` for a plan, or for `what` messages call it, of so many packs."""
    taken = as_integer_array(pack_order, "pack_order")
    wrong = (taken < 0) | (taken >= packs)
    if wrong.any():
        place = int(wrong.argmax())
        raise InvalidInputError(
            f"pack_order has {taken[place]} at position {place}, and the {what} has {packs} packs, from 0 on"
        )
    return taken


def _as_paths(paths: Any, datasets: int) -> list[str]:
    if isinstance(paths, str | os.PathLike) or not isinstance(paths, Sequence):
        raise InvalidTypeError(f"paths is {format_type(paths)}: give a list of the path of each dataset")
    for entry in paths:
        if not isinstance(entry, str | os.PathLike):
            raise InvalidTypeError(f"paths has an entry that is {format_type(entry)}: give paths as strings")
    names = [str(os.fspath(entry)) for entry in paths]
    if len(names) != datasets:
        raise InvalidInputError(
            f"paths has {len(names)} entries, and the plan was made for {format_count(datasets, 'dataset')}: give one "
            "path a dataset, in the order of the plan"
        )
    if len(set(names)) != len(names):
        raise InvalidInputError("paths names one path twice; XTuner tells its datasets by their paths")
    return names


def _as_prefix(prefix: Any) -> str:
    if prefix is None:
        return ""
    if not isinstance(prefix, str):
        raise InvalidTypeError(f"prefix is {format_type(prefix)}: give the beginning of the files' names")
    if "/" in prefix:
        raise InvalidInputError(f"prefix is {prefix!r}: a name of a file holds no slash")
    return prefix
