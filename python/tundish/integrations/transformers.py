"""transformers integration: a Trainer that saves and resumes through tundish.

Owns what `transformers.Trainer` does about checkpoints and nothing else of it. What always holds: a resumed run
continues from one published DCP checkpoint, whole, with the states of model, optimizer, scheduler, scaler, random
generators and Trainer of one and the same step; what is newer than the step that a run begins at never is in the way
of its saves, and is never deleted for that. transformers is an extra: `pip install 'tundish[hf]'`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import random
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tundish.checkpoint import Checkpoint, Checkpointer, open_readonly
from tundish.checkpoint.hf.adapters import holds_adapters, load_adapters, refuse_encoded, refuse_mixed
from tundish.distributed import agreed, voter_of
from tundish.errors import InvalidInputError, InvalidTypeError, NotFoundError, StepExistsError, missing_extra

try:
    from transformers.trainer import TRAINER_STATE_NAME, Trainer
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import HubStrategy, SaveStrategy
except ImportError:
    missing_extra("hf", "transformers", "TundishTrainerMixin")

# What comes after the mixin in a class's bases: the Trainer, whose attributes it uses.
_Trainer: Any = object

__all__ = ["TundishTrainerMixin"]


class TundishTrainerMixin(_Trainer):  # type: ignore[misc]
    """Makes a `transformers.Trainer` save through a `Checkpointer` under `args.output_dir`, and resume from there.

        class Trainer(TundishTrainerMixin, transformers.Trainer):
            pass

    Each save is a Hugging Face export `hf-<step>` and, without `save_only_model`, a DCP checkpoint `dcp-<step>`
    that holds everything a resumption needs; both are written while training goes on.
    `train(resume_from_checkpoint=True)` takes the newest whole one; what is newer than it, of both kinds, is set
    aside as `discarded-…`, whole or not. `save_total_limit` is how many are kept; the best one stays with
    `load_best_model_at_end`, and the one before it until it is published. A model that holds adapters of peft is
    exported as its adapters; its DCP checkpoints hold all of its weights, the base's too. A subclass of both is
    needed because the Trainer has no hook in place of its save: `on_save` comes after it.

    Args:
        checkpointer_options: further arguments of the `Checkpointer`. All others are the Trainer's own.

    Raises `InvalidInputError` where DeepSpeed or a hyperparameter search saves in ways of its own, and where the
    Trainer is to push to the hub while it trains, or to load the best of an adapter whose prompts an encoder makes;
    `InvalidTypeError` for a model that mixes kinds of adapters.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if Trainer in cls.__mro__[: cls.__mro__.index(TundishTrainerMixin)]:
            # It would save in its own way, without a word.
            raise InvalidTypeError(
                f"{cls.__name__} would save as the Trainer does, which comes before TundishTrainerMixin among its "
                "bases: name TundishTrainerMixin first"
            )

    def __init__(
        self, *args: Any, checkpointer_options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled:
            raise InvalidInputError(
                "TundishTrainerMixin does not save what DeepSpeed shards: use its own Trainer"
            )
        self._checkpointer_options = dict(checkpointer_options or {})
        self._checkpointer: Checkpointer | None = None
        self._resumed_step = -1
        self._resumed: dict[str, Any] = {}
        # Of what this run goes on from and of its saves, in order: the step, and those that were the best then.
        self._bests: list[tuple[int, frozenset[int]]] = []

    @property
    def checkpointer(self) -> Checkpointer:
        """The checkpointer of this run. Collective when it is first asked for."""
        if self._checkpointer is None:
            options: dict[str, Any] = {
                "keep_last": self._most_kept(),
                "keep": self._is_best,
                **self._checkpointer_options,
            }
            Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
            self._checkpointer = Checkpointer(self.args.output_dir, **options)
        return self._checkpointer

    def _most_kept(self) -> int | None:
        """How many checkpoints stay; no limit where the Trainer knows none either, which 0 is to it."""
        limit = self.args.save_total_limit
        return limit if limit is not None and limit > 0 else None

    def _is_best(self, checkpoint: Checkpoint) -> bool:
        """Whether `checkpoint` is of the best step, or was as long as a killed run may go back to that."""
        bests = [_bests_of(self.state.best_global_step, self.state.best_model_checkpoint)]
        bests += [steps for _, steps in self._still_wanted()]
        return any(checkpoint.step in steps for steps in bests)

    def _still_wanted(self) -> list[tuple[int, frozenset[int]]]:
        """What was the best at the newest save that is published, from which a killed run goes on, and at later ones.

        What is saved now may be the best, and is not there yet: the best before it must not go for it.
        """
        kind = "hf" if self.args.save_only_model else "dcp"
        bests = self._bests
        published = [
            at for at, (step, _) in enumerate(bests) if (self.checkpointer.path / f"{kind}-{step}").is_dir()
        ]
        return bests[published[-1] :] if published else bests

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`; all saves are published when it returns.

        `resume_from_checkpoint`: True resumes from the newest whole checkpoint, a path `…/dcp-<step>` of this
        run's folder from that one, `…/dcp-latest` from the newest or not at all. Exports alone, which is all that
        `save_only_model` leaves, are nothing to resume from (`NotFoundError`).
        Without it, a folder that holds the checkpoints of an earlier run is refused
        with `StepExistsError`; exports that a run left which was killed before its first DCP checkpoint are set aside,
        one of step 0 is replaced.
        """
        if self.args.push_to_hub and self.args.hub_strategy != HubStrategy.END:
            raise InvalidInputError(
                f"hub_strategy is {self.args.hub_strategy.value!r}, and TundishTrainerMixin pushes nothing while it "
                "trains: give 'end' and call push_to_hub() then, or push from an on_published of checkpointer_options"
            )
        if self.args.save_strategy != SaveStrategy.NO:
            refuse_mixed(self.model)
            if self.args.load_best_model_at_end:
                refuse_encoded(self.model)
        self._bests = []
        try:
            if not resume_from_checkpoint:
                if self.args.save_strategy != SaveStrategy.NO:
                    self._begin_anew()
                return super().train(None, *args, **kwargs)
            self._choose(resume_from_checkpoint)
            with tempfile.TemporaryDirectory() as folder:
                # The Trainer reads its own state from a file, and everything else through the methods below.
                Path(folder, TRAINER_STATE_NAME).write_text(self._resumed["trainer"])
                return super().train(folder, *args, **kwargs)
        finally:
            if self._checkpointer is not None:
                self._checkpointer.close()
                self._checkpointer = None

    def _begin_anew(self) -> None:
        """Make sure, before the first step, that the saves of a run from step 0 on find nothing in their way."""
        checkpointer = self.checkpointer
        with agreed("starting without an earlier checkpoint"):
            # Exports are all that there will be, or what was left before there was something to resume from.
            found = open_readonly(checkpointer.path).survey(None if self.args.save_only_model else "dcp")
            # Damaged ones, too, are somebody's work: resuming says what is wrong with them.
            earlier = [one for ones in found for one in ones]
            if earlier:
                # Exports alone are nothing to resume from.
                can_resume = any(one.kind == "dcp" for one in earlier)
                advice = (
                    "give resume_from_checkpoint=True, or another output_dir"
                    if can_resume
                    else "give another output_dir, or move it away; save_only_model leaves nothing to resume from"
                )
                raise StepExistsError(
                    errno.EEXIST, f"is there from an earlier run: {advice}", str(earlier[-1].path)
                )
        checkpointer.discard_after(0)

    def _choose(self, resume_from_checkpoint: str | Literal[True]) -> None:
        """Decide on the step to resume from, and take what this rank has to remember of it."""
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
            # Opening mends the link, and it leads to the newest.
            newest = self.checkpointer.latest("dcp") if number == "latest" else path
            step = None if newest is None else int(newest.name.partition("-")[2])
        with self._told_of_exports():
            extra, rank_extras = self.checkpointer.load_dcp({}, step)
        self._resumed_step = extra["step"]
        # A rank that was not there has the states of the first, which are the same but for the random generators.
        self._resumed = rank_extras.get(self.args.process_index) or {**rank_extras[0], "random": None}
        # What the ranks' own logs say may differ by their clocks.
        self._resumed["trainer"] = rank_extras[0]["trainer"]
        state = json.loads(self._resumed["trainer"])
        bests = _bests_of(state["best_global_step"], state["best_model_checkpoint"])
        self._bests = [(self._resumed_step, bests)]

    @contextlib.contextmanager
    def _told_of_exports(self) -> Iterator[None]:
        """Say of a folder with exports alone that they are nothing to resume from."""
        try:
            yield
        except NotFoundError as error:
            published = open_readonly(self.args.output_dir).list()
            if not published or any(one.kind == "dcp" for one in published):
                raise
            raise NotFoundError(
                errno.ENOENT,
                "holds exports alone, which are nothing to resume from, as save_only_model=True leaves them: "
                "train without resume_from_checkpoint into another output_dir",
                str(Path(self.args.output_dir).absolute()),
            ) from error

    # ---- What the Trainer calls ----

    def _save_checkpoint(self, model: Any, trial: Any) -> None:  # noqa: ARG002 (the wrapped form of self.model)
        if self.hp_search_backend is not None or trial is not None:
            raise InvalidInputError("TundishTrainerMixin does not save the trials of a hyperparameter search")
        self.store_flos()
        step = self.state.global_step
        best = self.state.best_global_step
        export = self.checkpointer.path / f"hf-{best}"
        # What is saved now is there later. Of a step that was evaluated alone there never is anything.
        if best and (best == step or export.is_dir()):
            self.state.best_model_checkpoint = str(export)
        bests = _bests_of(best, self.state.best_model_checkpoint)
        self._bests = [*self._still_wanted(), (step, bests)]
        # An export of step 0 without its DCP checkpoint is what a run left that was killed in between: no step is
        # below it, to which it could be set aside.
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
                "random": _random_states(),
            },
        )

    def _trainer_state(self) -> str:
        """The Trainer's state with those of its callbacks, as it writes them itself."""
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
        """The weights come with the optimizer's states, once there is an optimizer."""
        if self._resumed_step < 0:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        weights, optimizer = get_state_dict(self.model, self.optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": optimizer}
        # Its bytes were verified when it was chosen.
        self.checkpointer.load_dcp(state, self._resumed_step, verify=False)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.lr_scheduler.load_state_dict(self._resumed["scheduler"])
        # A killed run may have published one kind and not the other; and the newest may have been damaged.
        self.checkpointer.discard_after(self._resumed_step)
        self._export_best()

    def _export_best(self) -> None:
        """Export what the run goes on from, where its state calls that the best and names an export that is not there.

        Of a run that was killed the one may have been published, and the other not yet.
        """
        export = self.checkpointer.path / f"hf-{self._resumed_step}"
        best = json.loads(self._resumed["trainer"])["best_model_checkpoint"]
        if Path(best or "").name != export.name:
            return
        # The rank that publishes knows.
        is_missing = self.args.process_index == 0 and not export.is_dir()
        if voter_of(None).vote(what="looking for the best export", flag=is_missing):
            # The Trainer looks for it next.
            self.checkpointer.save_hf(
                self._resumed_step, self.model, tokenizer=self.processing_class, blocking=True
            )

    def _load_scaler(self, checkpoint: str | None) -> None:
        scaler = getattr(self.accelerator, "scaler", None)
        if checkpoint is not None and scaler is not None and self._resumed["scaler"] is not None:
            scaler.load_state_dict(self._resumed["scaler"])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self._resumed["random"] is not None:
            _set_random_states(self._resumed["random"])

    def _load_best_model(self) -> None:
        self.checkpointer.wait()
        # From here on it is an ordinary load of an export.
        self._resumed_step = -1
        # The Trainer loads what lies at the top into the adapter that is active, whichever that is.
        has_adapters = holds_adapters(self.model) and not self.is_fsdp_enabled
        if not (has_adapters and load_adapters(self.model, Path(self.state.best_model_checkpoint))):
            super()._load_best_model()


def _bests_of(best_step: int | None, best_checkpoint: str | None) -> frozenset[int]:
    """The best step, and the best that was saved, of a Trainer's state: evaluations may be more often than saves."""
    kind, _, number = Path(best_checkpoint or "").name.partition("-")
    saved = {int(number)} if kind == "hf" and number.isdecimal() else set()
    return frozenset(saved | ({best_step} if best_step else set()))


def _random_states() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002 (the generator that others use)
    return {
        "python": {"version": version, "numbers": list(numbers), "gauss": gauss},
        "numpy": {"name": name, "keys": keys, "position": position, "has_gauss": has_gauss, "cached": cached},
        "torch": torch.random.get_rng_state(),
        "cuda": torch.cuda.random.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _set_random_states(states: Mapping[str, Any]) -> None:
    python, numpy = states["python"], states["numpy"]
    random.setstate((python["version"], tuple(python["numbers"]), python["gauss"]))
    np.random.set_state(  # noqa: NPY002 (as above)
        (numpy["name"], numpy["keys"], numpy["position"], numpy["has_gauss"], numpy["cached"])
    )
    torch.random.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.is_available():
        # There may be fewer devices than where it was saved.
        torch.cuda.random.set_rng_state_all(states["cuda"][: torch.cuda.device_count()])
