"""Small runs of a transformers Trainer that saves and resumes through a checkpointer, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tundish.checkpoint import open_readonly

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tundish.integrations.hf.transformers import TundishTrainerMixin  # noqa: E402 (after the skips)


class Trainer(TundishTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    pass


def model(seed: int = 0) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_dropout=0.1,
    )
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(config)


def trainer(
    folder: Path, steps: int, kind: type[Trainer] = Trainer, trained: Any = None, **arguments: Any
) -> Any:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(64, (16,), generator=generator) for _ in range(64)]
    settings = {
        "max_steps": 8,
        "save_steps": 2,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
        **arguments,
    }

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_training_stop = state.global_step >= steps
            return control

    samples = [{"input_ids": row, "labels": row} for row in rows]
    return kind(
        model() if trained is None else trained,
        transformers.TrainingArguments(str(folder), **settings),
        train_dataset=samples,
        eval_dataset=samples[:2],
        callbacks=[Stop()],
        checkpointer_options={"on_failure": "raise"},
    )


def weights(run: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in run.model.state_dict().items()}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def saved(folder: Path) -> dict[str, list[int]]:
    root = open_readonly(folder)
    return {"hf": [one.step for one in root.list("hf")], "dcp": [one.step for one in root.list("dcp")]}
