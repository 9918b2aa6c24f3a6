"""Keys of samples that are not known: refused when the data set is made, or left out by `drop_columns`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets as hf
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from support.packing.samples import Rows

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError

PLAN = td.pack([2, 2], 4)
IDS = [[1, 2], [3, 4]]


def rows_with(**more: Any) -> list[dict[str, Any]]:
    """Two samples; `more` has the value of each further key, one a sample."""
    return [
        {"input_ids": ids, **{key: values[number] for key, values in more.items()}}
        for number, ids in enumerate(IDS)
    ]


def saved_parquet(rows: list[dict[str, Any]], folder: Path) -> Any:
    pq.write_table(hf.Dataset.from_list(rows).data.table, folder / "a.parquet")
    return td.packing.open_samples(folder / "a.parquet")


def saved_lines(rows: list[dict[str, Any]], folder: Path) -> Any:
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return td.packing.open_samples(folder / "a.jsonl")


# Sources that tell their columns, or whose first sample is looked at.
SOURCES: dict[str, Callable[[list[dict[str, Any]], Path], Any]] = {
    "list": lambda rows, folder: rows,
    "tuple": lambda rows, folder: tuple(rows),
    "dataset": lambda rows, folder: hf.Dataset.from_list(rows),
    "numpy format": lambda rows, folder: hf.Dataset.from_list(rows).with_format("numpy"),
    "parquet": saved_parquet,
    "json lines": saved_lines,
}


@pytest.mark.parametrize("name", SOURCES)
def test_an_unknown_key_is_refused_when_the_data_set_is_made(name: str, tmp_path: Path) -> None:
    source = SOURCES[name](rows_with(loss_weight=[[0.5, 1.0], [1.0, 1.0]]), tmp_path)
    with pytest.raises(InvalidInputError, match=r"of dataset 0 has|dataset 0 has") as caught:
        td.PackedDataset(source, PLAN)
    says = str(caught.value)
    assert "has ['loss_weight'], which PackedDataset does not know" in says
    assert "the masks that it knows are completion_mask, assistant_masks, loss_mask" in says
    assert "columns={'loss_weight': 0.0}" in says
    assert "sample_columns=['loss_weight']" in says and "drop_columns=['loss_weight']" in says
    # What the message offers works.
    carried = td.PackedDataset(source, PLAN, columns={"loss_weight": 0.0})[0]
    assert carried["loss_weight"].tolist() == [0.5, 1.0, 1.0, 1.0]
    assert "loss_weight" not in td.PackedDataset(source, PLAN, drop_columns=["loss_weight"])[0]


@pytest.mark.parametrize("name", ["list", "dataset", "stream of a dataset", "parquet"])
def test_a_stream_refuses_it_before_it_is_read(name: str, tmp_path: Path) -> None:
    rows = rows_with(score=[0.5, 0.75])
    make = SOURCES.get(name, lambda rows, folder: hf.Dataset.from_list(rows).to_iterable_dataset())
    if name == "parquet":
        rows = rows_with(score=[[1], [2]])
    source = make(rows, tmp_path)
    with pytest.raises(InvalidInputError, match=r"has \['score'\], .* drop_columns=\['score'\]"):
        td.PackedStream(source, 4)
    for drop in (["score"], "unknown"):
        (item,) = td.PackedStream(source, 4, drop_columns=drop)
        assert item["input_ids"].tolist() == [1, 2, 3, 4] and "score" not in item


def test_a_loader_passes_the_argument_on() -> None:
    rows = rows_with(score=[0.5, 0.75])
    with pytest.raises(InvalidInputError, match=r"has \['score'\], .* drop_columns="):
        td.loader(rows, PLAN, batch_size=1)
    (batch,) = td.loader(rows, PLAN, batch_size=1, drop_columns="unknown")
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4]] and "score" not in batch


def test_a_generator_and_a_data_set_of_a_user_are_not_read_before_training() -> None:
    read: list[int] = []

    def generate() -> Iterator[Any]:
        for number, row in enumerate(rows_with(score=[1, 2])):
            read.append(number)
            yield row

    source = Rows(rows_with(score=[1, 2]))
    stream, dataset = td.PackedStream(generate(), 4), td.PackedDataset(source, PLAN)
    assert not read and not source.read
    for packs in (stream, dataset):
        with pytest.raises(InvalidInputError, match=r"sample 0 of dataset 0 has \['score'\]"):
            next(iter(packs))


@pytest.mark.parametrize(
    ("values", "padding"),
    [
        ([[0.5, 0.5]] * 2, "0.0"),
        ([[7, 8]] * 2, "0"),
        ([[True, False]] * 2, "False"),
        (["a text", "another"], None),
        ([["a", "b"]] * 2, None),
        ([0.5, 0.25], None),
        ([[[1, 2], [3, 4]]] * 2, None),
        ([{"from": 1}] * 2, None),
    ],
    ids=["floats", "integers", "booleans", "strings", "lists of strings", "one number", "nested", "mappings"],
)
@pytest.mark.parametrize("name", ["list", "dataset"])
def test_the_padding_that_is_offered_is_of_the_type_of_the_column(
    name: str, values: list[Any], padding: str | None, tmp_path: Path
) -> None:
    source = SOURCES[name](rows_with(extra=values), tmp_path)
    with pytest.raises(InvalidInputError, match="extra") as caught:
        td.PackedDataset(source, PLAN)
    offered = re.search(r"carry what each token has with columns=\{'extra': (\S+)\}", str(caught.value))
    assert (offered[1] if offered else None) == padding
    assert "sample_columns=['extra']" in str(caught.value)


@pytest.mark.parametrize("make", [np.asarray, torch.tensor])
def test_arrays_and_tensors_of_a_sample_have_a_type_too(make: Any) -> None:
    rows = rows_with(weight=[make([0.5, 0.5])] * 2)
    with pytest.raises(InvalidInputError, match=r"columns=\{'weight': 0\.0\}"):
        td.PackedDataset(rows, PLAN)


def test_keys_with_a_meaning_are_refused_with_what_to_remove() -> None:
    rows = rows_with(position_ids=[[0, 1], [0, 1]], note=["a", "b"])
    with pytest.raises(
        InvalidInputError, match=r"makes from the pieces: .* remove_columns\(\['position_ids'\]\)"
    ):
        td.PackedDataset(rows, PLAN, drop_columns="unknown")
    table = hf.Dataset.from_list(rows)
    dataset = td.PackedDataset(table.remove_columns(["position_ids"]), PLAN, drop_columns=["note"])
    assert dataset[0]["labels"].tolist() == [1, 2, 3, 4]
    masked = rows_with(loss_mask=[[0, 1], [1, 0]], id=["a", "b"])
    found = td.PackedDataset(masked, PLAN, drop_columns="unknown")[0]
    assert found["labels"].tolist() == [-100, 2, 3, -100] and "id" not in found


@pytest.mark.parametrize("name", ["assistant_mask", "Labels", "token_weights", "target_ids"])
def test_what_may_say_what_is_learned_is_left_out_only_by_its_name(name: str) -> None:
    rows = rows_with(**{name: [[0, 1], [0, 1]], "id": ["a", "b"]})
    with pytest.raises(
        InvalidInputError, match=rf"has \['{name}'\], which by the name may say what is learned"
    ):
        td.PackedDataset(rows, PLAN, drop_columns="unknown")
    assert td.PackedDataset(rows, PLAN, drop_columns=[name, "id"])[0]["labels"].tolist() == [1, 2, 3, 4]


def test_columns_that_a_hf_dataset_does_not_show_are_not_read() -> None:
    table = hf.Dataset.from_list(rows_with(score=[1, 2]))
    chosen = table.with_format("numpy", columns=["input_ids"])
    for advised in (table.remove_columns(["score"]), table.select_columns(["input_ids"]), chosen):
        assert td.PackedDataset(advised, PLAN)[0]["labels"].tolist() == [1, 2, 3, 4]
    shown = table.with_format("numpy", columns=["input_ids"], output_all_columns=True)
    with pytest.raises(InvalidInputError, match=r"dataset 0 has \['score'\], which"):
        td.PackedDataset(shown, PLAN)
    with pytest.raises(InvalidInputError, match="dataset 0 lacks other"):
        td.PackedDataset(chosen, PLAN, columns={"other": 0})


def test_a_dropped_name_that_no_sample_has_is_refused_where_that_is_known(tmp_path: Path) -> None:
    ours = hf.Dataset.from_list(rows_with(score=[1, 2], id=["a", "b"]))
    theirs = hf.Dataset.from_list(rows_with())
    with pytest.raises(
        InvalidInputError, match=r"drop_columns names 'source', and no sample has it; .*'score'"
    ):
        td.PackedDataset(ours, PLAN, drop_columns=["score", "id", "source"])
    with pytest.raises(InvalidInputError, match="drop_columns names 'source', and no sample has it"):
        td.PackedStream(ours.to_iterable_dataset(), 4, drop_columns=["score", "id", "source"])
    # Of a file, `open_samples` leaves out what is no list of numbers.
    file = saved_parquet(rows_with(score=[1, 2], embedding=[[0.5], [0.5]]), tmp_path)
    assert len(td.PackedDataset(file, PLAN, drop_columns=["score", "embedding"])) == 1
    # One data set of several has them; and of a list, a later sample may.
    plan = td.pack_datasets([[2, 2], [2, 2]], 4)
    assert len(td.PackedDataset([ours, theirs], plan, drop_columns=["score", "id"])) == 2
    mixed = td.mix([PLAN, PLAN], [1, 1], num_packs=4)
    assert len(list(td.PackedDataset([theirs, ours], mixed, drop_columns=["score", "id"]))) == 4
    with pytest.raises(InvalidInputError, match="drop_columns names 'source'"):
        td.PackedDataset([theirs, ours], mixed, drop_columns=["score", "id", "source"])
    rows = [*rows_with()[:1], {"input_ids": [3, 4], "source": "web"}]
    assert td.PackedDataset(rows, PLAN, drop_columns=["source"])[0]["input_ids"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"drop_columns": "id"}, InvalidTypeError, "drop_columns is 'id': give a list of names, .*'unknown'"),
        ({"drop_columns": {"id"}}, InvalidTypeError, "drop_columns is a set: give a list of names"),
        ({"drop_columns": [1]}, InvalidTypeError, "drop_columns names 1, which is an int"),
        ({"drop_columns": ["input_ids"]}, InvalidInputError, "names 'input_ids', which has a meaning"),
        ({"drop_columns": ["labels"]}, InvalidInputError, "drop_columns names 'labels', which has a meaning: without"),
        ({"drop_columns": ["completion_mask"]}, InvalidInputError, "names 'completion_mask', which has a meaning"),
        ({"drop_columns": ["attention_mask"]}, InvalidInputError, "names 'attention_mask', which has a meaning"),
        ({"drop_columns": ["seq_idx"]}, InvalidInputError, "names 'seq_idx', which has a meaning"),
        ({"drop_columns": ["a"], "columns": {"a": 0}}, InvalidInputError, "'a' is in drop_columns, and in columns or"),
        ({"drop_columns": ["a"], "sample_columns": ["a"]}, InvalidInputError, "'a' is in drop_columns, and in col"),
    ],
)  # fmt: skip
def test_the_argument_is_checked(arguments: dict[str, Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        td.PackedDataset(rows_with(), PLAN, **arguments)
    with pytest.raises(kind, match=says):
        td.PackedStream(rows_with(), 4, **arguments)


def test_a_missing_input_ids_names_what_makes_it(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
    table = hf.Dataset.from_list(rows)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(table.data.table, tmp_path / "a.parquet")
    calls: list[Callable[[], Any]] = [
        lambda: td.PackedDataset(table, PLAN),
        lambda: td.PackedDataset(rows, PLAN),
        lambda: td.PackedDataset(Rows(rows), PLAN)[0],
        lambda: td.PackedStream(table.to_iterable_dataset(), 4),
        lambda: next(iter(td.PackedStream(iter(rows), 4))),
        lambda: td.hf.pack_dataset(table, 4),
        lambda: td.hf.pack_dataset(table.to_iterable_dataset(), 4),
        lambda: td.packing.lengths(table),
        lambda: td.packing.lengths(rows),
        lambda: td.packing.lengths(iter(["a text"])),
        lambda: td.packing.lengths(tmp_path / "a.jsonl"),
        lambda: td.packing.lengths(tmp_path / "a.parquet"),
        lambda: td.packing.lengths(table, "prompt"),
        lambda: td.packing.open_samples(tmp_path / "a.parquet"),
        lambda: td.packing.open_samples(tmp_path / "a.parquet", "prompt"),
        lambda: td.packing.open_samples(tmp_path / "a.jsonl")[0],
    ]
    for number, call in enumerate(calls):
        with pytest.raises((InvalidInputError, InvalidTypeError)) as caught:
            call()
        assert "td.hf.tokenize" in str(caught.value), (number, str(caught.value))
