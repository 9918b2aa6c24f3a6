"""`td.hf.use_in_trl`: TRL's trainer with tundish's packs, against TRL's own packing of the same packs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset, concatenate_datasets
from support.distributed.rank_processes import Job, Line
from support.integrations.text_tokenizers import draw_messages, draw_pairs, draw_texts, text_tokenizer
from support.packing.small_llama import loss_apart, small_llama

import tundish as td
from tundish.errors import MissingExtraError

trl = pytest.importorskip("trl")
sft_trainer = pytest.importorskip("trl.trainer.sft_trainer")

# TRL 1.16 sets the option by the name that transformers 5.24 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")

MAX_LENGTH = 96
STRATEGIES: dict[str, dict[str, Any]] = {
    "bfd": {"mode": "best_fit", "overlong": "truncate"},
    "bfd_split": {"mode": "best_fit", "overlong": "split"},
    "wrapped": {"mode": "hard", "drop_last": False},
}
FORMS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "pairs": (draw_pairs(40), {}),
    "chats": (draw_messages(40), {"assistant_only_loss": True}),
    # Whose first tokens are learned in wrapped packs.
    "texts": (draw_texts(40), {}),
}
OWN_PACKING = sft_trainer.pack_dataset


@pytest.fixture(autouse=True)
def _leaves_trl_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft_trainer, "pack_dataset", OWN_PACKING)


def trainer(folder: Path, rows: Any, **options: Any) -> Any:
    tokenizer = text_tokenizer()
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
        **{"max_steps": 4, "save_strategy": "no", "packing": True, "max_length": MAX_LENGTH, **options},
    )
    return trl.SFTTrainer(
        small_llama(len(tokenizer)), arguments, train_dataset=rows, processing_class=tokenizer
    )


def losses(run: Any) -> list[float]:
    run.train()
    found = [line["loss"] for line in run.state.log_history if "loss" in line]
    assert len(found) == 4
    return found


def packed_by_trl(samples: list[dict[str, Any]], strategy: str) -> Dataset:
    """The packs of the plan that a strategy stands for, each made by TRL of the parts of samples in it."""
    plan = td.pack([len(row["input_ids"]) for row in samples], MAX_LENGTH, **STRATEGIES[strategy])
    made = []
    for pack in plan:
        parts = [
            {name: samples[piece.sample][name][piece.start : piece.stop] for name in ("input_ids", "labels")}
            for piece in pack.pieces
        ]
        made.append(trl.pack_dataset(Dataset.from_list(parts), MAX_LENGTH, strategy))
    assert {len(pack) for pack in made} == {1}
    return concatenate_datasets(made)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_equal_those_of_trls_packing_of_the_same_packs(
    strategy: str, form: str, tmp_path: Path
) -> None:
    rows, options = FORMS[form]
    rows = Dataset.from_list(rows)
    with td.hf.use_in_trl():
        ours = trainer(tmp_path, rows, packing_strategy=strategy, **options)
    samples = trainer(tmp_path, rows, packing=False, max_length=None, **options).train_dataset
    # Some samples are longer than a pack, so that the strategies differ.
    assert max(map(len, samples["input_ids"])) > MAX_LENGTH or form == "pairs"
    theirs = packed_by_trl(list(samples), strategy)
    assert len(ours.train_dataset) == len(theirs)
    prepared: dict[str, Any] = {"packing": False, "max_length": None, "padding_free": strategy != "wrapped"}
    prepared["dataset_kwargs"] = {"skip_prepare_dataset": True}
    expected = losses(trainer(tmp_path, theirs, **prepared))
    assert losses(ours) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
def test_the_samples_of_a_pack_do_not_see_each_other(strategy: str, tmp_path: Path) -> None:
    with td.hf.use_in_trl():
        run = trainer(tmp_path, Dataset.from_list(draw_messages(40)), packing_strategy=strategy)
    rows = [row for row in run.train_dataset if len(row["seq_lengths"]) > 1][:2]
    items = [
        {name: torch.as_tensor(row[name]) for name in ("input_ids", "labels", "cu_seqlens")} for row in rows
    ]
    assert len(rows) == 2
    batch = run.data_collator(rows)
    expected = loss_apart(small_llama(len(text_tokenizer())), items)
    found = run.compute_loss(run.model, dict(batch))
    assert found.item() == pytest.approx(expected.item(), abs=1e-4)
    # Without the bounds they do, which the loss shows.
    alone = {name: batch[name] for name in ("input_ids", "labels")}
    alone["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]
    assert abs(run.compute_loss(run.model, alone).item() - expected.item()) > 1e-3


def test_a_context_ends_it_and_a_plain_call_does_not(tmp_path: Path) -> None:
    rows = Dataset.from_list(draw_pairs(20))

    def packs_with_tundish() -> bool:
        return "cu_seqlens" in trainer(tmp_path, rows).train_dataset.column_names

    with td.hf.use_in_trl():
        assert packs_with_tundish()
        with td.hf.use_in_trl():
            pass
        assert packs_with_tundish()
    assert sft_trainer.pack_dataset is OWN_PACKING and not packs_with_tundish()
    with pytest.raises(KeyError), td.hf.use_in_trl():
        raise KeyError
    assert sft_trainer.pack_dataset is OWN_PACKING
    td.hf.use_in_trl()
    assert packs_with_tundish()
    with td.hf.use_in_trl():
        pass
    assert packs_with_tundish()


def test_a_run_resumes(tmp_path: Path) -> None:
    rows = Dataset.from_list(draw_pairs(60))
    saving = {
        "save_strategy": "steps",
        "save_steps": 2,
        "packing_strategy": "bfd_split",
        "shuffle_dataset": True,
    }
    with td.hf.use_in_trl():
        whole = trainer(tmp_path / "whole", rows, **saving)
        trainer(tmp_path / "broken", rows, **{**saving, "max_steps": 2}).train()
        resumed = trainer(tmp_path / "broken", rows, **saving)
    whole.train()
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


def test_evaluation_and_streams_are_packed_too(tmp_path: Path) -> None:
    rows = Dataset.from_list(draw_pairs(40))
    with td.hf.use_in_trl():
        run = trainer(tmp_path, rows.to_iterable_dataset())
        evaluated = run.evaluate(rows)["eval_loss"]
        losses(run)
    in_order = td.hf.pack_dataset(td.hf.tokenize(rows, text_tokenizer()), MAX_LENGTH, mode="ordered")
    streamed = [list(row["input_ids"]) for row in run.train_dataset]
    assert streamed == [row["input_ids"].tolist() for row in in_order]
    assert evaluated == pytest.approx(trainer(tmp_path, rows).evaluate(rows)["eval_loss"], rel=0.05)


def train_on_a_rank(rank: int, line: Line) -> None:
    folder = line.hear()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(dist.get_world_size())}
    with td.hf.use_in_trl():
        run = trainer(Path(folder), Dataset.from_list(draw_pairs(60)), max_steps=2)
    run.train()
    batches = [batch["input_ids"].flatten().tolist() for batch in run.get_train_dataloader()]
    line.say([row["input_ids"].tolist() for row in run.train_dataset], batches)


@pytest.mark.filterwarnings("default")
def test_ranks_share_the_same_packs(tmp_path: Path) -> None:
    with Job(train_on_a_rank, 2, tmp_path) as job:
        job.tell_all(str(tmp_path / "out"))
        (packs, ours), (theirs, others) = job.hear_all()
        job.expect_end()
    assert packs == theirs and len(packs) > 4
    tokens = [token for batch in (*ours, *others) for token in batch]
    assert len(ours) == len(others) and len(tokens) >= sum(map(len, packs))
    # The last batch may begin the epoch again.
    assert not any(batch in others[:-1] for batch in ours[:-1])


@pytest.mark.parametrize("version", ["1.15.4", "2.0.0", "2.1.0.dev0"])
def test_a_version_that_is_not_known_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl, "__version__", version)
    with pytest.raises(
        MissingExtraError, match=f"TRL {version} is not known: .* from 1.16 on, before 2; .*skip_prepare"
    ):
        td.hf.use_in_trl()
    assert sft_trainer.pack_dataset is OWN_PACKING


def other_arguments(dataset: Any, max_tokens: int) -> Any:
    raise AssertionError


def own_way(self: Any, dataset: Any) -> Any:
    return dataset


@pytest.mark.parametrize(
    ("of", "name", "value"),
    [
        (sft_trainer, "pack_dataset", other_arguments),
        (sft_trainer, "pack_dataset", None),
        (sft_trainer.SFTTrainer, "_prepare_dataset", own_way),
    ],
)
def test_a_trainer_that_packs_in_another_way_is_refused(
    of: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of, name, value)
    with pytest.raises(MissingExtraError, match=r"TRL 1\.\S+ packs in another way than is known"):
        td.hf.use_in_trl()
    assert getattr(of, name) is value
