"""`PackedDataset`: items against a walk through the tokens one by one that knows nothing of plans."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets as hf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.packing.plans import changed
from support.packing.samples import BatchedRows, Rows, make_samples
from torch.utils.data import DataLoader, Subset

import tundish as td
from tundish.errors import InvalidTypeError, PlanMismatchError

Samples = list[list[int]]


def lengths_of(samples: Samples) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array([len(sample) for sample in samples], dtype=np.int64)


def expected_packs(
    samples: Samples, order: Sequence[int], max_length: int, drop_last: bool
) -> Iterator[list[list[int]]]:
    """The tokens of each pack, piece by piece, taken one at a time."""
    pack: list[list[int]] = []
    filled = 0
    for index in order:
        piece: list[int] = []
        for token in samples[index]:
            piece.append(token)
            filled += 1
            if filled == max_length:
                yield [*pack, piece]
                pack, piece, filled = [], [], 0
        if piece:
            pack.append(piece)
    if pack and not drop_last:
        yield pack


def assert_is_pack(item: dict[str, Any], pieces: list[list[int]]) -> None:
    tokens = [token for piece in pieces for token in piece]
    bounds = [0]
    for piece in pieces:
        bounds.append(bounds[-1] + len(piece))
    assert set(item) == {"input_ids", "labels", "position_ids", "cu_seqlens", "max_seqlen", "dataset_id"}
    assert item["input_ids"].tolist() == tokens
    assert item["labels"].tolist() == tokens
    assert item["position_ids"].tolist() == [place for piece in pieces for place in range(len(piece))]
    assert item["cu_seqlens"].tolist() == bounds
    assert item["max_seqlen"] == max(map(len, pieces))
    assert isinstance(item["max_seqlen"], int)
    for key in ("input_ids", "labels", "position_ids"):
        assert item[key].dtype == torch.int64
    assert item["cu_seqlens"].dtype == torch.int32


@given(
    lengths=st.lists(st.integers(0, 30), max_size=25),
    max_length=st.integers(1, 20),
    seed=st.none() | st.integers(0, 2**32 - 1),
    drop_last=st.booleans(),
    attached=st.booleans(),
)
def test_items_are_the_packs_of_the_token_stream(
    lengths: list[int], max_length: int, seed: int | None, drop_last: bool, attached: bool
) -> None:
    samples = make_samples(lengths)
    order = np.arange(len(lengths))
    if seed is not None:
        np.random.RandomState(seed).shuffle(order)
    plan = td.pack(lengths_of(samples), max_length, seed=seed, drop_last=drop_last)
    if not attached:
        plan = changed(plan)
    dataset = td.PackedDataset(samples, plan)
    expected = list(expected_packs(samples, order.tolist(), max_length, drop_last))
    assert len(dataset) == len(expected)
    for item, pieces in zip(dataset.__getitems__(range(len(dataset))), expected, strict=True):
        assert_is_pack(item, pieces)
    for index, pieces in enumerate(expected):
        assert_is_pack(dataset[index], pieces)


@given(
    lengths=st.lists(st.lists(st.integers(0, 12), max_size=10), min_size=1, max_size=4),
    max_length=st.integers(1, 15),
    global_pack=st.booleans(),
    drop_last=st.booleans(),
    attached=st.booleans(),
)
def test_several_datasets(
    lengths: list[list[int]], max_length: int, global_pack: bool, drop_last: bool, attached: bool
) -> None:
    several = [make_samples(part, first=1000 * number) for number, part in enumerate(lengths)]
    plan = td.pack_datasets(
        [lengths_of(part) for part in several], max_length, global_pack=global_pack, drop_last=drop_last
    )
    if not attached:
        plan = changed(plan)
    streams = [[sample for part in several for sample in part]] if global_pack else several
    expected = [
        pack
        for stream in streams
        for pack in expected_packs(stream, range(len(stream)), max_length, drop_last)
    ]
    dataset = td.PackedDataset([Rows(part) for part in several], plan)
    backwards = list(range(len(expected)))[::-1]
    for index, item in zip(backwards, dataset.__getitems__(backwards), strict=True):
        assert_is_pack(item, expected[index])
        assert item["dataset_id"].dtype == torch.int64
        starts = item["input_ids"][item["cu_seqlens"][:-1].long()]
        assert item["dataset_id"].tolist() == (starts // 1000).tolist()


def as_hf(samples: Samples, form: str | None) -> Any:
    rows = hf.Dataset.from_dict({"input_ids": samples, "text": ["x"] * len(samples)})
    return rows.with_format(form)


def as_memmaps(samples: Samples, folder: Path) -> list[Any]:
    rows: list[Any] = []
    for number, sample in enumerate(samples):
        file = folder / f"{number}.bin"
        np.array(sample, dtype=np.uint16).tofile(file)
        rows.append(np.memmap(file, dtype=np.uint16, mode="r"))
    return rows


@pytest.mark.parametrize(
    "form",
    [
        "lists", "tuples", "int8", "uint16", "uint64", "tensors", "memmaps", "dicts", "dicts of arrays",
        "dicts of tensors", "hf", "hf numpy", "hf torch", "subset", "object array", "rows of arrays",
    ],
)  # fmt: skip
def test_every_form_of_samples_gives_the_same_items(form: str, tmp_path: Path) -> None:
    samples = make_samples([6, 1, 9, 13, 2, 7, 11, 5])
    plan = td.pack(lengths_of(samples), 10, seed=3)
    objects = np.empty(len(samples), dtype=object)
    objects[:] = [np.array(sample) for sample in samples]
    rows: Any = {
        "lists": lambda: samples,
        "tuples": lambda: tuple(map(tuple, samples)),
        "int8": lambda: [np.array(sample, dtype=np.int8) for sample in samples],
        "uint16": lambda: [np.array(sample, dtype=np.uint16) for sample in samples],
        "uint64": lambda: [np.array(sample, dtype=np.uint64) for sample in samples],
        "tensors": lambda: [torch.tensor(sample, dtype=torch.int32) for sample in samples],
        "memmaps": lambda: as_memmaps(samples, tmp_path),
        "dicts": lambda: [{"input_ids": sample} for sample in samples],
        "dicts of arrays": lambda: [{"input_ids": np.array(sample), "labels": None} for sample in samples],
        "dicts of tensors": lambda: [{"input_ids": torch.tensor(sample)} for sample in samples],
        "hf": lambda: as_hf(samples, None),
        "hf numpy": lambda: as_hf(samples, "numpy"),
        "hf torch": lambda: as_hf(samples, "torch"),
        "subset": lambda: Subset(as_hf([[99], *samples], "numpy"), range(1, len(samples) + 1)),
        "object array": lambda: objects,
        "rows of arrays": lambda: [Rows(samples)],
    }[form]()
    dataset = td.PackedDataset(rows, plan)
    plain = td.PackedDataset(Rows(samples), plan)
    for item, expected in zip(dataset.__getitems__(range(5)), plain.__getitems__(range(5)), strict=True):
        for key, value in expected.items():
            assert torch.equal(torch.as_tensor(item[key]), torch.as_tensor(value)), key
            assert type(item[key]) is type(value)


def test_samples_of_one_length_may_be_the_rows_of_an_array() -> None:
    rows = np.arange(12, dtype=np.int32).reshape(3, 4)
    dataset = td.PackedDataset(rows, td.pack([4, 4, 4], 6))
    assert dataset[1]["input_ids"].tolist() == [6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("form", [None, "numpy", "torch"])
def test_labels_are_the_samples_own(form: str | None) -> None:
    rows = hf.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5]], "labels": [[-100, 2, 3], [-100, 5]]})
    dataset = td.PackedDataset(rows.with_format(form), td.pack([3, 2], 4))
    assert dataset[0]["labels"].tolist() == [-100, 2, 3, -100]
    assert dataset[0]["input_ids"].tolist() == [1, 2, 3, 4]


def test_samples_with_and_without_labels_mix() -> None:
    rows = [
        {"input_ids": [1, 2], "labels": [7, 8]},
        {"input_ids": [3, 4]},
        {"input_ids": [5], "labels": None},
    ]
    assert td.PackedDataset(rows, td.pack([2, 2, 1], 5))[0]["labels"].tolist() == [7, 8, 3, 4, 5]


def test_first_tokens_of_pieces_can_be_masked() -> None:
    dataset = td.PackedDataset([[1, 2, 3], [], [4, 5, 6, 7]], td.pack([3, 0, 4], 5), mask_first_token=True)
    assert dataset[0]["labels"].tolist() == [-100, 2, 3, -100, 5]
    assert dataset[0]["input_ids"].tolist() == [1, 2, 3, 4, 5]
    masked = td.PackedDataset([[1, 2, 3]], td.pack([3], 2, drop_last=False), mask_first_token=True)
    assert masked[1]["labels"].tolist() == [-100]


def test_pieces_without_tokens_leave_no_trace() -> None:
    item = td.PackedDataset([[1], [], [], [2, 3]], td.pack([1, 0, 0, 2], 3))[0]
    assert item["cu_seqlens"].tolist() == [0, 1, 3]


@pytest.mark.parametrize("give", [iter, tuple, np.array, lambda rows: (row for row in rows)])
def test_rows_that_are_asked_for_together_may_come_as_any_iterable(give: Any) -> None:
    class Given(BatchedRows):
        def __getitems__(self, indices: list[int]) -> Any:
            return give(super().__getitems__(indices))

    dataset = td.PackedDataset(Given([[1, 2], [3, 4], [5, 6]]), td.pack([2, 2, 2], 3))
    assert [item["input_ids"].tolist() for item in dataset.__getitems__([0, 1])] == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("rows_type", [Rows, BatchedRows])
def test_a_batch_reads_each_sample_once(rows_type: type[Rows]) -> None:
    rows = rows_type(make_samples([25, 3, 4]))
    dataset = td.PackedDataset(rows, td.pack([25, 3, 4], 8))
    dataset.__getitems__([0, 1, 2, 3, 3, 0])
    assert sorted(rows.read) == [0, 1, 2]


def test_items_share_no_memory() -> None:
    row = np.arange(8)
    dataset = td.PackedDataset([row], td.pack([8], 8))
    first, second = dataset.__getitems__([0, 0])
    first["labels"].fill_(-1)
    assert row.tolist() == list(range(8))
    assert first["input_ids"].tolist() == list(range(8))
    assert second["labels"].tolist() == list(range(8))


def test_indices() -> None:
    dataset = td.PackedDataset([[0, 1, 2, 3, 4, 5]], td.pack([6], 2))
    assert dataset[-1]["input_ids"].tolist() == [4, 5]
    assert dataset[np.int32(-3)]["input_ids"].tolist() == [0, 1]
    assert len(list(dataset)) == 3
    assert dataset.__getitems__([]) == []
    for index in (3, -4, 10**30):
        with pytest.raises(IndexError, match=f"pack {index} does not exist: the plan has 3 packs"):
            dataset[index]
    for wrong in (1.0, "1", None, slice(0, 2)):
        with pytest.raises(InvalidTypeError, match="by its number"):
            dataset[wrong]  # type: ignore[index]


def test_an_empty_plan_is_an_empty_dataset() -> None:
    for samples in ([], [[]], [[], []], [[1]]):
        dataset = td.PackedDataset(samples, td.pack(np.array([len(s) for s in samples], dtype=int), 4))
        assert len(dataset) == 0
        with pytest.raises(IndexError):
            dataset[0]


@pytest.mark.parametrize("sample", [0, 2, 3, 5])
@pytest.mark.parametrize("by", [-2, -1, 1, 30])
def test_a_changed_length_is_refused_and_the_sample_named(sample: int, by: int) -> None:
    samples = make_samples([8, 3, 7, 5, 4, 5])
    plan = td.pack(lengths_of(samples), 8)
    samples[sample] = (samples[sample] + [0] * 40)[: len(samples[sample]) + by]
    dataset = td.PackedDataset(samples, plan)
    wanted = (
        f"sample {sample} of dataset 0 has {len(samples[sample])} tokens, .* for {plan.lengths[0][sample]} "
    )
    with pytest.raises(PlanMismatchError, match=wanted):
        dataset.__getitems__(range(len(dataset)))


def test_a_changed_length_names_sample_and_dataset_of_a_global_pack() -> None:
    plan = td.pack_datasets([[4, 4], [2, 6]], 8, global_pack=True)
    dataset = td.PackedDataset([[[1] * 4] * 2, [[1] * 2, [1] * 5]], plan)
    dataset[0]
    with pytest.raises(PlanMismatchError, match=r"sample 1 of dataset 1 has 5 tokens, .* for 6 \(pack 1\)"):
        dataset[1]


@pytest.mark.parametrize(
    ("lengths", "pack"),
    [
        ([8, 3, 6, 5, 4, 6], 2),  # an inner sample shorter
        ([8, 4, 7, 5, 4, 6], 1),  # an inner sample longer
        ([7, 3, 7, 5, 4, 6], 0),  # a piece beyond its sample's end
        ([8, 2, 8, 5, 4, 6], 1),  # one shorter, the next longer by as much
        ([8, 3, 1, 5, 4, 6], 1),  # the last sample ends before the pack does
    ],
)
def test_without_lengths_pack_and_dataset_are_named(lengths: list[int], pack: int) -> None:
    plan = changed(td.pack_datasets([[8], [8, 3, 7, 5, 4, 6]], 8))
    dataset = td.PackedDataset([[[1] * 8], make_samples(lengths)], plan)
    assert not plan.has_lengths
    dataset[0]
    with pytest.raises(PlanMismatchError, match=f"pack {pack + 1} of dataset 1 "):
        dataset.__getitems__(range(len(dataset)))


def test_without_lengths_a_right_total_of_wrong_pieces_is_refused() -> None:
    plan = changed(td.pack([3, 4, 5], 8))
    assert len(td.PackedDataset(make_samples([3, 4, 5]), plan)[0]["input_ids"]) == 8
    with pytest.raises(PlanMismatchError, match=r"holds 8 tokens, its longest piece 5; .* 8, the longest 4"):
        td.PackedDataset(make_samples([2, 5, 5]), plan)[0]


@pytest.mark.parametrize("one", [True, False])
def test_without_lengths_a_short_last_pack_is_checked(one: bool) -> None:
    lengths = [[5, 3, 2]] if one else [[5, 3, 2], [3]]
    plan = changed(td.pack_datasets(lengths, 4, drop_last=False))
    samples = [make_samples(part) for part in lengths]
    dataset = td.PackedDataset(samples, plan)
    assert dataset[2]["input_ids"].tolist() == [8, 9]
    samples[0][2].pop()
    with pytest.raises(PlanMismatchError, match="pack 2 of dataset 0"):
        td.PackedDataset(samples, plan)[2]


@pytest.mark.parametrize(
    ("global_pack", "field", "value"),
    [
        (False, "indices", 2),
        (False, "indices", 2**31 - 1),
        (False, "dataset_id", 2),
        (False, "dataset_id", 2**31 - 1),
        (True, "indices", 4),
        (True, "indices", 2**31 - 1),
    ],
)
def test_a_damaged_plan_is_refused_and_ends_no_loop(global_pack: bool, field: str, value: int) -> None:
    lengths = [[4, 4], [4, 4]]
    plan = td.pack_datasets(lengths, 4, global_pack=global_pack)
    columns = {name: getattr(plan, name).copy() for name in plan.arrays()}
    columns[field][2] = value
    damaged = changed(plan, list(columns.values()))
    dataset = td.PackedDataset([make_samples(part) for part in lengths], damaged)
    said = r"pack 2 takes sample \d+ of dataset \d+, and the datasets have \[2, 2\] samples: .* damaged"
    with pytest.raises(PlanMismatchError, match=said):
        list(dataset)


@pytest.mark.parametrize("on_disk", [True, False])
def test_pickled_datasets_give_the_same_items(on_disk: bool, tmp_path: Path) -> None:
    samples = make_samples([3, 4, 5])
    plan = td.pack([3, 4, 5], 4)
    if on_disk:
        plan.save(tmp_path / "plan")
        plan = td.PackPlan.load(tmp_path / "plan")
    dataset = td.PackedDataset(samples, plan)
    twin = pickle.loads(pickle.dumps(dataset))
    assert [item["input_ids"].tolist() for item in twin] == [item["input_ids"].tolist() for item in dataset]


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_workers_of_a_data_loader(start_method: str, tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(0, 40, 200)
    samples = [np.arange(length, dtype=np.uint16) + index for index, length in enumerate(lengths)]
    td.pack(lengths, 64, seed=0).save(tmp_path / "plan")
    dataset = td.PackedDataset(samples, td.PackPlan.load(tmp_path / "plan", lengths=lengths))
    loader = DataLoader(
        dataset,
        batch_sampler=td.PackedBatchSampler(dataset.plan, 4),
        collate_fn=list,
        num_workers=1 if start_method == "spawn" else 2,
        multiprocessing_context=start_method,
    )
    expected = [index for batch in td.PackedBatchSampler(dataset.plan, 4) for index in batch]
    received = [item for batch in loader for item in batch]
    assert len(received) == len(expected)
    for item, index in zip(received, expected, strict=True):
        for key, value in dataset[index].items():
            assert torch.equal(torch.as_tensor(item[key]), torch.as_tensor(value)), key
