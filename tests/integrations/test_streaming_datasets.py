"""`td.hf.pack_dataset` of streams, against the packs of the same samples in a `Dataset`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest
from datasets import Dataset, IterableDataset, IterableDatasetDict
from support.integrations.tiny_models import draw_chats
from torch.utils.data import DataLoader

import tundish as td
from tundish.errors import InvalidInputError

CHATS = Dataset.from_list(draw_chats(60, "completion_mask", longest=60))


def stream(num_shards: int = 3) -> IterableDataset:
    return CHATS.to_iterable_dataset(num_shards=num_shards)


def plain(rows: Iterable[dict[str, Any]]) -> list[dict[str, list[int]]]:
    columns = ("input_ids", "labels", "position_ids", "cu_seqlens", "seq_lengths")
    return [{name: list(row[name]) for name in columns} for row in rows]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"overlong": "split"}, {"mode": "ordered", "overlong": "split"}),
        ({"mode": "sequential", "overlong": "drop"}, {"mode": "sequential", "overlong": "drop"}),
        ({"strategy": "bfd", "window": 4}, {"mode": "ordered", "overlong": "truncate", "window": 4}),
        ({"strategy": "bfd_split"}, {"mode": "ordered", "overlong": "split"}),
        ({"strategy": "wrapped"}, {"mode": "hard", "drop_last": False}),
    ],
)
def test_packs_are_those_of_the_dataset(given: dict[str, Any], meant: dict[str, Any]) -> None:
    packs = td.hf.pack_dataset(stream(), 48, **given)
    assert isinstance(packs, IterableDataset)
    expected = plain(td.hf.pack_dataset(CHATS, 48, **meant))
    assert plain(packs) == expected
    # And in a second epoch.
    assert plain(packs) == expected


def test_every_split_is_packed() -> None:
    packs = td.hf.pack_dataset(IterableDatasetDict({"train": stream(), "test": stream(1)}), 64)
    assert isinstance(packs, IterableDatasetDict)
    expected = plain(td.hf.pack_dataset(CHATS, 64, mode="ordered"))
    assert plain(packs["train"]) == plain(packs["test"]) == expected


def test_a_stream_resumes_from_its_state() -> None:
    packs = td.hf.pack_dataset(stream(), 64, window=4)
    rows = iter(packs)
    seen = [next(rows) for _ in range(7)]
    resumed = td.hf.pack_dataset(stream(), 64, window=4)
    resumed.load_state_dict(packs.state_dict())
    assert plain([*seen, *resumed]) == plain(td.hf.pack_dataset(CHATS, 64, mode="ordered", window=4))


def test_one_worker_reads_the_stream_and_more_are_refused() -> None:
    packs = td.hf.pack_dataset(stream(), 64)
    collate = td.PackedCollator()

    def batches(workers: int) -> list[list[int]]:
        loader = DataLoader(packs, batch_size=2, collate_fn=collate, num_workers=workers)
        return [batch["input_ids"].tolist()[0] for batch in loader]

    assert batches(0) == batches(1)
    with pytest.raises(InvalidInputError, match=r"read in 2 workers: set dataloader_num_workers to 0 or 1"):
        batches(2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mode": "best_fit"}, "mode 'best_fit' sorts all samples by length"),
        ({"strategy": "bfd", "overlong": "drop"}, "use mode='ordered' with overlong='drop'"),
        ({"align": 5}, "align=5"),
    ],
)
def test_bad_arguments_are_refused_before_a_sample_is_read(given: dict[str, Any], message: str) -> None:
    def never() -> Any:
        raise AssertionError("a sample was read")
        yield

    with pytest.raises(InvalidInputError, match=re.escape(message)):
        td.hf.pack_dataset(IterableDataset.from_generator(never), 64, **given)
