"""`export`: a plan in the format of another trainer.

`xtuner-preset` is the layout of `xtuner/v1/datasets/preset_pack.py` and `preset_sampler.py`:

- `boundaries.npy`: int64, (packs + 1,): pack *i* has the rows `boundaries[i]` … `boundaries[i + 1]` - 1 of
- `samples.npy`: int64, (pieces, 6): path number, sample, first and last character (-1: none), first token, one past the
  last token
- `paths.json`: the path of each dataset
- `order.npy`: int64, numbers of packs in the order in which they are taken

`megatron` is the layout of `megatron/core/datasets/gpt_dataset.py`, which loads the files from its `path_to_cache` if
all four are there:

- `document_index.npy`: int32, the samples in their order
- `sample_index.npy`: (sequences + 1, 2): where each sequence starts, a place in `document_index` and a token
- `shuffle_index.npy`: uint32, numbers of sequences in the order in which they are taken
- `description.txt`: what they were made for; its content is not read

`nemo-parquet` is the layout of `megatron/bridge/data/packing/parquet.py`. A row has `input_ids` (int32), the
starts of the pieces in `seq_start_id` (int32), and `loss_mask` (int8). The mask of a token says whether the *next*
token is learned, because that trainer makes labels by shifting `input_ids` within each piece.

`trl` is the layout of `datasets.Dataset.save_to_disk`, with the rows that TRL's padding-free collator takes. A row has
`input_ids` and `labels` (int32), and the tokens of each piece in `seq_lengths` (int32).

Invariants: at most `_PACKS_AT_ONCE` packs are in memory at a time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tundish.errors import InvalidInputError, InvalidTypeError, format_count, format_type
from tundish.new_folder import NewFolder
from tundish.packing.arguments import IntegerArray, as_integer_array, as_new_folder, check_choice
from tundish.packing.balancing import shuffled_indices
from tundish.packing.inspection.plan_stats import piece_slices
from tundish.packing.plan import PackPlan
from tundish.packing.sources.tables import import_pyarrow

if TYPE_CHECKING:
    from tundish.packing.dataset import PackedDataset

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
        plan: The plan. For "xtuner-preset" and "megatron" it needs the lengths.
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
    taken = None if pack_order is None else _as_pack_order(pack_order, len(plan))
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


def _as_pack_order(pack_order: Any, packs: int) -> IntegerArray:
    taken = as_integer_array(pack_order, "pack_order")
    wrong = (taken < 0) | (taken >= packs)
    if wrong.any():
        place = int(wrong.argmax())
        raise InvalidInputError(
            f"pack_order has {taken[place]} at position {place}, and the plan has {packs} packs, from 0 on"
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


BOUNDARIES, PIECES, PATHS, ORDER = "boundaries.npy", "samples.npy", "paths.json", "order.npy"
# Columns of `samples.npy`. Those of characters are for long texts that XTuner cuts itself.
COLUMNS = ("path", "sample", "first_character", "last_character", "start", "stop")
_INT64 = np.dtype(np.int64)


def write_preset(plan: PackPlan, folder: NewFolder, paths: Sequence[str], order: IntegerArray) -> None:
    """Write the files of a preset.

    Raises:
        InvalidInputError: The plan has no lengths.
    """
    boundaries = np.zeros(len(plan) + 1, dtype=np.int64)
    first = 1
    for part in piece_slices(plan, 0, len(plan)):
        boundaries[first : first + len(part.counts)] = part.counts
        first += len(part.counts)
    np.cumsum(boundaries, out=boundaries)
    folder.write_array(BOUNDARIES, boundaries)
    folder.begin_array(PIECES, _INT64, (int(boundaries[-1]), len(COLUMNS)))
    for part in piece_slices(plan, 0, len(plan)):
        no_character = np.full(len(part.sample), -1)
        columns = (part.dataset, part.sample, no_character, no_character, part.start, part.stop)
        folder.append(PIECES, np.stack(columns, axis=1).astype(np.int64))
    folder.write_json(PATHS, list(paths))
    folder.write_array(ORDER, order.astype(np.int64))


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


# Packs of a record batch or row group: as many as Megatron-Bridge writes, or fewer of long packs.
_PACKS_AT_ONCE = 500
_TOKENS_AT_ONCE = 1 << 24
_IGNORED_LABEL = -100
_ARROW_FILE = "data-00000-of-00001.arrow"


def write_nemo(plan: PackPlan, folder: NewFolder, samples: Any) -> None:
    """Write `packs.idx.parquet` and `packing_metadata.json`.

    Raises:
        InvalidInputError: A label is not the token at its place, which this layout cannot say; or an id is too large.
        TundishError: As `PackedDataset`.
    """
    import_pyarrow("exporting packs as Parquet")
    import pyarrow
    import pyarrow.parquet

    packs = _packs(plan, samples)
    schema = pyarrow.schema(
        {name: pyarrow.list_(pyarrow.int32()) for name in ("input_ids", "seq_start_id")}
        | {"loss_mask": pyarrow.list_(pyarrow.int8())}
    )
    longest, most, least, pieces, stored = 0, 0, plan.max_length, 0, 0
    with folder.open("packs.idx.parquet") as file, pyarrow.parquet.ParquetWriter(file, schema) as writer:
        for first, items in _slices(packs):
            rows: dict[str, list[NDArray[Any]]] = {name: [] for name in schema.names}
            for number, item in enumerate(items, first):
                bounds = item["cu_seqlens"].numpy()
                tokens, labels = (_as_int32(item[name].numpy(), number) for name in ("input_ids", "labels"))
                rows["input_ids"].append(tokens)
                rows["seq_start_id"].append(bounds[:-1])
                rows["loss_mask"].append(_next_is_learned(tokens, labels, bounds, number))
                # That trainer counts a piece without its last token, which is a label only.
                inputs = len(tokens) - len(bounds) + 1
                longest = max(longest, item["max_seqlen"] - 1)
                most, least = max(most, len(bounds) - 1), min(least, inputs)
                pieces, stored = pieces + len(bounds) - 1, stored + inputs
            writer.write_batch(_record_batch(rows, schema))
    packing = {
        "dataset_max_seqlen": longest,
        "max_samples_per_bin": most,
        "packing_factor": round(pieces / max(len(plan), 1), 2),
        "packing_efficiency": round(100 * stored / max(len(plan) * plan.max_length, 1), 2),
        "pack_size": plan.max_length,
        "min_packed_seqlen": least,
    }
    folder.write_json("packing_metadata.json", [packing])


def write_trl(plan: PackPlan, folder: NewFolder, samples: Any) -> None:
    """Write the files of a saved `Dataset`.

    Raises:
        InvalidInputError: An id is too large.
        TundishError: As `PackedDataset`.
    """
    import_pyarrow("exporting packs as an Arrow file")
    import pyarrow
    import pyarrow.ipc

    packs = _packs(plan, samples)
    schema = pyarrow.schema(
        {name: pyarrow.list_(pyarrow.int32()) for name in ("input_ids", "labels", "seq_lengths")}
    )
    with folder.open(_ARROW_FILE) as file, pyarrow.ipc.new_stream(file, schema) as writer:
        for first, items in _slices(packs):
            rows = {
                name: [_as_int32(item[name].numpy(), number) for number, item in enumerate(items, first)]
                for name in ("input_ids", "labels")
            }
            rows["seq_lengths"] = [item["cu_seqlens"].diff().numpy() for item in items]
            writer.write_batch(_record_batch(rows, schema))
    state: dict[str, Any] = {
        "_data_files": [{"filename": _ARROW_FILE}],
        "_fingerprint": plan.fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    folder.write_json("state.json", state)
    # The features are those of the file's schema.
    folder.write_json("dataset_info.json", {})


def _packs(plan: PackPlan, samples: Any) -> PackedDataset:
    # Imports torch.
    from tundish.packing.dataset import PackedDataset

    return PackedDataset(samples, plan, mask_first_token=True)


def _slices(packs: PackedDataset) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The number of a pack, and the items from it on."""
    count = max(1, min(_PACKS_AT_ONCE, _TOKENS_AT_ONCE // packs.plan.max_length))
    for first in range(0, len(packs), count):
        yield first, packs.__getitems__(range(first, min(first + count, len(packs))))


def _as_int32(values: NDArray[np.int64], pack: int) -> NDArray[np.int32]:
    if len(values) and int(values.max()) > np.iinfo(np.int32).max:
        raise InvalidInputError(f"pack {pack} holds the id {values.max()}, and this format holds int32")
    return values.astype(np.int32)


def _next_is_learned(
    tokens: NDArray[np.int32], labels: NDArray[np.int32], bounds: NDArray[np.int32], pack: int
) -> NDArray[np.int8]:
    """Whether the token after each is learned; 0 for the last of a piece."""
    learned = labels != _IGNORED_LABEL
    wrong = learned & (labels != tokens)
    if wrong.any():
        place = int(wrong.argmax())
        raise InvalidInputError(
            f"pack {pack} has the label {labels[place]} at its token {place}, which is {tokens[place]}: nemo-parquet "
            f"can only say which tokens are learned, so labels are the tokens or {_IGNORED_LABEL}. Use format='trl'"
        )
    found = np.zeros(len(tokens), dtype=np.int8)
    found[:-1] = learned[1:]
    found[bounds[1:] - 1] = 0
    return found


def _record_batch(rows: Mapping[str, list[NDArray[Any]]], schema: Any) -> Any:
    """Lists of the rows, by the names in the schema."""
    import pyarrow

    columns = []
    for field in schema:
        values = rows[field.name]
        offsets = np.cumsum([0, *map(len, values)])
        joined = np.concatenate(values) if values else np.empty(0, dtype=np.int32)
        kind = pyarrow.list_(field.type.value_type)
        columns.append(
            pyarrow.ListArray.from_arrays(
                pyarrow.array(offsets, pyarrow.int32()), pyarrow.array(joined, kind.value_type), type=kind
            )
        )
    return pyarrow.RecordBatch.from_arrays(columns, schema=schema)
