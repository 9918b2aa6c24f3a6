"""The first batch of a packed Hugging Face dataset, beside TRL."""

from __future__ import annotations

from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import trl
from measure import Contestant, OutputsDiffer, race
from report import Section, compared, count

import tundish as td
from packing.cases import MAX_LENGTH, Scale
from packing.distributions import CHAT, draw_lengths

ROWS = 10**6
TRL_ROWS = 10**5
BATCH = 8
NOTE = f"""\
From a `datasets.Dataset` with `input_ids` (int32, chat lengths) to its first {BATCH} packs of {MAX_LENGTH} tokens: \
`td.hf.pack_dataset(dataset, {MAX_LENGTH}, strategy="bfd")[:{BATCH}]`, and the same of `trl.pack_dataset`, in memory. \
TRL packs 10⁵ rows, and its time is multiplied. Nanoseconds are per row. tundish may leave no file behind."""


def first_batch(scale: Scale) -> Section:
    """Time to the first batch of packs."""
    rows = min(ROWS, scale.samples[-1])
    few = min(rows, TRL_ROWS)
    lengths = draw_lengths(rows, CHAT)
    bounds = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(lengths, out=bounds[1:])
    tokens = np.arange(bounds[-1], dtype=np.int32)
    dataset = datasets.Dataset(
        pa.table({"input_ids": pa.LargeListArray.from_arrays(pa.array(bounds), pa.array(tokens))})
    )
    datasets.disable_progress_bars()
    first = dataset.select(range(few))
    options = {"keep_in_memory": True, "load_from_cache_file": False}

    def ours() -> int:
        return len(td.hf.pack_dataset(dataset, MAX_LENGTH, strategy="bfd")[:BATCH]["input_ids"])

    def theirs() -> int:
        return len(trl.pack_dataset(first, MAX_LENGTH, "bfd", options)[:BATCH]["input_ids"])

    before = set(_files(Path(datasets.config.HF_DATASETS_CACHE)))
    seconds = race({"tundish": Contestant(ours, int), "trl": Contestant(theirs, int)}, scale.least_rounds)
    if left := set(_files(Path(datasets.config.HF_DATASETS_CACHE))) - before:
        raise OutputsDiffer(f"packing left files: {', '.join(map(str, left))}")
    row = compared(
        f"chat, {count(rows)} rows",
        seconds["tundish"],
        "TRL pack_dataset",
        seconds["trl"] * rows / few,
        samples=rows,
    )
    return Section(title="First batch of a packed Hugging Face dataset", note=NOTE, rows=[row])


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
