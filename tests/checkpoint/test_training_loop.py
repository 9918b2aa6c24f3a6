"""`Checkpointer.save` and `resume` in one process: training goes on as if it had never stopped."""

from __future__ import annotations

import copy
import json
import logging
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.distributed.programs import run
from torch import nn
from torch.optim import lr_scheduler
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers.optimization import Adafactor, get_cosine_schedule_with_warmup

import tundish as td
from tundish.checkpoint import Checkpointer
from tundish.errors import (
    CorruptCheckpointError,
    InvalidInputError,
    InvalidTypeError,
    NotFoundError,
    StateMismatchError,
)


class Model(nn.Module):
    """Has what real models have: tied weights, a frozen part, a buffer, and random numbers in its forward."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.middle = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3))
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.middle(self.frozen(self.embedding(tokens))))
        return logits


class Numbers:
    """A loader with a state: draws batches, and counts them."""

    def __init__(self) -> None:
        self.given = 0

    def __next__(self) -> torch.Tensor:
        self.given += 1
        return torch.randint(11, (8,), generator=torch.Generator().manual_seed(self.given))

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


class Run:
    """A training loop and its objects."""

    def __init__(
        self,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        *,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.model = Model()
        self.optimizer = make_optimizer(self.model)
        self.scheduler = None if make_scheduler is None else make_scheduler(self.optimizer)
        self.loader = Numbers()

    @property
    def objects(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": self.loader,
        }

    def steps(self, count: int) -> list[tuple[float, list[Any]]]:
        """Train; returns the loss and the learning rates of each step."""
        found = []
        for _ in range(count):
            tokens = next(self.loader)  # type: ignore[call-overload]
            loss = nn.functional.cross_entropy(self.model(tokens), tokens)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step(loss.item())
            elif self.scheduler is not None:
                self.scheduler.step()
            found.append((loss.item(), [group["lr"] for group in self.optimizer.param_groups]))
        return found


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """The first group is empty, as where no parameter has a name that gets no weight decay."""
    middle, others = list(model.middle.parameters()), [model.embedding.weight]  # type: ignore[union-attr]
    return torch.optim.AdamW(
        [
            {"params": [], "lr": 0.5, "betas": (0.5, 0.6), "weight_decay": 0.7},
            {"params": middle, "lr": 0.01, "betas": (0.8, 0.9)},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=0.02,
    )


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": adamw,
    "groups": grouped,
    "SGD": lambda model: torch.optim.SGD(trainable(model), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(trainable(model), lr=0.1, momentum=0.9, dampening=0.2),
    "Adafactor": lambda model: Adafactor(trainable(model), weight_decay=0.1),
    "Adafactor of torch": lambda model: torch.optim.Adafactor(trainable(model), lr=0.1),
    "NAdam": lambda model: torch.optim.NAdam(trainable(model), lr=0.1),
}


@pytest.mark.parametrize("stepped", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_it_had_never_stopped(tmp_path: Path, name: str, stepped: int) -> None:
    uninterrupted = Run(OPTIMIZERS[name])
    uninterrupted.steps(stepped)
    expected = uninterrupted.steps(4)
    run = Run(OPTIMIZERS[name])
    run.steps(stepped)
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        checkpointer.save(stepped + 1, **run.objects)
    assert run.steps(4) == expected, "a save changes nothing"
    resumed = Run(OPTIMIZERS[name], seed=5)
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        assert checkpointer.resume(**resumed.objects) == stepped + 1
    assert resumed.steps(4) == expected


def test_groups_without_parameters_keep_their_settings(tmp_path: Path) -> None:
    run, resumed = Run(grouped), Run(grouped)
    run.steps(1)
    run.optimizer.param_groups[0]["lr"] = 0.25
    for group in resumed.optimizer.param_groups:
        group.update(lr=9.0, betas=(0.1, 0.1), weight_decay=9.0)
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        checkpointer.save(1, **run.objects)
        checkpointer.resume(**resumed.objects)
    for mine, theirs in zip(resumed.optimizer.param_groups, run.optimizer.param_groups, strict=True):
        assert {**mine, "params": len(mine["params"])} == {**theirs, "params": len(theirs["params"])}


def test_settings_that_the_checkpoint_lacks_stay(tmp_path: Path) -> None:
    """A run that begins to use a scheduler, which adds settings to the groups."""
    run, resumed = Run(adamw), Run(adamw, SCHEDULERS["CyclicLR"])
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        checkpointer.save(1, **run.objects)
        checkpointer.resume(**resumed.objects, strict=False)
    (group,) = resumed.optimizer.param_groups
    assert group["lr"] == run.optimizer.param_groups[0]["lr"]
    assert "initial_lr" in group


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader_goes_on_at_the_next_batch(tmp_path: Path, workers: int) -> None:
    def make() -> Any:
        generator = torch.Generator().manual_seed(3)
        numbers = list(range(20))
        return StatefulDataLoader(numbers, 2, shuffle=True, num_workers=workers, generator=generator)

    model, loader, resumed = nn.Linear(2, 2), make(), make()
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        checkpointer.save(1, model=model, loader=loader)
        expected = [batch.tolist() for batch in batches]
        checkpointer.resume(model=model, loader=resumed)
    assert [batch.tolist() for batch in resumed] == expected
    assert len(expected) == 7


def test_wrappers_of_the_model_change_no_name(tmp_path: Path) -> None:
    run, resumed = Run(adamw), Run(adamw, seed=1)
    run.steps(1)
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        checkpointer.save(1, **{**run.objects, "model": torch.compile(run.model, backend="eager")})
        expected = run.steps(2)
        checkpointer.resume(**resumed.objects)
    assert resumed.steps(2) == expected


def test_saving_makes_no_step_of_a_new_optimizer(tmp_path: Path) -> None:
    run = Run(adamw)
    weights = copy.deepcopy(run.model.state_dict())
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        checkpointer.save(1, **run.objects)
    assert not run.optimizer.state
    assert all(torch.equal(weights[name], tensor) for name, tensor in run.model.state_dict().items())


def lambdas(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer), lr_scheduler.MultiStepLR(optimizer, [1, 3], 0.5)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambdas,
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "SequentialLR": sequential,
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4, 4, 6]),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, 3, cycle_momentum=False),
    "transformers": lambda optimizer: get_cosine_schedule_with_warmup(optimizer, 2, 20),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("stepped", [0, 3])
def test_schedulers_of_all_kinds_go_on(tmp_path: Path, name: str, stepped: int) -> None:
    run, resumed = Run(adamw, SCHEDULERS[name]), Run(adamw, SCHEDULERS[name])
    run.steps(stepped)
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        checkpointer.save(7, **run.objects)
        expected = run.steps(5)
        checkpointer.resume(**resumed.objects)
    assert resumed.steps(5) == expected
    assert resumed.scheduler.state_dict().keys() == run.scheduler.state_dict().keys()


def test_milestones_are_counters_again(tmp_path: Path) -> None:
    """The chainable form of `MultiStepLR` does without, but not its closed form."""
    run, resumed = Run(adamw, SCHEDULERS["MultiStepLR"]), Run(adamw, SCHEDULERS["MultiStepLR"])
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        checkpointer.save(1, **run.objects)
        checkpointer.resume(**resumed.objects)
    assert resumed.scheduler.milestones == run.scheduler.milestones
    assert sorted(resumed.scheduler.milestones.elements()) == [2, 4, 4, 6]


def test_several_models_optimizers_and_scalers(tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        policy, value = nn.Linear(3, 3), nn.Linear(3, 1)
        both = [*policy.parameters(), *value.parameters()]
        optimizers = {
            "matrices": torch.optim.SGD([one for one in both if one.ndim == 2], lr=0.1, momentum=0.9),
            "others": torch.optim.AdamW([one for one in both if one.ndim < 2], lr=0.1),
        }
        return {
            "model": {"policy": policy, "value": value},
            "optimizer": optimizers,
            "scheduler": {name: lambdas(one) for name, one in optimizers.items()},
            "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**seed),
            "loader": {"train": Numbers(), "evaluate": Numbers()},
        }

    def step(objects: dict[str, Any]) -> float:
        tokens = next(objects["loader"]["train"])[:3].float()
        policy, value = objects["model"].values()
        loss: torch.Tensor = value(policy(tokens)).square().sum()
        objects["scaler"].scale(loss).backward()
        for optimizer, scheduler in zip(
            objects["optimizer"].values(), objects["scheduler"].values(), strict=True
        ):
            objects["scaler"].step(optimizer)
            optimizer.zero_grad()
            scheduler.step()
        objects["scaler"].update()
        return loss.item()

    objects, resumed = make(1), make(2)
    step(objects)
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        checkpointer.save(1, **objects)
        expected = [step(objects) for _ in range(3)]
        checkpointer.resume(**resumed)
    assert [step(resumed) for _ in range(3)] == expected
    assert resumed["scaler"].state_dict() == objects["scaler"].state_dict()


def test_the_first_start_returns_0_and_sets_exports_of_a_killed_run_aside(tmp_path: Path) -> None:
    run, root = Run(adamw), tmp_path / "root"
    with Checkpointer(root, on_failure="raise") as checkpointer:
        checkpointer.save_hf(3, run.model.middle, blocking=True)
        assert checkpointer.resume(**run.objects) == 0
        assert dict(checkpointer.extra) == {}
        checkpointer.save(1, **run.objects)
    assert (root / "discarded-hf-3").is_dir()
    assert (root / "dcp-1").is_dir()


def test_resuming_an_earlier_step_sets_the_newer_ones_aside(tmp_path: Path) -> None:
    run, root = Run(adamw), tmp_path / "root"
    with Checkpointer(root, on_failure="raise") as checkpointer:
        checkpointer.save(1, **run.objects, extra={"epoch": 1})
        expected = run.steps(2)
        checkpointer.save(2, **run.objects, extra={"epoch": 2})
        run.steps(1)
        assert checkpointer.resume(**run.objects, step=1) == 1
        assert dict(checkpointer.extra) == {"epoch": 1}
        assert run.steps(2) == expected
        checkpointer.save(2, **run.objects)
        with pytest.raises(NotFoundError, match="steps there: 1, 2"):
            checkpointer.resume(**run.objects, step=5)
    assert (root / "discarded-dcp-2").is_dir()


def test_training_does_not_begin_anew_where_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    run, root = Run(adamw), tmp_path / "root"
    with Checkpointer(root, on_failure="raise") as checkpointer:
        checkpointer.save(1, **run.objects, blocking=True)
        (root / "dcp-1" / "__0_0.distcp").write_bytes(b"")
        with pytest.raises(CorruptCheckpointError, match="dcp-1"):
            checkpointer.resume(**run.objects)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))  # noqa: NPY002 (what is saved)


def test_random_generators_go_on(tmp_path: Path) -> None:
    run = Run(adamw)
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        checkpointer.save(1, **run.objects)
        expected = draws()
        checkpointer.resume(**run.objects)
        assert draws() == expected
        checkpointer.save(2, **run.objects, rng=False)
        draws()
        expected = draws()
        checkpointer.resume(**run.objects)
        assert draws() != expected


def test_what_differs_is_refused_by_name_before_anything_is_loaded(tmp_path: Path) -> None:
    run = Run(adamw, lambdas)
    run.steps(2)
    other = Run(adamw, lambdas, seed=3)
    other.model.extra = nn.Linear(2, 2)
    smaller = Model()
    del smaller.frozen
    before = copy.deepcopy(other.model.state_dict())
    cases: list[tuple[dict[str, Any], str]] = [
        ({**other.objects}, r"'model\.extra\.weight' is not in it"),
        ({**run.objects, "scaler": torch.amp.GradScaler("cpu")}, "it has no scaler"),
        ({**run.objects, "scheduler": None}, "it holds the state of scheduler, and no scheduler was given"),
        ({**run.objects, "optimizer": None, "scheduler": None}, "it holds the state of optimizer, and no"),
        (
            {**run.objects, "model": smaller, "optimizer": None},
            r"it holds 'model\.frozen\.bias', which the model",
        ),
        (
            {**run.objects, "optimizer": grouped(run.model)},
            "optimizer has 3 parameter groups here and 1 in it",
        ),
        (
            {**run.objects, "optimizer": torch.optim.AdamW(run.model.middle.parameters())},
            r"parameter group 0 of optimizer differs: only in it embedding\.weight, frozen",
        ),
        (
            {**run.objects, "optimizer": torch.optim.Adam(run.model.parameters()), "scheduler": None},
            "optimizer is of the class AdamW in it, and Adam here",
        ),
    ]
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        checkpointer.save(1, **run.objects, blocking=True)
        for objects, text in cases:
            with pytest.raises(StateMismatchError, match=text):
                checkpointer.resume(**objects)
    assert all(torch.equal(before[name], tensor) for name, tensor in other.model.state_dict().items())
    assert not other.optimizer.state


def test_without_strict_an_optimizer_of_another_class_begins_anew(tmp_path: Path) -> None:
    run = Run(adamw)
    run.steps(2)
    other = torch.optim.SGD(run.model.parameters(), 0.25, momentum=0.5)
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        checkpointer.save(1, model=run.model, optimizer=run.optimizer, blocking=True)
        assert checkpointer.resume(model=run.model, optimizer=other, strict=False) == 1
    assert not other.state and other.param_groups[0]["lr"] == 0.25 and "betas" not in other.param_groups[0]


def test_without_strict_the_rest_is_loaded_and_the_log_names_what_was_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, other = Run(adamw, lambdas), Run(adamw, seed=3)
    run.steps(2)
    other.model.extra = nn.Linear(2, 2)
    other.optimizer.param_groups[0]["params"] = other.optimizer.param_groups[0]["params"][:1]
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        checkpointer.save(1, **run.objects, blocking=True)
        assert checkpointer.resume(**other.objects, strict=False) == 1
    assert torch.equal(other.model.head.weight, run.model.head.weight)
    assert other.loader.given == 2
    # Groups that differ keep their own settings.
    assert other.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    mine, theirs = (one.state[one.param_groups[0]["params"][0]] for one in (other.optimizer, run.optimizer))
    assert torch.equal(mine["exp_avg"], theirs["exp_avg"])
    (line,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    for text in ("'model.extra.weight' is not in it", "holds the state of scheduler", "parameter group 0"):
        assert text in line


def test_arguments_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    run = Run(adamw)
    loader = torch.utils.data.DataLoader([1, 2])
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"loader": loader}, InvalidTypeError, "loader is a DataLoader, which has no state_dict"),
        ({"model": None}, InvalidInputError, "optimizer was given without a model"),
        ({"model": nn.Linear(2, 2)}, InvalidInputError, "optimizer has 7 parameters that the model does not"),
        ({"model": [run.model]}, InvalidTypeError, "model is a list: give an nn.Module, or a dict"),
        ({"model": {"train": run.model}}, InvalidInputError, "model has the name 'train'"),
        ({"optimizer": {"a.b": run.optimizer}}, InvalidInputError, r"optimizer has the name 'a\.b'"),
        (
            {"optimizer": {"one": run.optimizer, "two": adamw(run.model)}},
            InvalidInputError,
            r"optimizer\.two has 7 parameters of another optimizer",
        ),
        ({"optimizer": run.model}, InvalidTypeError, "optimizer is a Model: give a torch.optim.Optimizer"),
    ]
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        for arguments, kind, text in cases:
            with pytest.raises(kind, match=text):
                checkpointer.save(1, **{**run.objects, **arguments})
            with pytest.raises(kind, match=text):
                checkpointer.resume(**{**run.objects, **arguments})
        with pytest.raises(InvalidInputError, match="hf is 0"):
            checkpointer.save(1, **run.objects, hf=0)
        with pytest.raises(InvalidInputError, match="there is no model to save"):
            checkpointer.save(1, loader=run.loader)
    assert not list((tmp_path / "root").glob("dcp-*"))


def test_exports_are_counted_over_restarts(tmp_path: Path) -> None:
    exported = []
    for _ in range(3):
        run = Run(adamw)
        with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
            start = checkpointer.resume(**run.objects)
            for step in (start + 1, start + 2):
                save = checkpointer.save(step, **run.objects, hf=3)
                if save.export is not None:
                    exported.append(save.export.result().name)
    assert exported == ["hf-3", "hf-6"]


def test_a_lazy_save_holds_the_state_of_its_step(tmp_path: Path) -> None:
    run, resumed = Run(adamw), Run(adamw, seed=1)
    run.steps(1)
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        checkpointer.save(1, **run.objects, hf=True, staging="lazy")
        expected = run.steps(3)
        checkpointer.resume(**resumed.objects)
    assert resumed.steps(3) == expected


def test_the_log_has_one_line_a_save_a_removal_and_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, root = Run(adamw), tmp_path / "root"
    caplog.set_level(logging.INFO, "tundish.checkpoint")
    with Checkpointer(root, on_failure="raise", keep_last=1) as checkpointer:
        checkpointer.save(1, **run.objects, blocking=True)
        checkpointer.save(2, **run.objects, blocking=True)
        checkpointer.resume(**run.objects)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split()[0] for line in lines] == ["published", "published", "removed", "resumed"]
    assert f"{root / 'dcp-1'}: 0." in lines[0]
    assert "training was held up for" in lines[0]
    assert lines[2] == f"removed {root / 'dcp-1'}, which retention does not keep"
    assert lines[3].startswith(f"resumed from {root / 'dcp-2'} on 1 rank in ")


def test_objects_say_what_they_are(tmp_path: Path) -> None:
    run = Run(adamw)
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        assert repr(checkpointer) == f"<Checkpointer {tmp_path / 'root'}: rank 0 of 1>"
        save = checkpointer.save(1, **run.objects)
        assert repr(save).startswith("<Save dcp-1: ")
        save.result()
        assert repr(save) == "<Save dcp-1: published>"
    assert repr(checkpointer).endswith(", closed>")
    assert repr(td.checkpoint.open_readonly(tmp_path / "root")) == f"<ReadonlyRoot {tmp_path / 'root'}>"


def test_an_untied_checkpoint_is_refused_for_a_tied_model(tmp_path: Path) -> None:
    untied, tied = Model(tied=False), Model()
    before = tied.head.weight.detach().clone()
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        checkpointer.save(1, model=untied, blocking=True)
        with pytest.raises(
            StateMismatchError, match=r"'model\.embedding\.weight' and 'model\.head\.weight' are one"
        ):
            checkpointer.resume(model=tied)
        assert torch.equal(tied.head.weight, before)
        with torch.no_grad():
            untied.head.weight.copy_(untied.embedding.weight)
        checkpointer.save(2, model=untied, blocking=True)
        assert checkpointer.resume(model=tied) == 2
    assert torch.equal(tied.head.weight, untied.embedding.weight)


def test_a_tied_checkpoint_loads_into_an_untied_model(tmp_path: Path) -> None:
    untied, tied = Model(tied=False), Model()
    with Checkpointer(tmp_path / "root", on_failure="raise") as checkpointer:
        checkpointer.save(1, model=tied, blocking=True)
        checkpointer.resume(model=untied)
    assert torch.equal(untied.head.weight, tied.embedding.weight)
    assert torch.equal(untied.embedding.weight, tied.embedding.weight)


KILLED = """
import json, os, signal, sys
from pathlib import Path
sys.path[:0] = [sys.argv[2], str(Path(sys.argv[2]).parent)]
from test_training_loop import Run, adamw, lambdas
from tundish.checkpoint import Checkpointer
run = Run(adamw, lambdas)
with Checkpointer(sys.argv[1], on_failure="raise") as checkpointer:
    start = checkpointer.resume(**run.objects)
    for step in range(start + 1, 9):
        ((loss, _),) = run.steps(1)
        print(json.dumps([step, loss]), flush=True)
        save = checkpointer.save(step, **run.objects)
        if step == int(sys.argv[3]):
            if sys.argv[4] == "published":
                save.result()
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_program_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    def start(root: Path, kill_at: int, when: str = "") -> list[tuple[int, float]]:
        done = run(["-c", KILLED, root, Path(__file__).parent, str(kill_at), when])
        assert done.returncode == (-signal.SIGKILL if kill_at else 0), done.stderr
        return [tuple(json.loads(line)) for line in done.stdout.splitlines()]

    expected = dict(start(tmp_path / "whole", 0))
    killed = [
        start(tmp_path / "killed", kill_at, when) for kill_at, when in ((3, "published"), (5, "under way"))
    ]
    killed.append(start(tmp_path / "killed", 0))
    for losses in killed:
        assert all(loss == expected[step] for step, loss in losses)
    assert killed[0][-1][0] == 3
    assert killed[1][0][0] == 4
    assert killed[2][0][0] in (4, 5, 6)
    assert killed[2][-1][0] == 8
