"""`PackedDataset` over a mix: the packs of several plans, each with its own samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.packing.samples import Rows
from torch.utils.data import DataLoader

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError, PlanMismatchError


def samples_of(count: int, first: int, seed: int) -> list[list[int]]:
    lengths = np.random.default_rng(seed).integers(1, 9, count).tolist()
    return [[first + number] * length for number, length in enumerate(lengths)]


WEB, CODE, BOOKS, CHAT = (samples_of(40, 1000 * number, number) for number in range(1, 5))


def lengths_of(samples: list[list[int]]) -> list[int]:
    return list(map(len, samples))


# One plan of two datasets, one of whole samples, one that joins its datasets.
PLANS = [
    td.pack_datasets([lengths_of(WEB), lengths_of(CODE)], 8),
    td.pack(lengths_of(CHAT), 16, mode="best_fit"),
    td.pack_datasets([lengths_of(BOOKS), lengths_of(WEB)], 8, global_pack=True),
]
DATASETS: list[Any] = [[WEB, CODE], CHAT, [BOOKS, WEB]]
MIX = td.mix(PLANS, [3, 1, 2], num_packs=200, seed=2)


def assert_items_alike(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for item, own in zip(found, expected, strict=True):
        assert item.keys() == own.keys()
        for key, value in own.items():
            assert torch.equal(item[key], value) if isinstance(value, torch.Tensor) else item[key] == value


def test_items_are_those_of_the_plans() -> None:
    parts = [td.PackedDataset(datasets, plan) for datasets, plan in zip(DATASETS, PLANS, strict=True)]
    expected = [parts[plan][pack] for plan, pack in MIX]
    for item, (plan, _) in zip(expected, MIX, strict=True):
        # Datasets are numbered through all plans, of which the first has two.
        item["dataset_id"] += [0, 2, 3][plan]
    for mixed in (
        td.PackedDataset(DATASETS, MIX),
        td.PackedDataset(parts, td.mix(parts, [3, 1, 2], num_packs=200, seed=2)),
    ):
        assert len(mixed) == 200 and mixed.plan.fingerprint == MIX.fingerprint
        assert_items_alike(list(mixed), expected)
        assert_items_alike(mixed.__getitems__([5, -1, 5, 0]), [expected[place] for place in (5, -1, 5, 0)])
        assert mixed.__getitems__([]) == [] and mixed.plan.max_length == 16
        with pytest.raises(IndexError, match="pack 200 does not exist"):
            mixed[200]
    assert [
        dataset is own for dataset, own in zip(mixed.datasets, [WEB, CODE, CHAT, BOOKS, WEB], strict=True)
    ] == [True] * 5


def test_a_batch_reads_each_sample_once() -> None:
    rows = [Rows(samples) for samples in (WEB, CHAT)]
    plans = [td.pack(lengths_of(samples), 8, drop_last=False) for samples in (WEB, CHAT)]
    mix = td.mix(plans, [1, 1], exhausted="drop")
    td.PackedDataset(rows, mix).__getitems__(range(len(mix)))
    assert [sorted(row.read) for row in rows] == [list(range(40))] * 2


def test_options_hold_for_all_plans() -> None:
    weighted = [
        [{"input_ids": sample, "w": [0.5] * len(sample)} for sample in samples] for samples in (WEB, CHAT)
    ]
    plans = [td.pack(lengths_of(samples), 8) for samples in (WEB, CHAT)]
    mix = td.mix(plans, [1, 1])
    mixed = td.PackedDataset(weighted, mix, columns={"w": 0.0}, mask_first_token=True)
    assert mixed.columns == {"w": 0.0}
    batch = td.PackedCollator()(mixed.__getitems__(range(6)))
    assert batch["w"].shape == batch["input_ids"].shape
    assert all((item["labels"][item["cu_seqlens"][:-1].long()] == -100).all() for item in mixed)
    parts = [
        td.PackedDataset(samples, plan, columns={"w": 0.0})
        for samples, plan in zip(weighted, plans, strict=True)
    ]
    assert td.PackedDataset(parts, mix).columns == {"w": 0.0}
    with pytest.raises(
        InvalidInputError, match=r"datasets\[0\] is a PackedDataset, which has options of its own"
    ):
        td.PackedDataset(parts, mix, mask_first_token=True)
    # A padding value says which dtype its column has.
    for columns in (None, {"w": 0}, {"w": False}):
        other = td.PackedDataset(weighted[1], plans[1], columns=columns, drop_columns="unknown")
        with pytest.raises(InvalidInputError, match=r"datasets\[1\] has other columns"):
            td.PackedDataset([parts[0], other], mix)


@pytest.mark.parametrize(
    ("datasets", "kind", "message"),
    [
        (np.zeros((3, 4), int), InvalidTypeError, "datasets is an ndarray: give a list"),
        (DATASETS[:2], PlanMismatchError, "the mix has 3 plans, and what is given is for 2"),
        ([WEB, CHAT, BOOKS], PlanMismatchError, "2"),
        ([[WEB, CODE], CHAT[:-1], [BOOKS, WEB]], PlanMismatchError, "39"),
        (
            [td.PackedDataset(CHAT, PLANS[1]), CHAT, [BOOKS, WEB]],
            PlanMismatchError,
            "another plan than plan 0",
        ),
        (
            [td.PackedDataset(DATASETS, MIX), CHAT, [BOOKS, WEB]],
            PlanMismatchError,
            "another plan than plan 0",
        ),
    ],
)
def test_datasets_that_do_not_fit_are_refused(datasets: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        td.PackedDataset(datasets, MIX)


def tokens_of(items: list[dict[str, Any]]) -> list[list[int]]:
    return [item["input_ids"].tolist() for item in items]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_reads_the_mix_in_its_order(workers: int) -> None:
    mixed = td.PackedDataset(DATASETS, MIX)
    sampler = td.PackedBatchSampler(MIX, 4, rank=0, world_size=1)
    loader: DataLoader[Any] = DataLoader(
        mixed, batch_sampler=sampler, collate_fn=tokens_of, num_workers=workers
    )
    assert [tokens for batch in loader for tokens in batch] == tokens_of(list(mixed))
