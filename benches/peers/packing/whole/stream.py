"""Packs of a Hugging Face stream, beside TRL and beside reading the stream alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
import trl
from measure import Contestant, OutputsDiffer, race
from pyarrow import parquet
from report import Row, Section, compared, count

import tundish as td
from packing.cases import MAX_LENGTH, Scale
from packing.distributions import DISTRIBUTIONS, Distribution, draw_lengths

ROWS = 20_000
ROUNDS = 5
READING = "reading the stream alone"
NOTE = f"""\
One process, from a Parquet file of `input_ids` (int64, lists of at most {MAX_LENGTH}) through \
`datasets.IterableDataset.from_parquet`, in its default format, to all packs of {MAX_LENGTH} tokens. Nanoseconds are \
per token.

- `td.PackedStream(stream, {MAX_LENGTH})` gives tensors: tokens, labels, positions and bounds.
- `trl.pack_dataset(stream, {MAX_LENGTH}, "bfd")` gives lists. Its users' collator makes a tensor of the tokens of \
each pack: "to tensors" includes `torch.tensor(pack["input_ids"])`, and nothing else of the collator.
- Reading alone gives a list of Python integers a sample: `for sample in stream`. `PackedStream` reads the Arrow \
tables of the same stream, and makes no lists."""


def stream(scale: Scale) -> Section:
    """Tokens a second of a packed stream."""
    section = Section(title="Packs of a Hugging Face stream", note=NOTE)
    rows = min(ROWS, scale.samples[-1])
    for distribution in DISTRIBUTIONS:
        section.rows += _rows(scale.folder, rows, distribution)
    return section


def _rows(folder: Path, rows: int, distribution: Distribution) -> list[Row]:
    lengths = np.minimum(draw_lengths(rows, distribution), MAX_LENGTH)
    file = folder / "stream.parquet"
    _write(file, lengths)
    source = datasets.IterableDataset.from_parquet(str(file), cache_dir=str(folder / "cache"))

    def tokens_of(packs: Callable[[], Iterable[Any]]) -> Callable[[], int]:
        return lambda: sum(len(pack["input_ids"]) for pack in packs())

    def tensors() -> Iterable[dict[str, torch.Tensor]]:
        return ({"input_ids": torch.tensor(pack["input_ids"])} for pack in trl_packs())

    def trl_packs() -> Iterable[Any]:
        packs: Iterable[Any] = trl.pack_dataset(source, MAX_LENGTH, "bfd")
        return packs

    calls = {
        "tundish": tokens_of(lambda: td.PackedStream(source, MAX_LENGTH)),
        "TRL pack_dataset, to tensors": tokens_of(tensors),
        "TRL pack_dataset, to lists": tokens_of(trl_packs),
        READING: tokens_of(lambda: source),
    }
    seconds = race({name: Contestant(call, int) for name, call in calls.items()}, ROUNDS)
    tokens = int(lengths.sum(dtype=np.int64))
    for name, call in calls.items():
        if (found := call()) != tokens:
            raise OutputsDiffer(f"{name} gives {found} tokens of {tokens}")
    return [
        compared(
            f"{distribution.name}, {count(rows)} samples",
            seconds["tundish"],
            peer,
            seconds[peer],
            samples=tokens,
        )
        for peer in calls
        if peer != "tundish"
    ]


def _write(file: Path, lengths: np.ndarray[Any, Any]) -> None:
    bounds = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=bounds[1:])
    tokens = np.random.default_rng(0).integers(0, 150_000, bounds[-1])
    parquet.write_table(
        pa.table({"input_ids": pa.ListArray.from_arrays(bounds, tokens)}), file, row_group_size=1000
    )
