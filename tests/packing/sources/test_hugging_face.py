"""Token counts and samples of Hugging Face datasets, against their rows read one by one."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pytest
from datasets import Dataset, DatasetDict, Features, LargeList, Sequence, Value
from support.packing.sources import assert_packs_alike, draw_rows

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError

ROWS = draw_rows(60)
PLAIN = Dataset.from_list(ROWS)

DATASETS: dict[str, Callable[[], Dataset]] = {
    "plain": lambda: PLAIN,
    "select a range": lambda: PLAIN.select(range(7, 30)),
    "select": lambda: PLAIN.select([50, 3, 3, 0, 41]),
    "select nothing": lambda: PLAIN.select([]),
    "shuffle": lambda: PLAIN.shuffle(seed=3),
    "select of a shuffle": lambda: PLAIN.shuffle(seed=3).select([9, 1, 8]),
    "shuffle of a range": lambda: PLAIN.select(range(20, 50)).shuffle(seed=4),
    "filter": lambda: PLAIN.filter(lambda row: len(row["input_ids"]) % 2 == 1),
    "sort": lambda: PLAIN.add_column("key", list(range(60, 0, -1))).sort("key").remove_columns("key"),
    "concatenated": lambda: datasets.concatenate_datasets([PLAIN, PLAIN.select(range(5, 9)), PLAIN]),
    "concatenated shuffles": lambda: datasets.concatenate_datasets(
        [PLAIN.shuffle(seed=1), Dataset.from_list(draw_rows(30, seed=2)).shuffle(seed=2)]
    ),
    "columns in chunks of their own": lambda: datasets.concatenate_datasets(
        [
            datasets.concatenate_datasets(
                [PLAIN.select(range(13)), PLAIN.select(range(13, 60))]
            ).select_columns("labels"),
            PLAIN.select_columns("input_ids"),
        ],
        axis=1,
    ).shuffle(seed=1),
    "split": lambda: PLAIN.train_test_split(0.3, seed=1)["test"],
    "numpy format": lambda: PLAIN.with_format("numpy"),
    "one column in its format": lambda: PLAIN.with_format("torch", columns=["labels"]),
    "large lists of int32": lambda: PLAIN.cast(
        Features({"input_ids": LargeList(Value("int32")), "labels": LargeList(Value("int64"))})
    ),
    "lists of one size": lambda: Dataset.from_dict(
        {"input_ids": [[1, 2, 3], [4, 5, 6]], "labels": [[7, 8, 9], [1, 2, 3]]},
        features=Features({name: Sequence(Value("int16"), length=3) for name in ("input_ids", "labels")}),
    ).shuffle(seed=1),
}


# `Dataset.sort` calls pyarrow in this way.
@pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")
@pytest.mark.parametrize("name", DATASETS)
def test_packs_are_those_of_the_rows(name: str) -> None:
    dataset = DATASETS[name]()
    assert_packs_alike(dataset, dataset.with_format(None).to_list())


def test_the_length_column_comes_first_unless_another_is_named() -> None:
    dataset = (
        PLAIN.add_column("length", np.arange(60)).add_column("turns", np.arange(60) + 100).shuffle(seed=5)
    )
    assert td.packing.lengths(dataset).tolist() == dataset["length"][:]
    assert td.packing.lengths(dataset, "turns").tolist() == dataset["turns"][:]
    assert td.packing.lengths(dataset, "input_ids").tolist() == [len(ids) for ids in dataset["input_ids"]]
    assert td.packing.lengths(dataset).dtype == np.int32


def test_the_column_of_the_tokens_and_those_beside_it() -> None:
    rows = [
        {
            "tokens": [1, 2],
            "input_ids": [9],
            "assistant_masks": [0, 1],
            "loss_weight": [0.5, 2.0],
            "id": 7,
            "text": "a",
        },
        {
            "tokens": [3],
            "input_ids": [9, 9],
            "assistant_masks": [1],
            "loss_weight": [1.0],
            "id": 8,
            "text": "b",
        },
    ]
    dataset = Dataset.from_list(rows)
    samples = td.packing.open_samples(dataset, "tokens")
    first = samples[0]
    assert {key: value.tolist() for key, value in first.items()} == {
        "input_ids": [1, 2],
        "assistant_masks": [0, 1],
        "loss_weight": [0.5, 2.0],
    }
    assert td.packing.open_samples(dataset, "tokens", columns=["loss_weight"])[1].keys() == {
        "input_ids",
        "loss_weight",
    }
    assert td.packing.open_samples(dataset, "tokens", columns=[])[-1]["input_ids"].tolist() == [3]
    with pytest.raises(
        InvalidTypeError, match=r"column 'text' holds string.* lists of numbers .*; its columns are 'tokens'"
    ):
        td.packing.open_samples(dataset, columns=["text"])
    with pytest.raises(
        InvalidInputError, match="the Dataset has no column 'masks': its columns are 'tokens', 'input"
    ):
        td.packing.open_samples(dataset, columns=["masks"])


def test_a_null_is_refused_in_a_selected_row_only() -> None:
    dataset = Dataset.from_dict({"input_ids": [[1], None, [2, 3]], "length": [1, 5, None]})
    with pytest.raises(InvalidInputError, match="the Dataset: row 2 of column 'length' is null"):
        td.packing.lengths(dataset)
    with pytest.raises(InvalidInputError, match="row 1 of column 'input_ids' is null"):
        td.packing.lengths(dataset, "input_ids")
    assert td.packing.lengths(dataset.select([2, 0]), "input_ids").tolist() == [2, 1]
    with pytest.raises(InvalidInputError, match="the Dataset: row 3 of column 'input_ids' is null"):
        td.packing.lengths(dataset.select([2, 0, 0, 1]), "input_ids")
    samples = td.packing.open_samples(dataset.select([2, 1]))
    assert samples[0]["input_ids"].tolist() == [2, 3]
    with pytest.raises(InvalidInputError, match="the Dataset: row 1 of column 'input_ids' is null"):
        samples[1]


def test_labels_that_are_null_are_left_out_of_their_sample() -> None:
    samples = td.packing.open_samples(Dataset.from_dict({"input_ids": [[1], [2]], "labels": [None, [-100]]}))
    assert [sorted(sample) for sample in samples] == [["input_ids"], ["input_ids", "labels"]]


def test_a_transform_is_refused() -> None:
    dataset = PLAIN.with_transform(lambda rows: {"input_ids": [ids[:2] for ids in rows["input_ids"]]})
    for ask in (td.packing.lengths, td.packing.open_samples):
        with pytest.raises(InvalidInputError, match=r"when they are read .* store them with Dataset\.map"):
            ask(dataset)
    counted = td.packing.lengths(dataset[number] for number in range(len(dataset)))
    assert counted.tolist() == [min(len(row["input_ids"]), 2) for row in ROWS]


def test_a_saved_dataset_is_its_folder(tmp_path: Path) -> None:
    shuffled = PLAIN.add_column("text", ["some text"] * 60).shuffle(seed=1)
    shuffled.save_to_disk(tmp_path / "saved", num_shards=3)
    assert_packs_alike(tmp_path / "saved", shuffled.to_list())
    assert_packs_alike(str(tmp_path / "saved"), shuffled.to_list())
    assert_packs_alike(
        datasets.load_from_disk(tmp_path / "saved").shuffle(seed=2), shuffled.shuffle(seed=2).to_list()
    )

    DatasetDict({"train": PLAIN, "test": PLAIN.select([1])}).save_to_disk(tmp_path / "splits")
    with pytest.raises(
        InvalidInputError, match="is a folder of a DatasetDict with the splits test, train: give"
    ):
        td.packing.lengths(tmp_path / "splits")
    assert len(td.packing.lengths(tmp_path / "splits" / "test")) == 1

    (tmp_path / "saved" / "state.json").write_text('{"_data_files": 3}')
    with pytest.raises(InvalidInputError, match=r"state\.json: is not what Dataset\.save_to_disk writes"):
        td.packing.lengths(tmp_path / "saved")


@pytest.mark.parametrize("shards", [None, 2])
def test_a_saved_dataset_without_rows_has_no_samples(shards: int | None, tmp_path: Path) -> None:
    PLAIN.select([]).save_to_disk(tmp_path / "saved", num_shards=shards)
    assert_packs_alike(tmp_path / "saved", [])


def test_samples_of_a_saved_dataset_pickle_without_their_tokens(tmp_path: Path) -> None:
    Dataset.from_dict({"input_ids": [list(range(1000))] * 300}).save_to_disk(tmp_path / "saved")
    for samples in (
        td.packing.open_samples(tmp_path / "saved"),
        td.packing.open_samples(datasets.load_from_disk(tmp_path / "saved", keep_in_memory=False)),
    ):
        assert samples[7]["input_ids"].tolist() == list(range(1000))
        assert len(pickle.dumps(samples)) < 10_000


def test_several_splits_are_refused_by_their_names() -> None:
    with pytest.raises(
        InvalidTypeError, match=r"source is a DatasetDict; .* entries, which are 'train', 'test'"
    ):
        td.packing.lengths(DatasetDict({"train": PLAIN, "test": PLAIN}))


def test_a_streaming_dataset_is_counted_and_cannot_be_read_by_number() -> None:
    stream = PLAIN.to_iterable_dataset()
    assert td.packing.lengths(stream).tolist() == [len(row["input_ids"]) for row in ROWS]
    with pytest.raises(
        InvalidTypeError, match=re.escape("source is an IterableDataset, which gives samples one")
    ):
        td.packing.open_samples(stream)
