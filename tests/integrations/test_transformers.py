"""A transformers Trainer that saves and resumes through a checkpointer."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoint.trainer_runs import Trainer, assert_same, saved, trainer, transformers, weights

from tundish.checkpoint import open_readonly
from tundish.errors import (
    CorruptCheckpointError,
    InvalidInputError,
    InvalidTypeError,
    NotFoundError,
    StepExistsError,
)
from tundish.integrations.hf import transformers as hf
from tundish.integrations.hf.transformers import TundishTrainerMixin


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", steps=8)
    whole.train()
    broken = trainer(tmp_path / "broken", steps=5)
    broken.train()
    published = open_readonly(tmp_path / "broken").list("dcp")
    assert [one.step for one in published][-1] == 4
    resumed = trainer(tmp_path / "broken", steps=8)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 8
    assert_same(weights(resumed), weights(whole))
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "hf-8")
    assert_same(dict(exported.state_dict()), weights(whole))


def test_a_given_step_is_resumed_and_a_damaged_one_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path, steps=6)
    run.train()
    data = next((tmp_path / "dcp-6").glob("*.distcp"))
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    data.write_bytes(damaged)
    with pytest.raises(CorruptCheckpointError, match="dcp-6"):
        trainer(tmp_path, steps=8).train(resume_from_checkpoint=str(tmp_path / "dcp-6"))
    # An earlier one that is named is a rollback: what is newer is set aside.
    earlier = trainer(tmp_path, steps=6)
    earlier.train(resume_from_checkpoint=str(tmp_path / "dcp-4"))
    assert saved(tmp_path) == {"hf": [2, 4, 6], "dcp": [2, 4, 6]}
    assert data.read_bytes() != damaged
    assert (tmp_path / "discarded-dcp-6" / data.name).read_bytes() == damaged


def flip(folder: Path) -> None:
    data = next((folder / "dcp-4").glob("*.distcp"))
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    data.write_bytes(damaged)


def cut(folder: Path) -> None:
    data = next((folder / "dcp-4").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])


def never_published(folder: Path) -> None:
    """As a kill leaves it between the two kinds."""
    shutil.rmtree(folder / "dcp-4")


@pytest.mark.parametrize("spoil", [flip, cut, never_published])
def test_a_run_resumes_from_the_newest_complete_checkpoint(
    tmp_path: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    whole = trainer(tmp_path / "whole", steps=8)
    whole.train()
    broken = trainer(tmp_path / "broken", steps=5)
    broken.train()
    spoil(tmp_path / "broken")
    export = (tmp_path / "broken" / "hf-4" / "model.safetensors").read_bytes()
    resumed = trainer(tmp_path / "broken", steps=8)
    resumed.train(resume_from_checkpoint=True)
    assert_same(weights(resumed), weights(whole))
    assert saved(tmp_path / "broken") == {"hf": [2, 4, 6, 8], "dcp": [2, 4, 6, 8]}
    # The export of the earlier run is not lost, and said where it is.
    aside = tmp_path / "broken" / "discarded-hf-4"
    assert (aside / "model.safetensors").read_bytes() == export
    assert f"set aside: {aside}" in caplog.text
    # And again, with nothing left to set aside.
    trainer(tmp_path / "broken", steps=8).train(resume_from_checkpoint=True)


def test_a_new_run_refuses_a_folder_with_checkpoints(tmp_path: Path) -> None:
    trainer(tmp_path, steps=4).train()
    before = sorted(path.name for path in tmp_path.iterdir())
    anew = trainer(tmp_path, steps=4)
    with pytest.raises(StepExistsError, match=r"dcp-4: .*resume_from_checkpoint=True"):
        anew.train()
    assert anew.state.global_step == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    # Killed before there was anything to resume from: the exports are set aside.
    for step in (2, 4):
        shutil.rmtree(tmp_path / f"dcp-{step}")
    trainer(tmp_path, steps=4).train()
    assert saved(tmp_path) == {"hf": [2, 4], "dcp": [2, 4]}
    assert (tmp_path / "discarded-hf-2").is_dir() and (tmp_path / "discarded-hf-4").is_dir()
    # Where exports are all that is saved they are nobody's leftovers.
    trainer(tmp_path / "exports", steps=2, save_only_model=True).train()
    with pytest.raises(StepExistsError, match=r"hf-2"):
        trainer(tmp_path / "exports", steps=2, save_only_model=True).train()
    # Nothing is saved, so nothing is in the way.
    trainer(tmp_path, steps=2, save_strategy="no").train()


def test_a_new_run_refuses_a_folder_with_damaged_checkpoints(tmp_path: Path) -> None:
    trainer(tmp_path, steps=4).train()
    shutil.rmtree(tmp_path / "dcp-2")
    cut(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(StepExistsError, match=r"dcp-4: .*resume_from_checkpoint=True"):
        trainer(tmp_path, steps=4).train()
    # Which does not begin anew in silence.
    with pytest.raises(CorruptCheckpointError, match="dcp-4"):
        trainer(tmp_path, steps=4).train(resume_from_checkpoint=True)
    # Opening takes back the pointer, which led to what is damaged.
    before.remove("dcp-latest")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_run_killed_between_the_two_saves_of_step_0_starts_again(tmp_path: Path) -> None:
    def begin() -> None:
        run = trainer(tmp_path, steps=2)

        class SaveFirst(transformers.TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                run._save_checkpoint(run.model, None)

        run.add_callback(SaveFirst())
        run.train()

    begin()
    assert saved(tmp_path) == {"hf": [0, 2], "dcp": [0, 2]}
    for name in ("hf-2", "dcp-2", "dcp-0"):
        shutil.rmtree(tmp_path / name)
    begin()
    assert saved(tmp_path) == {"hf": [0, 2], "dcp": [0, 2]}
    for name in ("hf-2", "dcp-2"):
        shutil.rmtree(tmp_path / name)
    # The checkpoint to resume from is reported before anything is computed.
    with pytest.raises(StepExistsError, match=r"dcp-0: .*resume_from_checkpoint=True"):
        begin()


@pytest.mark.parametrize("where", ["nowhere", "hf-2", "dcp-x"])
def test_a_path_outside_the_output_dir_is_refused(tmp_path: Path, where: str) -> None:
    with pytest.raises(InvalidInputError, match="resume_from_checkpoint"):
        trainer(tmp_path, steps=1).train(resume_from_checkpoint=str(tmp_path / where))


def test_resuming_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        trainer(tmp_path, steps=1).train(resume_from_checkpoint=True)


def test_exports_alone_cannot_be_resumed(tmp_path: Path) -> None:
    run = trainer(tmp_path, steps=2, save_only_model=True, save_total_limit=0)
    # As many as there are, which is what 0 means to the Trainer.
    run.train()
    assert saved(tmp_path) == {"hf": [2], "dcp": []}
    with pytest.raises(StepExistsError, match="a run cannot be resumed from exports") as refusal:
        trainer(tmp_path, steps=4, save_only_model=True).train()
    assert "resume_from_checkpoint=True" not in str(refusal.value)
    with pytest.raises(NotFoundError, match="contains exports only"):
        trainer(tmp_path, steps=4, save_only_model=True).train(resume_from_checkpoint=True)
    assert saved(tmp_path) == {"hf": [2], "dcp": []}


def test_dcp_latest_can_be_resumed(tmp_path: Path) -> None:
    trainer(tmp_path, steps=2).train()
    resumed = trainer(tmp_path, steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "dcp-latest"))
    assert saved(tmp_path) == {"hf": [2, 4], "dcp": [2, 4]}
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(NotFoundError):
        trainer(tmp_path / "elsewhere", steps=1).train(
            resume_from_checkpoint=str(tmp_path / "elsewhere" / "dcp-latest")
        )


def test_save_total_limit_is_respected(tmp_path: Path) -> None:
    trainer(tmp_path, steps=8, save_total_limit=2).train()
    readonly = open_readonly(tmp_path)
    assert [one.step for one in readonly.list("hf")] == [6, 8]
    assert [one.step for one in readonly.list("dcp")] == [6, 8]
    assert not (tmp_path / "checkpoint-8").exists()


def test_the_best_checkpoint_is_kept_and_loaded_at_the_end(tmp_path: Path) -> None:
    losses = {1: 9.0, 2: 4.0, 3: 6.0, 4: 7.0, 5: 3.0, 6: 8.0}

    class Evaluated(Trainer):
        def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
            return {"eval_loss": losses[self.state.global_step]}

    kinds = {"save_steps": 2, "eval_steps": 1, "eval_strategy": "steps", "max_steps": 6}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 1}
    run = trainer(tmp_path, steps=6, kind=Evaluated, **kinds, **best)
    run.train()
    # Of step 5, whose loss is less, nothing was ever saved.
    assert run.state.best_model_checkpoint == str(tmp_path / "hf-2")
    assert saved(tmp_path) == {"hf": [2, 6], "dcp": [2, 6]}
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf-2")
    assert_same(weights(run), dict(exported.state_dict()))


def test_the_best_checkpoint_is_kept_until_a_better_one_is_published(tmp_path: Path) -> None:
    losses = {2: 4.0, 4: 5.0, 6: 3.0}
    kept: list[list[int]] = []
    has_begun, was_seen = threading.Event(), threading.Event()

    class Evaluated(Trainer):
        def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
            return {"eval_loss": losses[self.state.global_step]}

        def _trainer_state(self) -> str:
            if self.state.global_step == 6:
                # The export of this step is taken, and not published yet.
                has_begun.set()
            return super()._trainer_state()

    def watch(event: str, kind: str, step: int) -> None:
        # Old ones go after this, though much was saved meanwhile.
        if (event, kind, step) == ("published", "hf", 4):
            assert has_begun.wait(60)
        if (event, kind, step) == ("staged", "hf", 6):
            kept.append(saved(tmp_path)["hf"])
            was_seen.set()
        # Once this is published a killed run goes on from it, and exports it anew.
        if (event, kind, step) == ("written", "dcp", 6):
            assert was_seen.wait(60)

    kinds = {"save_steps": 2, "eval_steps": 2, "eval_strategy": "steps", "max_steps": 6}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 1}
    run = trainer(tmp_path, steps=6, kind=Evaluated, **kinds, **best)
    run._checkpointer_options["on_event"] = watch
    run.train()
    # A run that is killed before the export of step 6 is published goes on from step 4, where step 2 is the best.
    assert kept == [[2, 4]]
    assert run.state.best_model_checkpoint == str(tmp_path / "hf-6")


def test_a_resumed_run_exports_the_best_step_if_its_export_is_missing(tmp_path: Path) -> None:
    losses = {2: 4.0, 4: 3.0, 6: 5.0}

    class Evaluated(Trainer):
        def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
            return {"eval_loss": losses[self.state.global_step]}

    kinds = {"save_steps": 2, "eval_steps": 2, "eval_strategy": "steps", "max_steps": 6}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 1}
    trainer(tmp_path, steps=4, kind=Evaluated, **kinds, **best).train()
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf-4").state_dict()
    # As it is where the run is killed when the one is published and the other is not.
    shutil.rmtree(tmp_path / "hf-4")
    resumed = trainer(tmp_path, steps=6, kind=Evaluated, **kinds, **best)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.best_model_checkpoint == str(tmp_path / "hf-4")
    assert saved(tmp_path) == {"hf": [4, 6], "dcp": [4, 6]}
    assert_same(weights(resumed), dict(expected))


def test_pushing_to_the_hub_during_training_is_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path, steps=1, hub_strategy="every_save")
    # As an argument it would have the Trainer ask the hub at once.
    run.args.push_to_hub = True
    with pytest.raises(InvalidInputError, match="every_save"):
        run.train()
    assert not list(tmp_path.iterdir())


def test_a_class_with_the_trainer_before_the_mixin_is_refused() -> None:
    class Own(transformers.Trainer):  # type: ignore[misc]
        pass

    with pytest.raises(InvalidTypeError, match=r"^Wrong lists the Trainer .* put TundishTrainerMixin first"):

        class Wrong(Own, TundishTrainerMixin):
            pass

    class Right(Own, Trainer):
        pass

    assert Right._save_checkpoint is TundishTrainerMixin._save_checkpoint


@pytest.mark.needs_gpu
def test_a_run_resumes_on_fewer_devices() -> None:
    states = hf._random_states()
    expected = torch.rand(3, device="cuda")
    states["cuda"] *= 2
    hf._set_random_states(states)
    assert torch.equal(torch.rand(3, device="cuda"), expected)
