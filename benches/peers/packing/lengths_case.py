"""Token counts from files and from Hugging Face datasets, against the loops that people write.

Invariant: all contestants of a row count the same rows, and their counts are compared in full.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from measure import Contestant, race
from report import Row, Section, compared, count, duration, rate

import tundish as td
from packing.cases import Scale
from packing.distributions import RANDOM_SEED
from packing.equal_outputs import assert_equal

# Rows of a chat of one turn, so that 10⁷ of them fit on the disks of small machines.
LONGEST = 31
ROWS_AT_ONCE = 10**6
LOOP_ROWS = 10**6
COPY = "a copy of the counts in fresh memory"
DECODING = "decoding of the tokens"
NOTE = f"""\
`td.packing.lengths(source)`. Each row has 1 … {LONGEST} tokens (int32) in `input_ids`, their number (int32) in \
`length`, and is in one Parquet file with row groups of {count(ROWS_AT_ONCE)} rows, and in a dataset that \
`save_to_disk` wrote. Nanoseconds are per sample.

- `ds["length"][:]` gives a Python list, as the samplers of trainers take it.
- The loops take `len` of each list of `input_ids`, in batches of 1000: `ds.iter(1000)`, and `to_pylist` of what \
`ParquetFile.iter_batches` gives. They run over {count(LOOP_ROWS)} rows, and their time is multiplied by the number of \
samples over that.
- Parquet has no offsets: tokens are decoded to be counted, by all contestants. The least that counting takes is their \
decoding alone: `iter_batches` of a mapped file on one thread, with the fastest size of batches.
- The counts of the `length` column are copied from the chunks of 1000 rows in which `datasets` holds them, and \
checked. The least that this takes is a copy of one numpy array into fresh memory.
- The JSON Lines are `{{"id": "row-0", "length": 17}}`; their figure is lines a second.
- The counts of a shuffled dataset are gathered through its indices."""


def lengths(scale: Scale) -> Section:
    """Lengths and lists of both kinds of files."""
    samples = scale.samples[-1]
    parquet, folder = scale.folder / "rows.parquet", scale.folder / "rows"
    lines = scale.folder / "rows.jsonl"
    _write(parquet, folder, samples)
    dataset = datasets.load_from_disk(folder)
    expected = np.array(dataset["length"][:], dtype=np.int32)
    few = min(samples, LOOP_ROWS)
    shuffled = dataset.shuffle(seed=RANDOM_SEED, keep_in_memory=True)
    with lines.open("w") as file:
        file.writelines(
            f'{{"id": "row-{row}", "length": {tokens}}}\n' for row, tokens in enumerate(expected[:few])
        )

    calls = {
        "Dataset, length": lambda: td.packing.lengths(dataset),
        "Dataset, input_ids": lambda: td.packing.lengths(dataset, "input_ids"),
        "shuffled Dataset, input_ids": lambda: td.packing.lengths(shuffled, "input_ids"),
        "Parquet, length": lambda: td.packing.lengths(parquet),
        "Parquet, input_ids": lambda: td.packing.lengths(parquet, "input_ids"),
        "JSON Lines, length": lambda: td.packing.lengths(lines),
        'ds["length"][:]': lambda: dataset["length"][:],
        "loop of ds": lambda: _dataset_loop(dataset.select(range(few))),
        "loop of Parquet": lambda: _parquet_loop(parquet, few),
        "loop of json.loads": lambda: _lines_loop(lines),
    }
    limits = {COPY: lambda: expected.copy(), DECODING: lambda: _decode(parquet)}

    def digest(found: Any) -> int:
        return int(np.sum(found, dtype=np.int64))

    contestants = {name: Contestant(call, digest) for name, call in {**calls, **limits}.items()}
    seconds = race(contestants, scale.least_rounds)
    for name, call in calls.items():
        found = np.asarray(call(), dtype=np.int32)
        own = expected[shuffled._indices.column(0).to_numpy()] if name.startswith("shuffled") else expected
        assert_equal(name, found, own[: len(found)])
    parquet.unlink()
    lines.unlink()
    shutil.rmtree(folder)

    scaled = samples / few
    rows = [
        compared(
            f"{case}, {count(samples)}",
            seconds[case],
            peer,
            seconds[peer] * factor,
            samples=samples,
        )
        for case, peer, factor in (
            ("Dataset, length", 'ds["length"][:]', 1.0),
            ("Dataset, length", COPY, 1.0),
            ("Dataset, input_ids", "loop of ds", scaled),
            ("shuffled Dataset, input_ids", "loop of ds", scaled),
            ("Parquet, length", "loop of Parquet", scaled),
            ("Parquet, input_ids", "loop of Parquet", scaled),
            ("Parquet, input_ids", DECODING, 1.0),
        )
    ]
    per_second = few / seconds["JSON Lines, length"]
    rows.append(
        Row(
            case=f"JSON Lines, length, {count(few)}",
            ours=duration(seconds["JSON Lines, length"]),
            peer="loop of json.loads",
            peers=duration(seconds["loop of json.loads"]),
            figure=rate(per_second),
        )
    )
    return Section(title="Lengths from files and datasets", note=NOTE, rows=rows)


def _write(parquet: Path, folder: Path, samples: int) -> None:
    generator = np.random.default_rng(RANDOM_SEED)
    writer = None
    for begin in range(0, samples, ROWS_AT_ONCE):
        counts = generator.integers(1, LONGEST + 1, min(ROWS_AT_ONCE, samples - begin), dtype=np.int32)
        bounds = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=bounds[1:])
        tokens = generator.integers(0, 50_000, bounds[-1], dtype=np.int32)
        table = pa.table({"input_ids": pa.ListArray.from_arrays(bounds, tokens), "length": counts})
        writer = writer or pq.ParquetWriter(parquet, table.schema)
        writer.write_table(table, row_group_size=ROWS_AT_ONCE)
    assert writer is not None
    writer.close()
    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_parquet(str(parquet), cache_dir=str(folder.with_name("cache")))
    dataset.save_to_disk(folder)
    shutil.rmtree(folder.with_name("cache"))


def _dataset_loop(dataset: Any) -> list[int]:
    return [len(ids) for batch in dataset.iter(1000) for ids in batch["input_ids"]]


def _parquet_loop(path: Path, rows: int) -> list[int]:
    found: list[int] = []
    for batch in pq.ParquetFile(path).iter_batches(1000, columns=["input_ids"]):
        found += [len(ids) for ids in batch.column(0).to_pylist()]
        if len(found) >= rows:
            break
    return found[:rows]


def _lines_loop(path: Path) -> list[int]:
    with path.open("rb") as file:
        return [json.loads(line)["length"] for line in file]


def _decode(path: Path) -> int:
    with pq.ParquetFile(path, memory_map=True) as file:
        batches = file.iter_batches(2**14, columns=["input_ids"], use_threads=False)
        return sum(batch.num_rows for batch in batches)
