"""Loss weights: packed gradients against those of the samples apart, and the denominator over steps and ranks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.distributed.rank_processes import Job, Line, outcome
from support.packing.small_llama import small_llama
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import tundish as td
from tundish.errors import InvalidInputError, InvalidTypeError

VOCABULARY = 60
MODES = ["tokens", "samples"]


def make_dataset() -> td.PackedDataset:
    """Samples of very different lengths, some of them with few tokens to learn from, or none."""
    draws = np.random.default_rng(0)
    lengths = [1, 2, 3, 60, 5, 40, 7, 31, 2, 64, 9, 4]
    rows = []
    for number, length in enumerate(lengths):
        mask = draws.integers(0, 2, length) if number % 3 else np.ones(length, int)
        rows.append({"input_ids": draws.integers(0, VOCABULARY, length), "loss_mask": mask})
    rows[4]["loss_mask"] = np.zeros(5, int)
    # Only its first token, which no token predicts.
    rows[6]["loss_mask"] = np.array([1] + [0] * 6)
    return td.PackedDataset(rows, td.pack(lengths, 64, mode="sequential"))


def loss_apart(model: LlamaForCausalLM, dataset: td.PackedDataset, mode: str) -> torch.Tensor:
    """The mean over learned tokens, or over samples of their means, of samples in rows of their own."""
    losses = []
    for item in dataset:
        for start, stop in pairwise(item["cu_seqlens"].tolist()):
            labels = item["labels"][start + 1 : stop]
            if (labels == -100).all():
                continue
            logits = model(input_ids=item["input_ids"][start:stop][None], use_cache=False).logits[0, :-1]
            own = torch.nn.functional.cross_entropy(logits, labels, reduction="none")[labels != -100]
            losses.append(own)
    if mode == "tokens":
        return torch.cat(losses).mean()
    return torch.stack([own.mean() for own in losses]).mean()


def gradients_of(model: LlamaForCausalLM) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [{}, {"pad_to": 128, "attention": "mask"}])
def test_the_gradient_of_all_steps_is_that_of_the_samples_apart(mode: Any, options: dict[str, Any]) -> None:
    dataset, model = make_dataset(), small_llama(VOCABULARY)
    apart = loss_apart(model, dataset, mode)
    apart.backward()
    expected = gradients_of(model)
    model.zero_grad()
    collate = td.PackedCollator(loss_weights=mode, **options)
    # Every batch is an accumulation step of one rank or another.
    batches = [
        collate(dataset.__getitems__(range(first, min(first + 2, len(dataset))))) for first in (0, 2, 4)
    ]
    assert sum(len(dataset.plan[number].pieces) for number in range(len(dataset))) == 12
    items = td.packing.num_items_in_batch(batches)
    model.loss_function = td.packing.weighted_loss
    whole = 0.0
    for batch in batches:
        loss = model(**batch, num_items_in_batch=items).loss
        loss.backward()
        whole += loss.item()
    assert abs(whole - apart.item()) < 1e-5
    assert_close(gradients_of(model), expected)


def test_a_batch_alone_is_divided_by_its_own_weights() -> None:
    dataset, model = make_dataset(), small_llama(VOCABULARY)
    batch = td.PackedCollator(loss_weights="tokens")(list(dataset))
    own = model(**batch).loss
    model.loss_function = td.packing.weighted_loss
    assert abs(model(**batch).loss.item() - own.item()) < 1e-5
    samples = td.PackedCollator(loss_weights="samples")(list(dataset))
    expected = loss_apart(model, dataset, "samples")
    assert abs(model(**samples).loss.item() - expected.item()) < 1e-5


@pytest.mark.parametrize("options", [{}, {"pad_to": 40}])
def test_weights_and_counts_of_each_piece(options: dict[str, int]) -> None:
    rows = [
        {"input_ids": [1, 2, 3, 4], "loss_mask": [1, 1, 0, 1]},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 0]},
        {"input_ids": [8], "loss_mask": [1]},
        {"input_ids": [9, 10, 11], "loss_mask": [1, 1, 1]},
    ]
    plan = td.pack([4, 3, 1, 3], 16, mode="sequential", align=4)
    item = td.PackedDataset(rows, plan)[0]
    tokens = [0, 1, 0, 1] + [0] * 8 + [0, 1, 1, 0]
    rest = [0] * (options.get("pad_to", 16) - 16)
    for mode, weight in (("tokens", 1), ("samples", 0.5)):
        batch = td.PackedCollator(loss_weights=mode, **options)([item])  # type: ignore[arg-type]
        assert batch["loss_weights"].dtype == torch.float32
        assert batch["loss_weights"].tolist() == [[weight * token for token in tokens + rest]]
        assert batch["num_unlearned_pieces"] == 2
        assert td.packing.num_items_in_batch([batch]).item() == (4 if mode == "tokens" else 2)


def test_no_token_to_learn_from_is_a_loss_of_zero() -> None:
    rows = [{"input_ids": [1, 2], "loss_mask": [0, 0]}]
    batch = td.PackedCollator(loss_weights="samples")([td.PackedDataset(rows, td.pack([2], 2))[0]])
    assert batch["num_unlearned_pieces"] == 1
    model = small_llama(VOCABULARY)
    model.loss_function = td.packing.weighted_loss
    items = td.packing.num_items_in_batch([batch])
    for options in ({}, {"num_items_in_batch": items}):
        assert model(**batch, **options).loss.item() == 0


class SampleTrainer(Trainer):
    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        return batches, td.packing.num_items_in_batch(batches).to(device, torch.float32)


@pytest.mark.parametrize("mode", MODES)
def test_a_trainer_of_transformers_takes_the_weights(mode: Any, tmp_path: Path) -> None:
    dataset, model = make_dataset(), small_llama(VOCABULARY)
    loss_apart(model, dataset, mode).backward()
    expected = gradients_of(model)
    model.zero_grad()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model.loss_function = td.packing.weighted_loss
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=len(dataset),
        max_grad_norm=0,
        remove_unused_columns=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    # For tokens, the Trainer's own count is right.
    trainer = (SampleTrainer if mode == "samples" else Trainer)(
        model,
        arguments,
        train_dataset=dataset,
        data_collator=td.PackedCollator(loss_weights=mode),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
    )
    trainer.train()
    steps = [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]
    assert_close(steps, expected)


def test_weights_that_do_not_fit_are_refused() -> None:
    logits, labels = torch.zeros(1, 3, 5), torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(InvalidInputError, match=r"\(1, 1\), and the labels \(1, 2\)"):
        td.packing.weighted_loss(logits, labels, loss_weights=torch.ones(1, 2))
    with pytest.raises(InvalidInputError, match="without shift_loss_weights"):
        td.packing.weighted_loss(logits, labels, loss_weights=torch.ones(1, 3), shift_labels=labels)
    with pytest.raises(InvalidInputError, match="one of 'tokens', 'samples'"):
        td.PackedCollator(loss_weights="pieces")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batches", "kind", "says"),
    [
        ({"loss_weights": torch.ones(1, 2)}, InvalidTypeError, "batches is a dict: give a list of batches"),
        (5, InvalidTypeError, "batches is an int"),
        ([torch.ones(2)], InvalidTypeError, "batch 0 is a Tensor"),
        (
            [{"loss_weights": torch.ones(1, 2)}, {"labels": torch.ones(1, 2)}],
            InvalidInputError,
            "batch 1 has no loss_w",
        ),
    ],
)
def test_batches_without_weights_are_refused(batches: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        td.packing.num_items_in_batch(batches)


def sum_up(rank: int, line: Line) -> None:
    while (weights := line.hear()) is not None:
        found: list[float] = []
        batches = [{"loss_weights": torch.tensor([part])} if part else {} for part in weights]

        def ask(batches: Any = batches, found: list[float] = found) -> None:
            found.append(td.packing.num_items_in_batch(batches).item())

        failed = outcome(ask)
        line.say(found[0] if found else failed)


def test_ranks_get_one_denominator_and_every_error(tmp_path: Path) -> None:
    with Job(sum_up, 2, tmp_path) as job:

        def ask(*weights: list[Any]) -> list[Any]:
            for rank, given in enumerate(weights):
                job.tell(rank, given)
            return [said for (said,) in job.hear_all()]

        assert ask([[0.5, 0.5], [1.0]], [[0.25]]) == [2.25, 2.25]
        assert ask([], [[3.0]]) == [3.0, 3.0]
        mine, other = ask([[1.0]], [[1.0], None])
        assert (mine[0], mine[2], other[0]) == ("PeerFailedError", 1, "InvalidInputError")
        job.tell_all()
        job.expect_end()
