"""A mixin for `transformers.Trainer` that saves and resumes through a `Checkpointer`. Public as `td.hf`.

Invariants:
    A resumed run takes all its state (model, optimizer, scheduler, scaler, random generators, Trainer) from one
    published DCP checkpoint. Checkpoints newer than that step are set aside before the first save, never deleted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tundish.checkpoint import (
    Checkpoint,
    Checkpointer,
    ResumedRun,
    choose_checkpoint,
    holds_adapters,
    load_adapters,
    load_chosen,
    open_readonly,
    random_states,
    refuse_encoded,
    refuse_mixed,
    set_random_states,
    start_new_run,
)
from tundish.distributed import voter_of
from tundish.errors import InvalidInputError, InvalidTypeError, NotFoundError, missing_extra
from tundish.packing import PackedCollator

try:
    from transformers.trainer import TRAINER_STATE_NAME, Trainer
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import HubStrategy, SaveStrategy
except ImportError:
    missing_extra("hf", "transformers", "TundishTrainerMixin")

# At run time, the Trainer is a later base of the class; the mixin uses its attributes.
_Trainer: Any = object

__all__ = ["TundishTrainerMixin"]


class TundishTrainerMixin(_Trainer):  # type: ignore[misc]
    """Makes a `transformers.Trainer` save to and resume from a `Checkpointer` under `args.output_dir`.

    Each save writes a Hugging Face export `hf-<step>` and, without `save_only_model`, a DCP checkpoint `dcp-<step>`
    with everything that resuming needs. Both are written while training goes on.

    `train(resume_from_checkpoint=True)` resumes from the newest complete checkpoint. Newer ones of both kinds are
    renamed to `discarded-…`. `save_total_limit` limits how many checkpoints are kept. With `load_best_model_at_end`,
    the best checkpoint is kept as well, and so is the previous best until the new one is published.

    A model with PEFT adapters is exported as its adapters. Its DCP checkpoints contain all weights, including the base
    model's. A subclass is needed because the Trainer's `on_save` callback runs after the Trainer's own save.

    Args:
        checkpointer_options: Further arguments of the `Checkpointer`. All other arguments go to the Trainer.

    Raises:
        InvalidInputError: DeepSpeed or a hyperparameter search saves in its own way. Or the Trainer would push to the
            hub during training, or the best model would be loaded into an adapter with a prompt encoder.
        InvalidTypeError: The model mixes kinds of adapters.

    Example:
        class Trainer(td.hf.TundishTrainerMixin, transformers.Trainer):
            pass
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if Trainer in cls.__mro__[: cls.__mro__.index(TundishTrainerMixin)]:
            # The Trainer's own save would be used without any error.
            raise InvalidTypeError(
                f"{cls.__name__} lists the Trainer before TundishTrainerMixin, so the Trainer's own save would be "
                "used: put TundishTrainerMixin first"
            )

    def __init__(
        self, *args: Any, checkpointer_options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled:
            raise InvalidInputError(
                "TundishTrainerMixin cannot save DeepSpeed's sharded states: use the Trainer without it"
            )
        self._checkpointer_options = dict(checkpointer_options or {})
        self._checkpointer: Checkpointer | None = None
        self._resumed_step = -1
        self._run: ResumedRun | None = None
        self._resumed: dict[str, Any] = {}
        # The resumed checkpoint and each save of this run, in order: its step, and the best steps at that time.
        self._saves: list[tuple[int, frozenset[int]]] = []

    @property
    def checkpointer(self) -> Checkpointer:
        """The checkpointer of this run. The first access is collective: all ranks must make it."""
        if self._checkpointer is None:
            options: dict[str, Any] = {
                "keep_last": self._keep_last(),
                "keep": self._is_best,
                **self._checkpointer_options,
            }
            Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
            self._checkpointer = Checkpointer(self.args.output_dir, **options)
        return self._checkpointer

    def _keep_last(self) -> int | None:
        """Return how many checkpoints are kept; None for no limit. The Trainer reads 0 as no limit."""
        limit = self.args.save_total_limit
        return limit if limit is not None and limit > 0 else None

    def _is_best(self, checkpoint: Checkpoint) -> bool:
        """Return whether retention must keep `checkpoint` as a best one, now or after resuming a killed run."""
        bests = [_best_steps_of(self.state.best_global_step, self.state.best_model_checkpoint)]
        bests += [steps for _, steps in self._saves_since_published()]
        return any(checkpoint.step in steps for steps in bests)

    def _saves_since_published(self) -> list[tuple[int, frozenset[int]]]:
        """Return the newest published save and all later ones: for each its step, and the best steps at that time.

        A killed run resumes from the newest published save, so that save's best checkpoint must still exist.
        """
        kind = "hf" if self.args.save_only_model else "dcp"
        published = [
            number
            for number, (step, _) in enumerate(self._saves)
            if (self.checkpointer.path / f"{kind}-{step}").is_dir()
        ]
        return self._saves[published[-1] :] if published else self._saves

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer.train` does. When it returns, all saves are published.

        Args:
            resume_from_checkpoint: True resumes from the newest complete checkpoint; a path `…/dcp-<step>` in
                `output_dir` from that one; `…/dcp-latest` from the newest or an error. None and False start a new run:
                exports of a run that was killed before its first DCP checkpoint are set aside.
            *args: Passed on to `Trainer.train`.
            **kwargs: Passed on to `Trainer.train`.

        Returns:
            The result of `Trainer.train`.

        Raises:
            NotFoundError: There is no checkpoint to resume from. `save_only_model` writes none.
            StepExistsError: A new run would start in a folder with checkpoints of an earlier run.
            InvalidInputError: `hub_strategy` pushes during training. Or the arguments turn on a cache, and a
                `PackedCollator` does not turn it off.
        """
        if self.args.push_to_hub and self.args.hub_strategy != HubStrategy.END:
            raise InvalidInputError(
                f"hub_strategy is {self.args.hub_strategy.value!r}, but TundishTrainerMixin does not push during "
                "training: use 'end', or push from an on_published callback in checkpointer_options"
            )
        self._check_collator()
        if self.args.save_strategy != SaveStrategy.NO:
            refuse_mixed(self.model)
            if self.args.load_best_model_at_end:
                refuse_encoded(self.model)
        self._saves = []
        try:
            if not resume_from_checkpoint:
                if self.args.save_strategy != SaveStrategy.NO:
                    # With `save_only_model`, exports are the checkpoints of a run; otherwise its DCP checkpoints are.
                    start_new_run(
                        self.checkpointer,
                        kind=None if self.args.save_only_model else "dcp",
                        how="give resume_from_checkpoint=True",
                    )
                return super().train(None, *args, **kwargs)
            self._prepare_resume(resume_from_checkpoint)
            with tempfile.TemporaryDirectory() as folder:
                # The Trainer reads its own state from this file, and all other state through the methods below.
                Path(folder, TRAINER_STATE_NAME).write_text(self._resumed["trainer"])
                return super().train(folder, *args, **kwargs)
        finally:
            if self._checkpointer is not None:
                self._checkpointer.close()
                self._checkpointer = None

    def _prepare_resume(self, resume_from_checkpoint: str | Literal[True]) -> None:
        """Choose the step to resume from and load the state of this rank, except for weights and optimizer."""
        step = None
        if resume_from_checkpoint is not True:
            path = Path(resume_from_checkpoint).absolute()
            kind, _, number = path.name.partition("-")
            if (
                kind != "dcp"
                or not (number.isdecimal() or number == "latest")
                or path.parent != Path(self.args.output_dir).absolute()
            ):
                raise InvalidInputError(
                    f"resume_from_checkpoint is {os.fspath(path)!r}: give True, or a dcp-<step> under "
                    f"{self.args.output_dir!r}"
                )
            # Opening the checkpointer has repaired the link to the newest checkpoint.
            newest = self.checkpointer.latest("dcp") if number == "latest" else path
            step = None if newest is None else int(newest.name.partition("-")[2])
        with self._explain_missing_checkpoint():
            run = choose_checkpoint(self.checkpointer, step)
        self._run, rank_extras = run, run.rank_extras
        self._resumed_step = run.step
        # A rank that the saving run did not have takes the state of rank 0, except for the random generators.
        self._resumed = rank_extras.get(self.args.process_index) or {**rank_extras[0], "random": None}
        # All ranks take the Trainer state of rank 0: their logs may differ by their clocks.
        self._resumed["trainer"] = rank_extras[0]["trainer"]
        state = json.loads(self._resumed["trainer"])
        bests = _best_steps_of(state["best_global_step"], state["best_model_checkpoint"])
        self._saves = [(self._resumed_step, bests)]

    @contextlib.contextmanager
    def _explain_missing_checkpoint(self) -> Iterator[None]:
        """Raise a clear error if the folder contains exports but no DCP checkpoint."""
        try:
            yield
        except NotFoundError as error:
            published = open_readonly(self.args.output_dir).list()
            if not published or any(checkpoint.kind == "dcp" for checkpoint in published):
                raise
            raise NotFoundError(
                errno.ENOENT,
                "contains exports only, as save_only_model=True writes them, and a run cannot resume from those: "
                "train without resume_from_checkpoint into another output_dir",
                str(Path(self.args.output_dir).absolute()),
            ) from error

    def _check_collator(self) -> None:
        """Refuse a cache with which the pieces of a pack would see each other."""
        collator = self.data_collator
        if (
            isinstance(collator, PackedCollator)
            and collator.use_cache is None
            and collator.attention == "none"
            and getattr(self.args, "use_cache", False)
        ):
            raise InvalidInputError(
                "the arguments have use_cache=True, with which the model would take the pieces of a pack for one "
                "sequence: leave use_cache=None out of the PackedCollator, or use_cache=True out of the arguments"
            )

    # ---- Methods of the Trainer that are replaced ----

    def _save_checkpoint(self, model: Any, trial: Any) -> None:  # noqa: ARG002 (the wrapped self.model)
        if self.hp_search_backend is not None or trial is not None:
            raise InvalidInputError("TundishTrainerMixin cannot save the trials of a hyperparameter search")
        self.store_flos()
        step = self.state.global_step
        best = self.state.best_global_step
        export = self.checkpointer.path / f"hf-{best}"
        # The export of this step will exist later. A step that was evaluated but not saved has no export.
        if best and (best == step or export.is_dir()):
            self.state.best_model_checkpoint = str(export)
        bests = _best_steps_of(best, self.state.best_model_checkpoint)
        self._saves = [*self._saves_since_published(), (step, bests)]
        # A run killed between the two saves of step 0 leaves an export without a DCP checkpoint. No lower step exists
        # to roll back to, so that export is overwritten.
        self.checkpointer.save_hf(
            step, self.model, tokenizer=self.processing_class, overwrite=step == 0 and self._resumed_step < 0
        )
        if self.args.save_only_model:
            return
        weights, optimizer = get_state_dict(self.model, self.optimizer)
        scaler = getattr(self.accelerator, "scaler", None)
        self.checkpointer.save_dcp(
            step,
            {"model": weights, "optimizer": optimizer},
            extra={"step": step, "epoch": self.state.epoch},
            rank_extra={
                "trainer": self._trainer_state(),
                "scheduler": self.lr_scheduler.state_dict(),
                "scaler": None if scaler is None else scaler.state_dict(),
                "random": random_states(),
            },
        )

    def _trainer_state(self) -> str:
        """Return the Trainer's state and the states of its callbacks as the JSON text that the Trainer writes."""
        for callback in [*self.callback_handler.callbacks, self.control]:
            if not isinstance(callback, ExportableState):
                continue
            known = self.state.stateful_callbacks
            name = type(callback).__name__
            if isinstance(known[name], list):
                known[name].append(callback.state())
            else:
                known[name] = callback.state()
        return json.dumps(dataclasses.asdict(self.state), indent=2, sort_keys=True) + "\n"

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Do nothing when resuming: the weights are loaded together with the optimizer's state."""
        if self._resumed_step < 0:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        weights, optimizer = get_state_dict(self.model, self.optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": optimizer}
        if self._run is None:
            raise RuntimeError("no checkpoint was chosen to resume from")
        load_chosen(self.checkpointer, state, self._run)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.lr_scheduler.load_state_dict(self._resumed["scheduler"])
        self._export_best()

    def _export_best(self) -> None:
        """Export the resumed step if the Trainer's state calls it the best and its export does not exist.

        A killed run may have published the DCP checkpoint but not the export.
        """
        export = self.checkpointer.path / f"hf-{self._resumed_step}"
        best = json.loads(self._resumed["trainer"])["best_model_checkpoint"]
        if Path(best or "").name != export.name:
            return
        # Rank 0 publishes, so it knows.
        is_missing = self.args.process_index == 0 and not export.is_dir()
        if voter_of(None).vote(what="looking for the best export", flag=is_missing):
            # The Trainer loads it next.
            self.checkpointer.save_hf(
                self._resumed_step, self.model, tokenizer=self.processing_class, blocking=True
            )

    def _load_scaler(self, checkpoint: str | None) -> None:
        scaler = getattr(self.accelerator, "scaler", None)
        if checkpoint is not None and scaler is not None and self._resumed["scaler"] is not None:
            scaler.load_state_dict(self._resumed["scaler"])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self._resumed["random"] is not None:
            set_random_states(self._resumed["random"])

    def _load_best_model(self) -> None:
        self.checkpointer.wait()
        # This loads an export, not the resumed checkpoint.
        self._resumed_step = -1
        # The Trainer itself would load the top-level adapter file into whichever adapter is active.
        has_adapters = holds_adapters(self.model) and not self.is_fsdp_enabled
        if not (has_adapters and load_adapters(self.model, Path(self.state.best_model_checkpoint))):
            super()._load_best_model()


def _best_steps_of(best_step: int | None, best_checkpoint: str | None) -> frozenset[int]:
    """Return the best step and the best saved step of a Trainer's state. Not each evaluated step is saved."""
    kind, _, number = Path(best_checkpoint or "").name.partition("-")
    saved = {int(number)} if kind == "hf" and number.isdecimal() else set()
    return frozenset(saved | ({best_step} if best_step else set()))
