"""Items meet collators of torch and of transformers, batches meet a model's cache, and pieces keep their dataset."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.packing.samples import make_samples, pieces_of
from support.packing.small_llama import k_gradient, loss_apart, small_llama
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import DataLoader, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    DefaultDataCollator,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError

# torchdata calls a function that torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

LENGTHS = [5, 3, 8, 2, 6, 4, 4]
SAMPLES = make_samples(LENGTHS)
# All packs have 8 tokens: default collation would stack them.
PLAN = td.pack(LENGTHS, 8)


def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"[PAD]": 0}, "[PAD]")), pad_token="[PAD]"
    )


COLLATORS: dict[str, Callable[[], Any]] = {
    "default_data_collator": lambda: default_data_collator,
    "DefaultDataCollator": DefaultDataCollator,
    "with flattening": DataCollatorWithFlattening,
    "with padding": lambda: DataCollatorWithPadding(tokenizer()),
    "for language modeling": lambda: DataCollatorForLanguageModeling(tokenizer(), mlm=False),
    "for seq2seq": lambda: DataCollatorForSeq2Seq(tokenizer()),
}


def items_of(kind: str) -> list[Any]:
    if kind == "dataset":
        return td.PackedDataset(SAMPLES, PLAN).__getitems__([0, 1])
    return list(td.PackedStream(SAMPLES, 8, mode="hard"))[:2]


@pytest.mark.parametrize("kind", ["dataset", "stream"])
@pytest.mark.parametrize("name", COLLATORS)
def test_a_collator_of_transformers_is_refused(name: str, kind: str) -> None:
    collate = COLLATORS[name]()
    for items in (items_of(kind), items_of(kind)[:1]):
        with pytest.raises(InvalidTypeError, match=r"data_collator=td\.PackedCollator\(\)"):
            collate(items)
    # Pieces apart are what it is made for.
    (piece,) = pieces_of(items_of(kind))[:1]
    assert collate([{key: value.tolist() for key, value in piece.items()}])["input_ids"].shape[0] == 1


@pytest.mark.parametrize("kind", ["dataset", "stream"])
@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("workers", [0, 1])
def test_torchs_default_collation_is_refused(loader: Any, kind: str, workers: int) -> None:
    data = td.PackedDataset(SAMPLES, PLAN) if kind == "dataset" else td.PackedStream(SAMPLES, 8, mode="hard")
    with pytest.raises(InvalidTypeError, match=r"collate_fn=td\.PackedCollator\(\).*td\.loader"):
        next(iter(loader(data, batch_size=2, num_workers=workers)))
    with pytest.raises(InvalidTypeError, match="default collation"):
        default_collate(items_of(kind)[:1])


@pytest.mark.parametrize("collator", [None, DataCollatorWithFlattening()])
def test_a_trainer_with_another_collator_is_refused(collator: Any, tmp_path: Path) -> None:
    for removes in (True, False):
        arguments = TrainingArguments(
            str(tmp_path), max_steps=1, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
        )
        arguments.remove_unused_columns = removes
        trainer = Trainer(
            small_llama(40), arguments, train_dataset=td.PackedDataset(SAMPLES, PLAN), data_collator=collator
        )
        with pytest.raises(InvalidTypeError, match=r"td\.PackedCollator\(\).*remove_unused_columns=False"):
            trainer.train()


def test_items_are_dicts_to_everybody_else() -> None:
    for kind in ("dataset", "stream"):
        (item, _) = items_of(kind)
        assert isinstance(item, dict) and "labels" in item and "label" not in item
        assert set(item.keys()) == set(item) == set(dict(item))
        copies = [copy.copy(item), copy.deepcopy(item), pickle.loads(pickle.dumps(item)), {**item}]
        copies.append(td.tree.unflatten(*td.tree.flatten(item)[::-1]))
        copies.append(td.tree.map(lambda tensor: tensor.clone(), item))
        for other in copies:
            assert other.keys() == item.keys() and torch.equal(other["input_ids"], item["input_ids"])
        plain: Any = DataLoader([dict(item)] * 2, batch_size=2, collate_fn=td.PackedCollator(), num_workers=0)
        assert next(iter(plain))["input_ids"].shape == (1, 16)
        (alone,) = DataLoader([item], batch_size=None)
        assert torch.equal(alone["cu_seqlens"], item["cu_seqlens"])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_batch_turns_off_the_cache_with_which_pieces_would_see_each_other(attention: str) -> None:
    model = small_llama(40, attention)
    assert model.config.use_cache
    items = td.PackedDataset(SAMPLES, PLAN).__getitems__([0, 2])
    apart = loss_apart(model, items)
    loss = model(**td.PackedCollator()(items)).loss
    assert abs(loss.item() - apart.item()) < 1e-5
    torch.testing.assert_close(k_gradient(model, loss), k_gradient(model, apart), rtol=1e-4, atol=1e-6)
    assert repr(td.PackedCollator(use_cache=None)) == "PackedCollator(use_cache=None)"
    plain = td.PackedCollator(use_cache=None)(items)
    assert "use_cache" not in plain
    assert abs(model(**plain).loss.item() - apart.item()) > 1e-2
    with pytest.raises(InvalidInputError, match="use_cache is True"):
        td.PackedCollator(use_cache=True)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="use_cache is 0"):
        td.PackedCollator(use_cache=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{}, {"pad_to": 30}, {"pad_to": 30, "pad_pieces_to": 9, "return_flash_attn_kwargs": True}]
)
def test_the_datasets_of_pieces_come_in_the_order_of_the_bounds(options: dict[str, Any]) -> None:
    code = make_samples(LENGTHS, first=100)
    plans = [td.pack(LENGTHS, 8), td.pack(LENGTHS, 8, mode="sequential")]
    mixed = td.PackedDataset([SAMPLES, code], td.mix(plans, [1, 1], num_packs=8))
    collate = td.PackedCollator(return_dataset_id=True, return_seq_idx=True, **options)
    both = set()
    for first in range(0, 8, 2):
        items = mixed.__getitems__([first, first + 1])
        batch = collate(items)
        found, tokens = batch["dataset_id"], sum(len(item["input_ids"]) for item in items)
        assert found.dtype == torch.int64
        of_tokens = found[batch["seq_idx"][0].long()][:tokens]
        assert of_tokens.tolist() == (batch["input_ids"][0, :tokens] >= 100).long().tolist()
        pieces = sum(len(item["cu_seqlens"]) - 1 for item in items)
        assert len(found) == options.get("pad_pieces_to", pieces + bool(options))
        assert (found[pieces:] == -1).all()
        both |= set(found[:pieces].tolist())
    assert both == {0, 1}


def test_the_loss_of_each_dataset_is_that_of_its_samples_apart() -> None:
    code = make_samples(LENGTHS, first=100)
    plans = [td.pack(LENGTHS, 8, mode="best_fit")] * 2
    mix = td.mix(plans, [1, 1], exhausted="drop")
    model = small_llama(200)
    sums, counts = torch.zeros(2), torch.zeros(2)
    collator = td.PackedCollator(return_dataset_id=True, return_seq_idx=True)
    for batch in td.loader([SAMPLES, code], mix, batch_size=2, shuffle=False, collator=collator):
        source = batch.pop("dataset_id")[batch.pop("seq_idx")[0].long()][1:]
        logits = model(**batch).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, batch["labels"][0, 1:], reduction="none").detach()
        learned = batch["labels"][0, 1:] != -100
        sums.index_add_(0, source[learned], losses[learned])
        counts.index_add_(0, source[learned], torch.ones(int(learned.sum())))
    for number, samples in enumerate([SAMPLES, code]):
        apart = loss_apart(model, list(td.PackedDataset(samples, plans[number])))
        assert abs((sums / counts)[number].item() - apart.item()) < 1e-5


def test_items_without_their_datasets_are_refused_only_if_asked_for() -> None:
    item = dict(items_of("dataset")[0])
    del item["dataset_id"]
    assert "dataset_id" not in td.PackedCollator()([item])
    with pytest.raises(InvalidInputError, match="item 0 of the batch has no dataset_id"):
        td.PackedCollator(return_dataset_id=True)([item])
    with pytest.raises(InvalidInputError, match="which no PackedDataset gives"):
        td.PackedCollator()([item | {"other": 5}])
    rows = [{"input_ids": sample, "dataset_id": np.zeros(len(sample), int)} for sample in SAMPLES]
    for named in ({"columns": {"dataset_id": 0}}, {"sample_columns": ["dataset_id"]}):
        with pytest.raises(InvalidInputError, match="rename the column"):
            td.PackedDataset(rows, PLAN, **named)


class CheckedTrainer(td.hf.TundishTrainerMixin, Trainer):  # type: ignore[misc]
    pass


def test_the_mixin_refuses_a_cache_that_the_collator_does_not_turn_off(tmp_path: Path) -> None:
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
    )
    arguments.remove_unused_columns, arguments.use_cache = False, True
    losses = []
    for collator in (td.PackedCollator(), td.PackedCollator(use_cache=None, attention="mask")):
        trainer = CheckedTrainer(
            small_llama(40), arguments, train_dataset=td.PackedDataset(SAMPLES, PLAN), data_collator=collator
        )
        losses.append(trainer.train().training_loss)
    assert abs(losses[0] - losses[1]) < 1e-5
    trainer.data_collator = td.PackedCollator(use_cache=None)
    with pytest.raises(InvalidInputError, match="arguments have use_cache=True"):
        trainer.train()
