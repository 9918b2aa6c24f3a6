"""`td.hf.tokenize` against TRL's own preparation of the same rows."""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from support.integrations.text_tokenizers import (
    draw_chat_pairs,
    draw_messages,
    draw_pairs,
    draw_texts,
    message,
    text_tokenizer,
)
from support.integrations.tiny_models import llama

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError

trl = pytest.importorskip("trl")

# TRL 1.16 sets the option by the name that transformers 5.24 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")

FORMS: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    "text": draw_texts,
    "texts in pairs": draw_pairs,
    "messages": draw_messages,
    "chats in pairs": draw_chat_pairs,
}
MASKS = ("completion_mask", "assistant_masks")


def prepared_by_trl(rows: Dataset, tokenizer: Any, folder: Path, **options: Any) -> list[tuple[Any, Any]]:
    """Token ids and labels of each row, as `SFTTrainer` prepares them."""
    arguments = trl.SFTConfig(
        str(folder), report_to=[], use_cpu=True, bf16=False, **{"max_length": None, **options}
    )
    run = trl.SFTTrainer(llama(), arguments, train_dataset=rows, processing_class=tokenizer)
    return [(row["input_ids"], row["labels"]) for row in run.train_dataset]


def labelled(rows: Any) -> list[tuple[Any, Any]]:
    """Token ids and labels of rows with masks."""
    found = []
    for row in rows:
        masks = [row[mask] for mask in MASKS if mask in row]
        labels = [token if all(bits) else -100 for token, *bits in zip(row["input_ids"], *masks, strict=True)]
        found.append((row["input_ids"], labels))
    return found


@pytest.mark.parametrize("begins", [False, True], ids=["no beginning", "beginning"])
@pytest.mark.parametrize("form", FORMS)
def test_tokens_and_labels_are_those_of_trl(form: str, begins: bool, tmp_path: Path) -> None:
    tokenizer = text_tokenizer(add_bos_token=begins)
    rows = Dataset.from_list([{**row, "source": "web"} for row in FORMS[form](24)])
    samples = td.hf.tokenize(rows, tokenizer)
    expected = prepared_by_trl(rows, tokenizer, tmp_path, assistant_only_loss=form == "messages")
    assert labelled(samples) == expected
    assert set(samples.column_names) <= {"input_ids", *MASKS}
    learned = [label != -100 for _, labels in expected for label in labels]
    assert all(learned) == (form == "text") and any(learned)


def test_chats_with_settings_of_their_own_are_those_of_trl(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds numbers."}}]
    rows = [
        {
            **row,
            "tools": None if number % 3 == 0 else tools,
            "chat_template_kwargs": {"style": f"style {number % 2}"},
        }
        for number, row in enumerate(draw_messages(12))
    ]
    as_text = [{**row, "tools": row["tools"] and json.dumps(row["tools"])} for row in rows]
    tokenizer = text_tokenizer("unmarked")
    expected = prepared_by_trl(Dataset.from_list(rows), tokenizer, tmp_path)
    for given in (rows, as_text):
        assert labelled(td.hf.tokenize(Dataset.from_list(given), tokenizer)) == expected
    plain = td.hf.tokenize(Dataset.from_list(draw_messages(12)), tokenizer)
    assert all(tokens not in plain["input_ids"][:] for tokens, _ in expected)


def test_samples_are_cut_as_trl_cuts_them(tmp_path: Path) -> None:
    tokenizer = text_tokenizer()
    for form in ("text", "texts in pairs"):
        rows = Dataset.from_list(FORMS[form](12))
        cut = td.hf.tokenize(rows, tokenizer, max_length=20)
        assert (
            max(map(len, cut["input_ids"]))
            == 20
            < max(map(len, td.hf.tokenize(rows, tokenizer)["input_ids"]))
        )
        # TRL leaves out those of which nothing is learned.
        learned = [row for row in labelled(cut) if any(label != -100 for label in row[1])]
        assert learned == prepared_by_trl(rows, tokenizer, tmp_path / form, max_length=20)


def test_a_text_begins_and_ends_once() -> None:
    tokenizer = text_tokenizer(add_bos_token=True, add_eos_token=True)
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    texts = ["blue", "<s>blue", "blue</s>", "<s>blue</s>"]
    whole = td.hf.tokenize(Dataset.from_dict({"text": texts}), tokenizer)["input_ids"][:]
    assert len(set(map(tuple, whole))) == 1
    assert whole[0].count(begin) == whole[0].count(end) == 1 and (whole[0][0], whole[0][-1]) == (begin, end)
    pairs = Dataset.from_dict({"prompt": ["<s>blue", "blue"], "completion": [" sky", " sky</s>"]})
    first, second = td.hf.tokenize(pairs, tokenizer)
    assert first == second and first["input_ids"].count(begin) == first["input_ids"].count(end) == 1
    # Chats begin as their template says.
    tokens = td.hf.tokenize(Dataset.from_list(draw_messages(1)), tokenizer)["input_ids"][0]
    assert tokens[0] == begin and begin not in tokens[1:]


@pytest.mark.parametrize("adds", [False, True])
def test_an_end_that_a_text_has_more_than_once_stays(adds: bool) -> None:
    tokenizer = text_tokenizer(add_bos_token=adds, add_eos_token=adds)
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    (text,) = td.hf.tokenize(Dataset.from_dict({"text": ["<s><s>blue</s></s>"]}), tokenizer)
    assert text["input_ids"].count(begin) == text["input_ids"].count(end) == 2
    pair = Dataset.from_dict({"prompt": ["blue</s>"], "completion": ["</s>"]})
    (sample,) = td.hf.tokenize(pair, tokenizer)
    assert sample["input_ids"][-2:] == [end] * 2 and sample["completion_mask"][-2:] == [0, 1]


@pytest.mark.parametrize("marker", ["{%+ generation %}", "{%- generation -%}", "{%generation%}"])
def test_a_marker_may_say_what_happens_to_spaces(marker: str) -> None:
    tokenizer = text_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("{% generation %}", marker)
    (sample,) = td.hf.tokenize(Dataset.from_list(draw_messages(1)), tokenizer)
    assert 0 < sum(sample["assistant_masks"]) < len(sample["assistant_masks"])


def test_a_border_that_tokens_merge_across_is_named_once(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    tokenizer = text_tokenizer()
    clean = [{"prompt": "The sky is", "completion": " blue"}]
    split = {"prompt": "The sky is bl", "completion": "ue"}
    rows = Dataset.from_list([*clean, split, split])
    with caplog.at_level(logging.INFO, "tundish"):
        td.hf.tokenize(Dataset.from_list(clean), tokenizer)
        assert not caplog.records
        samples = td.hf.tokenize(rows, tokenizer)
    (record,) = caplog.records
    assert "(row 1)" in record.getMessage() and "' bl'" in record.getMessage()
    assert samples[1] == samples[0]
    assert labelled(samples) == prepared_by_trl(rows, tokenizer, tmp_path)


def test_a_template_without_markers_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    rows = Dataset.from_list(draw_messages(6))
    splits = DatasetDict({"train": rows, "test": rows.select(range(2))})
    with caplog.at_level(logging.INFO, "tundish"):
        marked = td.hf.tokenize(splits, text_tokenizer("marked"))
        assert not caplog.records
        samples = td.hf.tokenize(splits, text_tokenizer("unmarked"))
    (record,) = caplog.records
    assert "no {% generation %} markers" in record.getMessage()
    assert samples["train"].column_names == ["input_ids"]
    assert samples["train"]["input_ids"][:] == marked["train"]["input_ids"][:]
    assert set(marked["test"].column_names) == {"input_ids", "assistant_masks"}


def test_the_result_is_cached_and_processes_change_nothing(tmp_path: Path) -> None:
    Dataset.from_list(draw_messages(40)).save_to_disk(tmp_path / "rows")
    rows = datasets.load_from_disk(tmp_path / "rows")
    tokenizer = text_tokenizer()
    first = td.hf.tokenize(rows, tokenizer)
    (file,) = first.cache_files
    written = Path(file["filename"]).stat().st_mtime_ns
    # As another process would: a tokenizer of its own, and one that was used.
    again = td.hf.tokenize(datasets.load_from_disk(tmp_path / "rows"), text_tokenizer())
    tokenizer(["some text"], padding=True, truncation=True, max_length=4)
    used = td.hf.tokenize(rows, tokenizer)
    assert again.cache_files == used.cache_files == first.cache_files
    assert Path(file["filename"]).stat().st_mtime_ns == written
    for changed in (
        td.hf.tokenize(rows, text_tokenizer("unmarked")),
        td.hf.tokenize(rows, tokenizer, max_length=8),
    ):
        assert changed.cache_files != first.cache_files and changed[0] != first[0]
    assert td.hf.tokenize(rows, tokenizer, num_proc=2)[:] == first[:]


def test_streams_and_splits_are_tokenized_as_data_sets() -> None:
    tokenizer = text_tokenizer()
    rows = Dataset.from_list(draw_pairs(20))
    expected = td.hf.tokenize(rows, tokenizer)
    without_features = IterableDataset.from_generator(lambda: iter(draw_pairs(20)))
    for stream in (rows.to_iterable_dataset(), without_features):
        samples = td.hf.tokenize(stream, tokenizer)
        assert isinstance(samples, IterableDataset) and list(samples) == list(expected)
        # The columns are known, so that they are checked before a row is read.
        assert set(samples.column_names) == {"input_ids", "completion_mask"}
    splits = td.hf.tokenize(DatasetDict({"train": rows, "none": rows.select([])}), tokenizer)
    assert isinstance(splits, DatasetDict) and splits["train"][:] == expected[:]
    assert len(splits["none"]) == 0 and splits["none"].features == expected.features
    streams = td.hf.tokenize(IterableDatasetDict({"train": rows.to_iterable_dataset()}), tokenizer)
    assert isinstance(streams, IterableDatasetDict) and list(streams["train"]) == list(expected)
    shown = rows.add_column("text", ["more"] * 20).with_format("numpy", columns=["prompt", "completion"])
    assert td.hf.tokenize(shown, tokenizer)[:] == expected[:]


def test_prompts_and_completions_become_packs_in_two_lines() -> None:
    tokenizer, rows = text_tokenizer(), draw_pairs(30)
    samples = td.hf.tokenize(Dataset.from_list(rows), tokenizer)
    packs = td.hf.pack_dataset(samples, 128)
    assert len(packs) < 30
    learned = [row["input_ids"][row["labels"] != -100].tolist() for row in packs]
    completions = [tokenizer(row["completion"] + "</s>")["input_ids"] for row in rows]
    assert sorted(itertools.chain(*learned)) == sorted(itertools.chain(*completions))
    streamed = td.hf.pack_dataset(
        td.hf.tokenize(Dataset.from_list(rows).to_iterable_dataset(), tokenizer), 128
    )
    assert sum(len(row["seq_lengths"]) for row in streamed) == 30


PAIR = {"prompt": ["a"], "completion": ["b"]}
CHAT = {"messages": [[message("user", "a"), message("assistant", "b")]]}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "tokenized": ({"input_ids": [[1]], "text": ["a"]}, "has a column 'input_ids': the samples are tokenized already"),
    "no text": ({"question": ["a"]}, r"none of prompt and completion, messages, text; its columns are \['question'\]"),
    "a prompt alone": ({"prompt": ["a"]}, "has none of prompt and completion, messages, text"),
    "two forms": ({**PAIR, "text": ["a"]}, "has prompt and completion, and text, and one of these is tokenized"),
    "functions": ({**CHAT, "functions": ["f"]}, "has a column 'functions': rename the column to tools"),
    "documents": ({**CHAT, "documents": [["d"]]}, "has a column 'documents': chats with documents are not"),
    "conversations": ({"conversations": [[{"from": "user", "value": "a"}]]}, "'conversations': convert .*chatml"),
    "tools of a text": ({"text": ["a"], "tools": [["f"]]}, "the rows are texts, and some have tools"),
    "tools that are no JSON": ({**CHAT, "tools": ["{"]}, "tools of row 0 is no JSON"),
    "no string": ({"text": [1]}, "text of row 0 is an int, and a text is expected"),
    "null": ({"text": ["a", None]}, "text of row 1 is None, and a text is expected"),
    "no role": ({"messages": [[{"content": "a"}]]}, "messages of row 0 is a list, and a list of messages with a role"),
    "no message": ({"messages": [CHAT["messages"][0], []]}, "messages of row 1 is a list, and a list of messages"),
    "a text for a chat": ({"messages": ["a"]}, "messages of row 0 is a str, and a list of messages with a role is"),
    "a mixed pair": ({"prompt": ["a"], "completion": CHAT["messages"]}, "completion of row 0 is a list, .* as before"),
    "no assistant": (
        {"messages": [CHAT["messages"][0], [message("user", "a")]]},
        "row 1 has no token that the chat template marks as an assistant's",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_cannot_be_tokenized_are_refused(name: str) -> None:
    columns, says = REFUSED[name]
    with pytest.raises(InvalidInputError, match=says):
        td.hf.tokenize(Dataset.from_dict(columns), text_tokenizer())


def test_other_arguments_are_checked() -> None:
    rows, tokenizer = Dataset.from_dict({"text": ["a"]}), text_tokenizer()
    with pytest.raises(InvalidTypeError, match=r"dataset is a list: give a datasets\.Dataset; .*from_list"):
        td.hf.tokenize([{"text": "a"}], tokenizer)
    with pytest.raises(InvalidTypeError, match="tokenizer is a str: give a tokenizer of transformers"):
        td.hf.tokenize(rows, "gpt2")
    with pytest.raises(InvalidInputError, match="max_length is 0: give an integer of at least 1"):
        td.hf.tokenize(rows, tokenizer, max_length=0)
    with pytest.raises(InvalidInputError, match="num_proc is 2, and a stream"):
        td.hf.tokenize(rows.to_iterable_dataset(), tokenizer, num_proc=2)
    with pytest.raises(InvalidInputError, match="computes its rows when they are read"):
        td.hf.tokenize(rows.with_transform(dict), tokenizer)
    with pytest.raises(InvalidInputError, match="the tokenizer has no chat template"):
        td.hf.tokenize(Dataset.from_dict(CHAT), text_tokenizer(None))
    tokenizer.eos_token = None
    with pytest.raises(InvalidInputError, match="the tokenizer has no eos_token"):
        td.hf.tokenize(rows, tokenizer)


def test_an_error_of_a_template_comes_with_its_rows() -> None:
    tokenizer = text_tokenizer()
    tokenizer.chat_template = (
        "{{ raise_exception('roles must alternate') }}{% generation %}{% endgeneration %}"
    )
    with pytest.raises(Exception, match="roles must alternate") as caught:
        td.hf.tokenize(Dataset.from_list(draw_messages(3)), tokenizer)
    assert re.search("rows 0 to 2", "".join(caught.value.__notes__))


def test_tokens_fit_a_model() -> None:
    tokenizer = text_tokenizer()
    packs = td.hf.pack_dataset(td.hf.tokenize(Dataset.from_list(draw_chat_pairs(4)), tokenizer), 256)
    batch = td.PackedCollator()([packs[0]])
    loss = llama(vocabulary=len(tokenizer))(**{**batch, "use_cache": False}).loss
    assert torch.isfinite(loss)
