"""The state of a training loop as one checkpoint: `Checkpointer.save` and `resume`.

- The state dict has the weights under `model`, and each optimizer's state under `optimizer` or `optimizer.<name>`, with
  the names of parameters that torch's `get_state_dict` gives.
- The `rank_extra` of each rank has the states of its scheduler, scaler and loader, and its random states.

Invariants:
    - Saving changes nothing: an optimizer without a step has no state afterwards, too.
    - An optimizer's state is made from what the checkpoint holds, not by a step of the optimizer.
    - What does not fit is refused before anything is loaded.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import empty as empty_dtensor

from tundish.checkpoint.dcp.load import SavedState
from tundish.checkpoint.dcp.plan import SavePlanner
from tundish.checkpoint.dcp.save import DcpSave
from tundish.checkpoint.dcp.state import Keys, flatten_state
from tundish.checkpoint.root import plain_step
from tundish.checkpoint.save_job import Save, SaveJob
from tundish.checkpoint.session import Session
from tundish.checkpoint.start_save import start_save
from tundish.checkpoint.write_plan import Staging
from tundish.errors import (
    InvalidInputError,
    InvalidTypeError,
    StateMismatchError,
    format_count,
    format_list,
    format_type,
)

_logger = logging.getLogger("tundish.checkpoint")

# Entries of `rank_extra` beside the states of single objects.
_RANDOM, _SAVES, _OPTIMIZERS = "random", "saves", "optimizers"
# A message names so many differences.
_MOST_NAMED = 5


class TrainingArguments(NamedTuple):
    """The arguments of `Checkpointer.save` and `resume` whose states are saved, unchecked: an object or a dict each."""

    model: Any
    optimizer: Any
    scheduler: Any
    loader: Any
    scaler: Any


def save_training(
    session: Session,
    step: int,
    given: TrainingArguments,
    *,
    saves: int,
    extra: Mapping[str, Any] | None,
    rng: bool,
    hf: bool | int,
    staging: Staging,
    export: Mapping[str, Any],
    job: Mapping[str, Any],
) -> Save:
    """Collective: `Checkpointer.save`, the save number `saves` of the run.

    `export` and `job` have the other arguments of the export, and of both saves.
    """
    fields: dict[str, Any] = {"step": plain_step(step), "call": "save", **job}
    with session.collective("save"):
        plan = functools.partial(
            _plan_save, session.planner, given, saves=saves, hf=hf, rng=rng, extra=extra, staging=staging
        )
        save = start_save(session, SaveJob(kind="dcp", make_plan=plan, extra=extra, **fields))
        if _is_export_due(hf, saves):
            optimizers = list(_named("optimizer", given.optimizer).values())
            make = session.export_plan(given.model, staging=staging, optimizer=optimizers, **export)
            save.export = start_save(session, SaveJob(kind="hf", make_plan=make, **fields))
    return save


class _TrainingState:
    """The objects whose states are saved or loaded.

    Attributes:
        module: the model, or a module that contains several; None without.
        optimizers: under "optimizer", or "optimizer.<name>" for several.
        others: schedulers, scalers and loaders, named likewise.

    Raises:
        InvalidTypeError: an object is of another kind, or has no `state_dict` and `load_state_dict`.
        InvalidInputError: a name cannot be used, or an optimizer has parameters that the model does not have.
    """

    def __init__(self, given: TrainingArguments) -> None:
        self.module = _module_of(given.model)
        self.optimizers = _named("optimizer", given.optimizer)
        self.others = {
            **_named("scheduler", given.scheduler),
            **_named("scaler", given.scaler),
            **_named("loader", given.loader),
        }
        taken: set[int] = set()
        for key, one in self.optimizers.items():
            if not isinstance(one, torch.optim.Optimizer):
                raise InvalidTypeError(f"{key} is {format_type(one)}: give a torch.optim.Optimizer")
            _check_parameters(key, one, self.module, taken)
        for key, one in self.others.items():
            if not all(callable(getattr(one, name, None)) for name in ("state_dict", "load_state_dict")):
                advice = ""
                if key.startswith("loader"):
                    advice = ", such as td.loader or torchdata's StatefulDataLoader, or leave it out"
                raise InvalidTypeError(
                    f"{key} is {format_type(one)}, which has no state_dict and load_state_dict: give an object with "
                    f"both{advice}"
                )

    @property
    def names(self) -> list[str]:
        """What is given."""
        return [*(["model"] if self.module is not None else []), *self.optimizers, *self.others]

    def state_dict(self) -> dict[str, Any]:
        """The state dict to save; its tensors are those of the model and the optimizers."""
        if self.module is None:
            raise InvalidInputError(
                "there is no model to save: give model=; save_dcp saves tensors without one"
            )
        return _state_dict(self.module, self.optimizers)

    def rank_extra(self, *, saves: int, rng: bool) -> dict[str, Any]:
        """The state of this rank alone.

        Args:
            saves: how many saves the run has made, with this one.
            rng: whether to keep the random states.
        """
        states = {key: given.state_dict() for key, given in self.others.items()}
        kinds = {key: type(optimizer).__qualname__ for key, optimizer in self.optimizers.items()}
        return {**states, _RANDOM: random_states() if rng else None, _SAVES: saves, _OPTIMIZERS: kinds}


def _plan_save(
    planner: SavePlanner,
    given: TrainingArguments,
    *,
    saves: int,
    hf: bool | int,
    rng: bool,
    extra: Mapping[str, Any] | None,
    staging: Staging,
) -> DcpSave:
    """Plan a save: local, and refuses what cannot be saved. `saves`: how many the run has made, with this one."""
    _is_export_due(hf, saves)
    training = _TrainingState(given)
    save = DcpSave(
        planner,
        training.state_dict(),
        extra=extra,
        rank_extra=training.rank_extra(saves=saves, rng=rng),
        staging=staging,
        optimizer=list(training.optimizers.values()),
    )
    save.fingerprint += f", objects {', '.join(training.names)}, hf {hf}, rng {bool(rng)}"
    return save


def _is_export_due(hf: Any, saves: int) -> bool:
    """Whether the save number `saves` is exported too. Raises `InvalidInputError` for a bad `hf`."""
    if isinstance(hf, bool):
        return hf
    if not isinstance(hf, int) or hf < 1:
        raise InvalidInputError(f"hf is {hf!r}: give True, False, or n to export every n-th save")
    return saves % hf == 0


class Resumption:
    """Loads a checkpoint into the objects of a training loop: `check`, `target`, the loading itself, then `apply`.

    Args:
        given: the objects.
        strict: whether to refuse what does not fit; else it is left out, with a line in the log.

    Attributes:
        step: of the checkpoint; 0 where there is none.
        extra: of its save.
        saves: how many saves the run had made.
    """

    def __init__(self, given: TrainingArguments, *, strict: bool) -> None:
        self.step = self.saves = 0
        self.extra: Mapping[str, Any] = {}
        self._started = time.monotonic()
        self._given = given
        self._strict = strict
        self._saved: SavedState | None = None
        self._state: dict[str, Any] = {}
        self._optimizers: list[_OptimizerLoad] = []
        # The classes of the optimizers that were saved, by name.
        self._kinds: dict[str, str] = {}
        # The states of the other objects, by name.
        self._own: dict[str, Any] = {}
        self._random: Callable[[], None] | None = None
        self._differences: list[str] = []

    def check(self) -> None:
        """Check the arguments."""
        if not isinstance(self._strict, bool):
            raise InvalidTypeError(f"strict must be True or False, not {self._strict!r}")
        self._training = _TrainingState(self._given)

    def target(self, saved: SavedState) -> dict[str, Any]:
        """The state dict to load into.

        Raises:
            StateMismatchError: the checkpoint does not fit, if `strict`.
        """
        self._saved, self.step, self.extra = saved, saved.step or 0, saved.extra
        own = self._states_of_rank(saved)
        known = {path[0] for path in saved.paths.values()} | own.keys()
        self._differences += [f"it has no {key}" for key in self._training.names if key not in known]
        self._differences += [
            f"it holds the state of {key}, and no {key} was given"
            for key in sorted(known - {*self._training.names})
        ]
        if self._training.module is not None and "model" in known:
            present = self._training.state_dict()
            self._state["model"] = self._weights(present["model"], saved)
            for key, optimizer in self._training.optimizers.items():
                here = type(optimizer).__qualname__
                if key in known and here != (there := self._kinds.get(key, here)):
                    # Another class gives other meanings to the same settings and tensors.
                    self._differences.append(f"{key} is of the class {there} in it, and {here} here")
                elif key in known:
                    load = _OptimizerLoad(key, optimizer, present[key]["param_groups"])
                    self._state[key] = load.target(saved)
                    self._differences += load.differences
                    self._optimizers.append(load)
        self._choose_states(own, saved)
        if self._differences:
            shown = "; ".join(self._differences[:_MOST_NAMED])
            more = len(self._differences) - _MOST_NAMED
            text = shown + (f"; and {more} more" if more > 0 else "")
            if self._strict:
                raise StateMismatchError(
                    f"{saved.path} does not fit: {text}. Give what was saved, or strict=False to leave this out"
                )
            if saved.voter.is_first:
                _logger.warning("%s is loaded without what does not fit: %s", saved.path, text)
        return {key: part for key, part in self._state.items() if part}

    def apply(self, session: Session) -> None:
        """Collective: give the loaded state to the objects."""
        with session.collective("resume"), session.agreed("resume: giving the states to their objects"):
            module, weights = self._training.module, self._state.get("model")
            if module is not None and weights:
                # It holds the parameters themselves, and states that modules keep beside them.
                set_model_state_dict(module, dict(weights), options=StateDictOptions(strict=self._strict))
            for key, state in self._own.items():
                self._training.others[key].load_state_dict(state)
            # After the schedulers, as torch asks for: the learning rates are those of the optimizer's state.
            for load in self._optimizers:
                load.apply(self._state[load.key])
            # Last, since loading may draw random numbers.
            if self._random is not None:
                self._random()
        if self._saved is not None and session.voter.is_first:
            _logger.info(
                "resumed from %s on %s in %.1f s; %s saved it",
                self._saved.path,
                format_count(session.world_size, "rank"),
                time.monotonic() - self._started,
                format_count(len(self._saved.rank_extras), "rank"),
            )

    def _states_of_rank(self, saved: SavedState) -> dict[str, Any]:
        """The states of single objects, by name: those of this rank if as many ranks saved, else the first rank's."""
        index = saved.voter.index if len(saved.rank_extras) == len(saved.voter.ranks) else 0
        found = saved.rank_extras[index]
        if not isinstance(found, dict) or _SAVES not in found:
            # Of another call of `save_dcp`.
            return {} if found is None else {"rank_extra": found}
        states = dict(found)
        self.saves = states.pop(_SAVES)
        self._kinds = states.pop(_OPTIMIZERS)
        self._choose_random(states.pop(_RANDOM), saved)
        return states

    def _weights(self, weights: dict[str, Any], saved: SavedState) -> dict[str, Any]:
        """The weights that the checkpoint has."""
        paths = flatten_state({"model": weights}).structure.paths
        there = {name for name, path in saved.paths.items() if path[0] == "model"}
        missing = [name for name in paths if name not in there]
        self._differences += [f"{name!r} is not in it" for name in missing]
        self._differences += [
            f"it holds {name!r}, which the model does not have" for name in sorted(there - paths.keys())
        ]
        for name in missing:
            weights.pop(paths[name][1], None)
        return weights

    def _choose_states(self, own: Mapping[str, Any], saved: SavedState) -> None:
        """Choose the states that the other objects take over."""
        savers, count = len(saved.rank_extras), len(saved.voter.ranks)
        for key, given in self._training.others.items():
            if key not in own:
                continue
            is_bound = key.partition(".")[0] == "loader" and not getattr(given, "resumes_on_any_ranks", False)
            if is_bound and savers != count:
                self._differences.append(
                    f"{key} is {format_type(given)}, whose state belongs to one of the {savers} ranks that saved it, "
                    f"and here are {count}: resume on {savers}, or use td.loader with a plan or a mix, or "
                    "td.DispatchLoader, which resume on any number of ranks"
                )
                continue
            self._own[key] = own[key]

    def _choose_random(self, states: Any, saved: SavedState) -> None:
        if states is None:
            return
        voter, savers = saved.voter, len(saved.rank_extras)
        if savers == len(voter.ranks):
            self._random = lambda: set_random_states(states)
            return
        text = f"{saved.path.name} {len(voter.ranks)} {voter.index} "
        digest = hashlib.sha256(text.encode() + states["torch"].numpy().tobytes()).digest()
        self._random = lambda: _seed(int.from_bytes(digest[:8], "little"))
        if voter.is_first:
            _logger.warning(
                "%s was saved by %s, and %s: the random states of each rank are seeded anew",
                saved.path,
                format_count(savers, "rank"),
                f"{len(voter.ranks)} load it" if len(voter.ranks) > 1 else "one loads it",
            )


class _OptimizerLoad:
    """Loads the state of one optimizer.

    The state comes whole from the checkpoint. torch's `set_optimizer_state_dict` makes it by a step with gradients of
    zero, which counts, and loses the settings of groups without parameters.

    Args:
        key: its name in the state dict.
        optimizer: to load into.
        groups: its parameter groups with the names of parameters.

    Attributes:
        differences: from the checkpoint, once there is a target.
    """

    def __init__(
        self, key: str, optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]
    ) -> None:
        self.key = key
        self.differences: list[str] = []
        self._optimizer = optimizer
        # The names of the parameters of each group.
        self._names: list[list[str]] = [group["params"] for group in groups]
        self._parameters: dict[str, torch.Tensor] = {
            name: parameter
            for names, group in zip(self._names, optimizer.param_groups, strict=True)
            for name, parameter in zip(names, group["params"], strict=True)
        }

    def target(self, saved: SavedState) -> dict[str, Any]:
        """The part of the state dict to load into: all that was saved, except what the optimizer does not have."""
        groups = self._saved_groups(saved)
        has_same_groups = list(map(set, groups)) == list(map(set, self._names))
        if not has_same_groups:
            self.differences.append(self._difference(groups))
        values: dict[Keys, Any] = {}
        for name, path in saved.paths.items():
            if path[0] != self.key or len(path) < 3:
                continue
            about = saved.tensors.get(name)
            if path[1] == "state" and path[2] in self._parameters:
                values[path[1:]] = None if about is None else self._tensor(path[2:], about)
            elif path[1] == "param_groups" and has_same_groups:
                values[path[1:]] = (
                    None if about is None else torch.empty(about.size, dtype=about.properties.dtype)
                )
        target: dict[str, Any] = _nested(values) if values else {}
        return target

    def apply(self, loaded: Mapping[str, Any]) -> None:
        """Give the loaded state to the optimizer."""
        settings = loaded.get("param_groups") or [{}] * len(self._names)
        groups = [
            {**group, **setting, "params": names}
            for group, setting, names in zip(self._optimizer.param_groups, settings, self._names, strict=True)
        ]
        self._optimizer.load_state_dict({"state": loaded.get("state", {}), "param_groups": groups})

    def _saved_groups(self, saved: SavedState) -> list[list[Any]]:
        groups: list[list[Any]] = []
        while (name := f"{self.key}.param_groups.{len(groups)}.params") in saved.paths:
            groups.append(saved.read_object(name))
        return groups

    def _difference(self, groups: Sequence[Sequence[Any]]) -> str:
        """How the groups of the checkpoint differ from those of the optimizer."""
        if len(groups) != len(self._names):
            count = format_count(len(self._names), "parameter group")
            return f"{self.key} has {count} here and {len(groups)} in it"
        pairs = [(set(own), set(saved)) for own, saved in zip(self._names, groups, strict=True)]
        number = next(number for number, (own, saved) in enumerate(pairs) if own != saved)
        here, there = pairs[number]
        parts = []
        if here - there:
            parts.append(f"only here {format_list(sorted(map(str, here - there)))}")
        if there - here:
            parts.append(f"only in it {format_list(sorted(map(str, there - here)))}")
        return f"parameter group {number} of {self.key} differs: {', '.join(parts)}"

    def _tensor(self, path: Keys, about: TensorStorageMetadata) -> torch.Tensor:
        """A tensor for a value of the state of a parameter: the present one, or one that is made as optimizers do."""
        parameter, size, dtype = self._parameters[path[0]], about.size, about.properties.dtype
        present = self._optimizer.state.get(parameter, {}).get(path[1]) if len(path) == 2 else None
        if isinstance(present, torch.Tensor) and present.shape == size and present.dtype == dtype:
            return present
        parameter = parameter.detach()
        # The number of steps stays in host memory, unless the optimizer's `load_state_dict` says otherwise.
        if size == parameter.shape and path[-1] != "step":
            return torch.empty_like(parameter, dtype=dtype)
        if isinstance(parameter, DTensor) and size:
            mesh = parameter.device_mesh
            return empty_dtensor(size, dtype=dtype, device_mesh=mesh, placements=[Replicate()] * mesh.ndim)
        return torch.empty(size, dtype=dtype)


def _module_of(model: Any) -> nn.Module | None:
    """The model, or a module that contains several by their names."""
    if model is None or isinstance(model, nn.Module):
        return model
    if not isinstance(model, Mapping) or not model:
        raise InvalidTypeError(
            f"model is {format_type(model)}: give an nn.Module, or a dict of names to modules"
        )
    container = nn.Module()
    for name, module in model.items():
        if not isinstance(module, nn.Module):
            raise InvalidTypeError(f"model[{name!r}] is {format_type(module)}: give an nn.Module")
        try:
            container.add_module(name, module)
        except (KeyError, TypeError) as error:
            raise InvalidInputError(
                f"model has the name {name!r}, which no module can have: {error}"
            ) from None
    return container


def _named(kind: str, given: Any) -> dict[str, Any]:
    """One object under the name of its kind, or several of a mapping under "<kind>.<name>"."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        return {kind: given}
    for name in given:
        if not isinstance(name, str) or not name.isprintable() or not name or "." in name:
            raise InvalidInputError(f"{kind} has the name {name!r}: give words without dots")
    return {f"{kind}.{name}": one for name, one in given.items()}


def _check_parameters(
    key: str, optimizer: torch.optim.Optimizer, module: nn.Module | None, taken: set[int]
) -> None:
    """Refuse parameters that the model does not have, and those `taken` by other optimizers; add the others to them."""
    if module is None:
        raise InvalidInputError(
            f"{key} was given without a model, which names its parameters: give model= too"
        )
    known = set(map(id, module.parameters()))
    own = [id(one) for group in optimizer.param_groups for one in group["params"]]
    count = sum(one not in known for one in own)
    if count:
        raise InvalidInputError(
            f"{key} has {format_count(count, 'parameter')} that the model does not have: give all modules that it "
            "trains, and make it after the model is sharded or wrapped"
        )
    count = sum(one in taken for one in own)
    if count:
        raise InvalidInputError(
            f"{key} has {format_count(count, 'parameter')} of another optimizer: give each parameter one optimizer"
        )
    taken.update(own)


def _state_dict(module: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, Any]:
    """The weights and the states of all optimizers, as torch's `get_state_dict` names them.

    That makes the state of a new optimizer by a step; this does not.
    """
    if not optimizers:
        return {"model": get_model_state_dict(module)}
    entries = [
        (optimizer, parameter)
        for optimizer in optimizers.values()
        if not optimizer.state
        for parameter in [one for group in optimizer.param_groups for one in group["params"]][:1]
    ]
    for optimizer, parameter in entries:
        # torch takes any entry for a state.
        optimizer.state[parameter] = {}
    try:
        weights, merged = get_state_dict(module, list(optimizers.values()))
    finally:
        for optimizer, parameter in entries:
            del optimizer.state[parameter]
    states: Any = merged["state"]
    groups: Any = iter(merged["param_groups"])
    state: dict[str, Any] = {"model": weights}
    for key, optimizer in optimizers.items():
        own = [next(groups) for _ in optimizer.param_groups]
        names = [name for group in own for name in group["params"]]
        state[key] = {"state": {name: states[name] for name in names if name in states}, "param_groups": own}
    return state


def _nested(values: Mapping[Keys, Any]) -> Any:
    """The nested dicts and lists with these values at these paths."""
    if () in values:
        return values[()]
    parts: dict[Any, dict[Keys, Any]] = {}
    for path, value in values.items():
        parts.setdefault(path[0], {})[path[1:]] = value
    nested = {key: _nested(part) for key, part in parts.items()}
    return [nested[key] for key in sorted(nested)] if all(isinstance(key, int) for key in nested) else nested


# ---- Random states ----


def random_states() -> dict[str, Any]:
    """The states of the global random generators of this process: Python's, numpy's, torch's on CPU and CUDA."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002 (the global generator)
    # Asking an unused device would take memory there.
    is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch leaves it so
    return {
        "python": {"version": version, "numbers": list(numbers), "gauss": gauss},
        "numpy": {"name": name, "keys": keys, "position": position, "has_gauss": has_gauss, "cached": cached},
        "torch": torch.random.get_rng_state(),
        "cuda": torch.cuda.random.get_rng_state_all() if is_used else [],
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    """Set the global random generators to what `random_states` returned."""
    python, numpy = states["python"], states["numpy"]
    random.setstate((python["version"], tuple(python["numbers"]), python["gauss"]))
    np.random.set_state(  # noqa: NPY002 (as above)
        (numpy["name"], numpy["keys"], numpy["position"], numpy["has_gauss"], numpy["cached"])
    )
    torch.random.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.is_available():
        # The saving run may have had more devices.
        torch.cuda.random.set_rng_state_all(states["cuda"][: torch.cuda.device_count()])


def _seed(number: int) -> None:
    """Seed all global random generators."""
    random.seed(number)
    np.random.seed(number % 2**32)  # noqa: NPY002 (as above)
    torch.manual_seed(number)
