"""Exports packs with their tokens: as Parquet for NeMo (Megatron-Bridge), and as a saved `Dataset` for TRL.

`nemo-parquet` is the layout of `megatron/bridge/data/packing/parquet.py`. A row has `input_ids` (int32), the
starts of the pieces in `seq_start_id` (int32), and `loss_mask` (int8). The mask of a token says whether the *next*
token is learned, because that trainer makes labels by shifting `input_ids` within each piece.

`trl` is the layout of `datasets.Dataset.save_to_disk`, with the rows that TRL's padding-free collator takes. A row has
`input_ids` and `labels` (int32), and the tokens of each piece in `seq_lengths` (int32).

Invariants: at most `_PACKS_AT_ONCE` packs are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tundish.errors import InvalidInputError
from tundish.packing.new_folder import NewFolder
from tundish.packing.plan.pack_plan import PackPlan
from tundish.packing.sources.arrow.columns import import_pyarrow

if TYPE_CHECKING:
    from tundish.packing.dataset.packed_dataset import PackedDataset

__all__ = ["write_nemo", "write_trl"]

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
    from tundish.packing.dataset.packed_dataset import PackedDataset

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
