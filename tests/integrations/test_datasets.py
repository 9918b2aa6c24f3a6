"""`td.hf.pack_dataset`: rows against samples joined in plain Python, and what users do with a `Dataset`."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from support.integrations.tiny_models import draw_chats
from torch.utils.data import DataLoader

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError

CHATS = Dataset.from_list(draw_chats(50, "completion_mask", "assistant_masks"))
MASKS = ("completion_mask", "assistant_masks")
EVERY_COLUMN = {
    "input_ids",
    "labels",
    "position_ids",
    "cu_seqlens",
    "max_seqlen",
    "dataset_id",
    "seq_lengths",
}


def joined(rows: list[dict[str, Any]], pack: td.Pack) -> dict[str, Any]:
    """The row of a pack, by the definition of its columns."""
    row: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": [], "seq_lengths": []}
    for piece in pack.pieces:
        sample = rows[piece.sample]
        part = range(piece.start, len(sample["input_ids"]) if piece.stop is None else piece.stop)
        row["input_ids"] += [sample["input_ids"][token] for token in part]
        row["labels"] += [
            sample.get("labels", sample["input_ids"])[token]
            if token > part.start and all(sample[mask][token] for mask in MASKS if mask in sample)
            else -100
            for token in part
        ]
        row["position_ids"] += range(len(part))
        row["seq_lengths"].append(len(part))
    return row


def assert_rows(packs: Dataset, rows: list[dict[str, Any]], plan: td.PackPlan) -> None:
    assert len(packs) == len(plan)
    for found, pack in zip(packs, plan, strict=True):
        assert found.keys() == EVERY_COLUMN
        for key, value in joined(rows, pack).items():
            assert list(found[key]) == value, key
        assert found["cu_seqlens"].tolist() == np.cumsum([0, *found["seq_lengths"]]).tolist()
        assert found["max_seqlen"] == max(found["seq_lengths"])


SOURCES: dict[str, Callable[[Path], Dataset]] = {
    "masks": lambda folder: CHATS,
    "labels": lambda folder: Dataset.from_list(
        [{**row, "labels": [token + 1 for token in row["input_ids"]]} for row in draw_chats(30)]
    ),
    "texts beside the tokens": lambda folder: CHATS.add_column("text", ["a chat"] * 50),
    "in an order": lambda folder: CHATS.shuffle(seed=1).select(range(5, 45)),
    "torch format": lambda folder: CHATS.with_format("torch"),
    "some columns shown": lambda folder: CHATS.add_column("key", [7] * 50).with_format(
        columns=["input_ids", "completion_mask"]
    ),
    "mapped from files": lambda folder: _saved(CHATS.shuffle(seed=2), folder),
}


def _saved(dataset: Dataset, folder: Path) -> Dataset:
    dataset.save_to_disk(folder / "saved", num_shards=2)
    return datasets.load_from_disk(folder / "saved")


@pytest.mark.parametrize("name", SOURCES)
def test_rows_are_the_pieces_joined(name: str, tmp_path: Path) -> None:
    dataset = SOURCES[name](tmp_path)
    before = sorted(tmp_path.rglob("*"))
    packs = td.hf.pack_dataset(dataset, 64)
    lengths = [len(tokens) for tokens in dataset["input_ids"]]
    shown = dataset.format["columns"]
    rows = dataset.with_format(None).select_columns(shown).to_list()
    assert_rows(packs, rows, td.pack(lengths, 64, mode="best_fit"))
    assert packs.cache_files == [] and sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"mode": "sequential"}, {"mode": "sequential"}),
        ({"mode": "hard", "seed": 3}, {"mode": "hard", "seed": 3}),
        ({"overlong": "split", "seed": 5}, {"mode": "best_fit", "overlong": "split", "seed": 5}),
        ({"strategy": "bfd"}, {"mode": "best_fit", "overlong": "truncate"}),
        ({"strategy": "bfd_split"}, {"mode": "best_fit", "overlong": "split"}),
        ({"strategy": "wrapped", "map_kwargs": {"num_proc": 2}}, {"mode": "hard", "drop_last": False}),
    ],
)
def test_modes_and_strategies_of_trl(given: dict[str, Any], meant: dict[str, Any]) -> None:
    rows = draw_chats(40, longest=70 if "sequential" not in given.values() else 40)
    plan = td.pack([len(row["input_ids"]) for row in rows], 48, **meant)
    assert_rows(td.hf.pack_dataset(Dataset.from_list(rows), seq_length=48, **given), rows, plan)


def test_rows_are_chosen_as_those_of_any_dataset() -> None:
    packs = td.hf.pack_dataset(CHATS, 64)
    ids = [row["input_ids"].tolist() for row in packs]
    assert len(ids) > 8
    assert [row["input_ids"].tolist() for row in packs.select([3, 0, 3])] == [ids[3], ids[0], ids[3]]
    order = np.random.default_rng(4).permutation(len(ids))
    assert [row["input_ids"].tolist() for row in packs.shuffle(seed=4)] == [ids[place] for place in order]
    assert [row["input_ids"].tolist() for row in packs.shard(3, 1, contiguous=True)] == [
        ids[place] for place in np.array_split(np.arange(len(ids)), 3)[1]
    ]
    halves = packs.train_test_split(0.5, seed=1)
    found = [row["input_ids"].tolist() for half in halves.values() for row in half]
    assert sorted(found) == sorted(ids)
    long = packs.filter(lambda row: row["max_seqlen"] > 35)
    assert [row["input_ids"].tolist() for row in long] == [
        tokens for tokens, row in zip(ids, packs, strict=True) if row["max_seqlen"] > 35
    ]
    assert [tokens.tolist() for tokens in packs[-3:]["input_ids"]] == ids[-3:]
    assert [tokens.tolist() for tokens in packs["input_ids"]] == ids
    assert packs.select_columns(["labels"])[2].keys() == {"labels"}
    assert packs.remove_columns(["labels"])[2].keys() == EVERY_COLUMN - {"labels"}


def test_what_map_writes_is_read_without_the_transform() -> None:
    packs = td.hf.pack_dataset(CHATS, 64)
    mapped = packs.map(lambda row: {"tokens": len(row["input_ids"])}, remove_columns=packs.column_names)
    with pytest.raises(InvalidInputError, match="the packs have no column 'tokens'"):
        mapped[0]
    assert mapped.with_format(None)["tokens"][:] == [len(row["input_ids"]) for row in packs]
    with pytest.raises(InvalidInputError, match=r"no column 'targets'.* removed but not renamed"):
        packs.rename_column("labels", "targets")[0]


def test_batches_equal_those_of_the_packed_dataset() -> None:
    """And those equal the batches of `DataCollatorWithFlattening`, as the collator's own tests show."""
    rows = [
        {**row, "weight": [0.5] * len(row["input_ids"]), "picture": np.ones((number % 2, 3)).tolist()}
        for number, row in enumerate(draw_chats(30, "completion_mask"))
    ]
    named: dict[str, Any] = {"columns": {"weight": 0.0}, "sample_columns": ["picture"]}
    plan = td.pack([len(row["input_ids"]) for row in rows], 64, mode="best_fit", seed=2)
    items = td.PackedDataset(rows, plan, **named)
    collate = td.PackedCollator(return_flash_attn_kwargs=True)
    expected = collate(items.__getitems__([2, 0, 5]))
    given = td.hf.pack_dataset(items)
    assert items[0]["labels"].tolist() != given[0]["labels"].tolist()
    for packs in (td.hf.pack_dataset(Dataset.from_list(rows), 64, seed=2, **named), given):
        batch = collate(packs.__getitems__([2, 0, 5]))
        assert batch.keys() == expected.keys() == {*collate([items[0]]), "weight", "picture"}
        for key, value in expected.items():
            assert torch.equal(batch[key], value) if isinstance(value, torch.Tensor) else batch[key] == value
    assert all((row["labels"][row["cu_seqlens"][:-1]] == -100).all() for row in given)


def test_options_of_the_packed_dataset() -> None:
    options: dict[str, Any] = {
        "pad_token_id": 9,
        "positions": lambda piece: np.arange(len(piece["input_ids"])) * 2,
    }
    plan = td.pack(td.packing.lengths(CHATS), 64, mode="sequential", align=8)
    items = td.PackedDataset(CHATS, plan, mask_first_token=True, **options)
    packs = td.hf.pack_dataset(CHATS, 64, mode="sequential", align=8, **options)
    for row, item in zip(packs, items, strict=True):
        for key in ("input_ids", "labels", "position_ids", "cu_seqlens"):
            assert row[key].tolist() == item[key].tolist(), key
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) and 9 in row["input_ids"]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_read_the_same_batches(context: str, tmp_path: Path) -> None:
    packs = td.hf.pack_dataset(_saved(CHATS, tmp_path), 64).shuffle(seed=1)
    assert len(pickle.dumps(packs)) < 20_000

    def batches(**options: Any) -> list[list[int]]:
        loader = DataLoader(packs, batch_size=3, collate_fn=td.PackedCollator(), **options)
        return [batch["input_ids"].tolist()[0] for batch in loader]

    assert batches(num_workers=2, multiprocessing_context=context) == batches()


def test_every_split_of_a_datasetdict_is_packed() -> None:
    splits = DatasetDict({"train": CHATS, "test": CHATS.select(range(7))})
    packs = td.hf.pack_dataset(splits, 64)
    assert isinstance(packs, DatasetDict)
    for name, split in splits.items():
        plan = td.pack([len(tokens) for tokens in split["input_ids"]], 64, mode="best_fit")
        assert_rows(packs[name], split.to_list(), plan)


def test_a_mix_of_data_sets() -> None:
    others = Dataset.from_list(draw_chats(20, "loss_mask", seed=1))
    sources = [CHATS, others]
    plans = [td.pack(td.packing.lengths(source), 64, mode="best_fit") for source in sources]
    items = td.PackedDataset(sources, td.mix(plans, [0.7, 0.3], num_packs=30, seed=0))
    packs = td.hf.pack_dataset(items)
    assert len(packs) == 30
    for row, item in zip(packs, items, strict=True):
        assert row["input_ids"].tolist() == item["input_ids"].tolist()


def test_no_samples_give_no_packs() -> None:
    packs = td.hf.pack_dataset(CHATS.select([]), 64)
    assert len(packs) == 0 and list(packs) == [] and set(packs.column_names) == EVERY_COLUMN


def test_the_samples_are_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    dumps = datasets.fingerprint.dumps
    monkeypatch.setattr(
        datasets.fingerprint, "dumps", lambda value: hashed.append(len(found := dumps(value))) or found
    )
    many = Dataset.from_dict({"input_ids": np.ones((200, 500), dtype=np.int64)})
    hashed.clear()
    packs = td.hf.pack_dataset(many, 1024).remove_columns(["cu_seqlens"])
    assert hashed and sum(hashed) < 20_000
    assert len({packs._fingerprint, td.hf.pack_dataset(many, 1024)._fingerprint}) == 2


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"max_length": None}, InvalidInputError, "max_length is missing"),
    ({"seq_length": 8}, InvalidInputError, "max_length and seq_length=8 are both given"),
    (
        {"strategy": "ffd"},
        InvalidInputError,
        "strategy is 'ffd'; it must be one of 'bfd', 'bfd_split', 'wrapped'",
    ),
    (
        {"strategy": "bfd", "mode": "hard"},
        InvalidInputError,
        "TRL's name of mode='best_fit', and mode='hard' is",
    ),
    (
        {"strategy": "bfd", "overlong": "drop"},
        InvalidInputError,
        "stands for overlong='truncate', and overlong='drop' is given too: use mode='best_fit' with overlong='drop'",
    ),
    ({"mode": "bfd"}, InvalidInputError, "mode is 'bfd'; it must be one of 'hard', 'best_fit'"),
    ({"max_length": 8}, InvalidInputError, "longer than max_length"),
    (
        {"dataset": CHATS.add_column("key", [7] * 50)},
        InvalidInputError,
        r"has \['key'\], which PackedDataset does not",
    ),
    (
        {"dataset": CHATS.rename_column("input_ids", "tokens")},
        InvalidInputError,
        "has no column 'input_ids': its columns are 'tokens'",
    ),
    ({"dataset": CHATS.with_transform(dict)}, InvalidInputError, "computes its rows when they are read"),
    (
        {"dataset": td.PackedDataset([[1, 2]], td.pack([2], 2)), "seed": 3},
        InvalidInputError,
        "which has its packs already: leave out max_length, seed",
    ),
]


@pytest.mark.parametrize(("changed", "error", "message"), REFUSED)
def test_refused(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"dataset": CHATS, "max_length": 64, **changed}
    with pytest.raises(error, match=message if "\\" in message or ".*" in message else re.escape(message)):
        td.hf.pack_dataset(given.pop("dataset"), **given)


CARRIED = {"id": ["a"] * 50, "score": [0.5] * 50, "embedding": [[0.1, 0.2]] * 50}


@pytest.mark.parametrize("drop", [list(CARRIED), "unknown"], ids=["names", "unknown"])
@pytest.mark.parametrize("options", [{}, {"sample_columns": ["source"]}], ids=["lists", "samples"])
def test_columns_that_people_carry_along_are_dropped(drop: Any, options: dict[str, Any]) -> None:
    carried = CHATS
    for name, values in {**CARRIED, "source": ["web"] * 50}.items():
        carried = carried.add_column(name, values)
    carried = carried if options else carried.remove_columns("source")
    with pytest.raises(InvalidInputError, match=r"has \['embedding', 'id', 'score'\], .*drop_columns="):
        td.hf.pack_dataset(carried, 64, **options)
    expected = td.hf.pack_dataset(CHATS, 64)
    packs = td.hf.pack_dataset(carried, 64, drop_columns=drop, **options)
    assert set(packs.column_names) == EVERY_COLUMN | set(options.get("sample_columns", ()))
    assert [row["labels"].tolist() for row in packs] == [row["labels"].tolist() for row in expected]
    stream = td.hf.pack_dataset(carried.to_iterable_dataset(), 64, drop_columns=drop, **options)
    assert not CARRIED.keys() & next(iter(stream)).keys()
    with pytest.raises(InvalidInputError, match="drop_columns names 'url', and no sample has it"):
        td.hf.pack_dataset(carried, 64, drop_columns=[*CARRIED, "url"], **options)


def test_first_tokens_are_learned_if_that_is_asked_for() -> None:
    rows = draw_chats(30)
    packs = td.hf.pack_dataset(Dataset.from_list(rows), 48, "wrapped", mask_first_token=False)
    assert [row["labels"].tolist() for row in packs] == [row["input_ids"].tolist() for row in packs]
    stream = Dataset.from_list(rows).to_iterable_dataset()
    streamed = td.hf.pack_dataset(stream, 48, "wrapped", mask_first_token=False)
    assert [list(row["labels"]) for row in streamed] == [row["labels"].tolist() for row in packs]


def test_a_column_length_that_is_out_of_date_is_not_used() -> None:
    packs = td.hf.pack_dataset(CHATS.add_column("length", [1] * len(CHATS)), 64)
    assert packs[:]["seq_lengths"] == td.hf.pack_dataset(CHATS, 64)[:]["seq_lengths"]


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        (
            [["a", "b"], ["a", "b"]],
            "column 'w' holds list<.*string>, and columns of samples are lists of numbers",
        ),
        ([None, None], "column 'w' holds null"),
        ([[0.5, 0.5], None], "sample 1 of dataset 0 lacks w, .* or has null there"),
    ],
)
def test_a_column_that_holds_no_numbers_is_refused_for_what_it_holds(weights: list[Any], says: str) -> None:
    rows = Dataset.from_dict({"input_ids": [[1, 2], [3, 4]], "labels": [[1, 2], [3, 4]], "w": weights})
    with pytest.raises((InvalidInputError, InvalidTypeError), match=says):
        td.hf.pack_dataset(rows, 4, columns={"w": 0.0})
