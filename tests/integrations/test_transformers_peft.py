"""A transformers Trainer whose model holds adapters of peft saves and resumes through a checkpointer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoint.adapter_models import take_any_peft
from support.checkpoint.trainer_runs import Trainer, assert_same, model, saved, trainer, weights

from tundish.errors import InvalidInputError, InvalidTypeError


def adapted(kind: str, seed: int = 0) -> Any:
    """A model with the adapters "default" and "other", of which the latter is active and trained."""
    take_any_peft()
    with warnings.catch_warnings():
        # peft asks transformers what that warns of.
        warnings.simplefilter("ignore")
        import peft

        first = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
        second = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=3, modules_to_save=["norm"])
        adapted = model(seed)
        if kind == "of peft":
            adapted = peft.get_peft_model(adapted, first)
            adapted.add_adapter("other", second)
        else:
            adapted.add_adapter(first, "default")
            adapted.add_adapter(second, "other")
        adapted.set_adapter("other")
    return adapted


ADAPTED = pytest.mark.parametrize("kind", ["of peft", "of transformers"])
# peft and the Trainer ask transformers what that warns of.
says_what_is_old = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
looks_for_the_base = pytest.mark.filterwarnings("ignore:.*Could not find a config file")


@ADAPTED
@says_what_is_old
@looks_for_the_base
def test_adapters_are_exported_and_resumed(tmp_path: Path, kind: str) -> None:
    whole = trainer(tmp_path / "whole", steps=8, trained=adapted(kind), learning_rate=0.01)
    before = weights(whole)
    whole.train()
    changed = [name for name, tensor in weights(whole).items() if not torch.equal(tensor, before[name])]
    assert changed and all(".other." in name for name in changed)
    trainer(tmp_path / "broken", steps=5, trained=adapted(kind), learning_rate=0.01).train()
    # The checkpoint to resume from holds the base and all adapters: nothing depends on how the run starts again.
    resumed = trainer(tmp_path / "broken", steps=8, trained=adapted(kind, seed=7), learning_rate=0.01)
    resumed.train(resume_from_checkpoint=True)
    assert_same(weights(resumed), weights(whole))
    assert saved(tmp_path / "broken") == {"hf": [2, 4, 6, 8], "dcp": [2, 4, 6, 8]}
    resumed.model.save_pretrained(tmp_path / "theirs")
    theirs = sorted(
        path.relative_to(tmp_path / "theirs") for path in (tmp_path / "theirs").rglob("*.safetensors")
    )
    assert len(theirs) == (2 if kind == "of peft" else 1)
    for run in ("whole", "broken"):
        export = tmp_path / run / "hf-8"
        assert sorted(path.relative_to(export) for path in export.rglob("*.safetensors")) == theirs
        for name in theirs:
            assert_same(load_file(export / name), load_file(tmp_path / "theirs" / name))


@ADAPTED
@says_what_is_old
@looks_for_the_base
def test_the_best_adapters_are_loaded_at_the_end(tmp_path: Path, kind: str) -> None:
    losses = {2: 4.0, 4: 3.0, 6: 5.0}
    at_best: dict[str, torch.Tensor] = {}

    class Evaluated(Trainer):
        def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
            if self.state.global_step == 4:
                at_best.update(weights(self))
            return {"eval_loss": losses[self.state.global_step]}

    kinds = {"save_steps": 2, "eval_steps": 2, "eval_strategy": "steps", "max_steps": 6}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 1}
    settings = {**kinds, **best, "learning_rate": 0.01}
    run = trainer(tmp_path, steps=6, kind=Evaluated, trained=adapted(kind), **settings)
    run.train()
    assert run.state.best_model_checkpoint == str(tmp_path / "hf-4")
    assert_same(weights(run), at_best)


@says_what_is_old
@looks_for_the_base
def test_each_adapter_loads_its_own_best_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import peft

    losses = {2: 4.0, 4: 5.0, 6: 6.0}
    at_best: dict[str, torch.Tensor] = {}
    third = peft.LoraConfig(target_modules=["q_proj"], r=3, init_lora_weights=False)

    class Evaluated(Trainer):
        def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
            if self.state.global_step == 2:
                at_best.update(weights(self))
            if self.state.global_step == 4:
                self.model.add_adapter("third", third)
                at_best.update({name: one for name, one in weights(self).items() if ".third." in name})
            return {"eval_loss": losses[self.state.global_step]}

    kinds = {"save_steps": 2, "eval_steps": 2, "eval_strategy": "steps", "max_steps": 6}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 0.01}
    run = trainer(tmp_path, steps=6, kind=Evaluated, trained=adapted("of peft"), **kinds, **best)
    run.train()
    assert run.state.best_model_checkpoint == str(tmp_path / "hf-2")
    assert any(".third." in name for name in at_best)
    assert_same(weights(run), at_best)
    assert "hf-2 holds no weights of the adapters third, which stay as they are" in caplog.text
    # The weights at the top belong to one adapter, and go into no other.
    run.model.set_adapter("third")
    run.model.delete_adapter("default")
    run.model.delete_adapter("other")
    before = weights(run)
    with run.checkpointer:
        run._load_best_model()
    assert_same(weights(run), before)


@pytest.mark.parametrize("kind", ["PromptEncoderConfig", "PrefixTuningConfig"])
@says_what_is_old
def test_loading_the_best_prompt_encoder_is_refused_before_the_first_step(tmp_path: Path, kind: str) -> None:
    import peft

    more = {"prefix_projection": True} if kind == "PrefixTuningConfig" else {}
    config = getattr(peft, kind)(num_virtual_tokens=3, task_type="CAUSAL_LM", **more)
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
    run = trainer(tmp_path, steps=1, trained=peft.get_peft_model(model(), config), **best)
    with pytest.raises(InvalidInputError, match=r"load_best_model_at_end cannot load the adapter 'default'"):
        run.train()
    assert not list(tmp_path.iterdir())


@says_what_is_old
def test_adapters_that_cannot_be_saved_are_refused_before_the_first_step(tmp_path: Path) -> None:
    import peft

    config = peft.LoraConfig(target_modules=["q_proj"], r=2)
    run = trainer(tmp_path, steps=1)
    run.model = peft.get_peft_model(run.model, config, mixed=True)
    with pytest.raises(InvalidTypeError, match="mixes kinds of adapters"):
        run.train()
    assert not list(tmp_path.iterdir())
