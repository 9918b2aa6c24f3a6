"""`td.hf.pack_dataset` under TRL: its trainer, its collator, and its own packing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, concatenate_datasets, load_from_disk
from support.integrations.tiny_models import draw_chats, llama, tokenizer

import tundish as td

trl = pytest.importorskip("trl")

# TRL 1.16 sets the option by the name that transformers 5.24 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")

MASKS = ("completion_mask", "assistant_masks")
MAX_LENGTH = 64
# What a user writes for TRL's own collator, and for ours.
PADDING_FREE: dict[str, Any] = {"padding_free": True, "max_length": None}
OUR_COLLATOR: dict[str, Any] = {"remove_unused_columns": False}


def trainer(folder: Path, rows: Dataset, kind: Any = trl.SFTTrainer, **options: Any) -> Any:
    """A trainer of `rows` as they are, if `options` do not say that TRL prepares them."""
    arguments = trl.SFTConfig(
        str(folder),
        per_device_train_batch_size=2,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        **{
            "max_steps": 4,
            "save_strategy": "no",
            "dataset_kwargs": {"skip_prepare_dataset": True},
            **options,
        },
    )
    collator = td.PackedCollator() if options.keys() >= OUR_COLLATOR.keys() else None
    return kind(llama(), arguments, collator, rows, processing_class=tokenizer())


def losses(folder: Path, rows: Dataset, **options: Any) -> list[float]:
    run = trainer(folder, rows, **options)
    run.train()
    found = [line["loss"] for line in run.state.log_history if "loss" in line]
    assert len(found) == 4
    return found


def packed_by_trl(samples: Dataset, plan: td.PackPlan) -> Dataset:
    """The packs of a plan, each made by TRL of the pack's samples."""
    made = [
        trl.pack_dataset(samples.select([piece.sample for piece in pack.pieces]), MAX_LENGTH) for pack in plan
    ]
    assert {len(pack) for pack in made} == {1}
    return concatenate_datasets(made)


@pytest.mark.parametrize("masks", [(), *((mask,) for mask in MASKS), MASKS], ids="-".join)
def test_losses_equal_those_of_trls_own_packs(masks: tuple[str, ...], tmp_path: Path) -> None:
    samples = Dataset.from_list(draw_chats(40, *masks))
    plan = td.pack([len(tokens) for tokens in samples["input_ids"]], MAX_LENGTH, mode="best_fit")
    theirs = packed_by_trl(samples, plan)
    # TRL makes labels of the masks where it prepares the rows.
    prepared = {"dataset_kwargs": None, "completion_only_loss": "completion_mask" in masks}
    expected = losses(tmp_path, theirs, **prepared, **PADDING_FREE)
    packs = td.hf.pack_dataset(samples, MAX_LENGTH)
    assert losses(tmp_path, packs, **PADDING_FREE) == pytest.approx(expected, abs=1e-4)
    assert losses(tmp_path, packs, **OUR_COLLATOR) == pytest.approx(expected, abs=1e-4)
    td.packing.export(plan, tmp_path / "exported", "trl", samples=samples)
    exported = load_from_disk(tmp_path / "exported")
    assert losses(tmp_path, exported, **PADDING_FREE) == pytest.approx(expected, abs=1e-4)
    if masks:
        plain = td.hf.pack_dataset(samples.select_columns("input_ids"), MAX_LENGTH)
        assert abs(losses(tmp_path, plain, **PADDING_FREE)[0] - expected[0]) > 1e-3


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_strategies_pack_as_trls(strategy: str) -> None:
    """TRL packs a thousand samples at a time, so as many packs as ours only of fewer."""
    samples = Dataset.from_list(draw_chats(300, "completion_mask", longest=100, seed=3))
    theirs = trl.pack_dataset(samples, MAX_LENGTH, strategy)
    ours = td.hf.pack_dataset(samples, MAX_LENGTH, strategy)
    assert len(ours) == len(theirs)
    if strategy == "wrapped":
        assert [row["input_ids"].tolist() for row in ours] == list(theirs["input_ids"])
        return

    def pieces(rows: Dataset) -> list[tuple[int, ...]]:
        found = []
        for row in rows:
            tokens = iter(list(row["input_ids"]))
            found += [tuple(next(tokens) for _ in range(length)) for length in row["seq_lengths"]]
        return sorted(found)

    assert pieces(ours) == pieces(theirs)


def test_a_killed_run_resumes(tmp_path: Path) -> None:
    packs = td.hf.pack_dataset(Dataset.from_list(draw_chats(40, "completion_mask")), MAX_LENGTH, seed=1)

    class Trainer(td.hf.TundishTrainerMixin, trl.SFTTrainer):  # type: ignore[misc]
        pass

    saving = {"save_strategy": "steps", "save_steps": 2, **OUR_COLLATOR}
    whole = trainer(tmp_path / "whole", packs, Trainer, **saving)
    whole.train()
    trainer(tmp_path / "broken", packs, Trainer, max_steps=2, **saving).train()
    resumed = trainer(tmp_path / "broken", packs, Trainer, **saving)
    resumed.train(resume_from_checkpoint=True)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


def test_a_stream_is_trained_on(tmp_path: Path) -> None:
    samples = Dataset.from_list(draw_chats(40, "completion_mask"))
    packs = td.hf.pack_dataset(samples.to_iterable_dataset(), MAX_LENGTH)
    # The trainer takes the packs of a stream as they come, and shuffles those of a Dataset.
    in_order = td.hf.pack_dataset(samples, MAX_LENGTH, mode="ordered")
    expected = losses(tmp_path, in_order, train_sampling_strategy="sequential", **OUR_COLLATOR)
    assert losses(tmp_path, packs, **OUR_COLLATOR) == pytest.approx(expected, abs=1e-6)
    assert losses(tmp_path, packs, **PADDING_FREE) == pytest.approx(expected, abs=1e-4)


def test_a_packed_dataset_passes_as_a_dataset(tmp_path: Path) -> None:
    rows = draw_chats(40, "completion_mask")
    plan = td.pack([len(row["input_ids"]) for row in rows], MAX_LENGTH, mode="ordered", window=4)
    items = td.PackedDataset(rows, plan)
    with pytest.raises(TypeError, match="Dataset"):
        trainer(tmp_path, items, **OUR_COLLATOR)
    run = trainer(tmp_path, td.hf.pack_dataset(items), **OUR_COLLATOR)
    assert len(run.train_dataset) == len(plan)
    assert run.train().metrics["train_loss"] > 0
