"""Loading a DCP checkpoint into a state dict, on whatever ranks there are.

What always holds: nothing of the state dict is touched before the checkpoint is known to be whole and to fit; what
fails on one rank fails on all; of the files only what torch's own reader unpickles is unpickled, after its checksum
was compared.
"""

from __future__ import annotations

import errno
import json
import logging
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tundish._native import verify_folder
from tundish.checkpoint.dcp.leaves import Leaves, is_stateful, leaves_of, plain_state
from tundish.checkpoint.dcp.plan import rank_extra_name
from tundish.checkpoint.dcp.values import from_json
from tundish.checkpoint.reading import ReadOnlyRoot
from tundish.distributed import Voter
from tundish.errors import CorruptCheckpointError, InvalidTypeError, NotFoundError, StateMismatchError

__all__ = ["load_from", "newest_whole"]

_logger = logging.getLogger("tundish.checkpoint")

_MANIFEST = "tundish.json"
_CHECKPOINT = re.compile(r"dcp-(0|[1-9][0-9]{0,17})")
_NAMED = 5


def load_from(
    state_dict: dict[str, Any],
    path: Path,
    *,
    verify: bool,
    voter: Voter,
    timeout: float,
    step: int | None = None,
) -> tuple[dict[str, Any], dict[int, Any]]:
    """Collective: load the checkpoint at `path`, in place.

    `verify`: whether this rank reads all its bytes before any rank uses one; one rank is enough. `step`: of which it
    has to be.

    Returns `extra`, and the `rank_extra` of every rank that saved.
    """
    with voter.agreed(f"verifying {path}", timeout=timeout):
        manifest = _manifest_of(path)
        if step is not None and manifest["step"] != step:
            raise CorruptCheckpointError(
                f"{path} is the checkpoint of step {manifest['step']}: rename it back"
            )
        if verify:
            verify_folder(path)
    with voter.agreed(f"opening {path}", timeout=timeout):
        rank_extras = {index: _rank_extra_of(path, index) for index in range(manifest["world_size"])}
        load = _Load(state_dict, path)
    with voter.agreed(f"loading {path}", timeout=timeout):
        load.run()
    return manifest["extra"], rank_extras


def newest_whole(view: ReadOnlyRoot, *, verify: bool) -> int | None:
    """The step of the newest DCP checkpoint that is whole, None without any; those passed over are logged.

    Raises `CorruptCheckpointError` where there are some and none is whole.
    """
    damaged: list[str] = []
    # In this order: what is published meanwhile is no damaged one.
    visible = _visible_steps(view.path)
    whole = {checkpoint.step for checkpoint in view.list("dcp")}
    for step in visible:
        try:
            with view.reading(step, "dcp") as path:
                if verify or step not in whole:
                    verify_folder(path)
            if step in whole:
                return step
            raise CorruptCheckpointError(f"{path} does not hold what its name says")
        except (CorruptCheckpointError, OSError) as error:
            _logger.error(
                "the DCP checkpoint of step %d cannot be loaded, the one before is tried: %s", step, error
            )
            # Without a manifest it is no checkpoint of this library.
            if not isinstance(error, NotFoundError):
                damaged.append(str(error))
    if damaged:
        raise CorruptCheckpointError(f"no DCP checkpoint under {view.path} is whole: {'; '.join(damaged)}")
    return None


def _visible_steps(root: Path) -> list[int]:
    """Steps of all folders that are called like a DCP checkpoint, newest first, whatever they hold."""
    names = (_CHECKPOINT.fullmatch(path.name) for path in root.iterdir())
    return sorted((int(name[1]) for name in names if name), reverse=True)


class _Load:
    """The steps of `torch.distributed.checkpoint.load` that each rank does for itself; there are no others."""

    def __init__(self, state_dict: dict[str, Any], path: Path) -> None:
        if not isinstance(state_dict, dict):
            raise InvalidTypeError(
                f"the state dict is a {type(state_dict).__name__}: give a dict to load into"
            )
        self._target = state_dict
        self._state = plain_state(state_dict)
        self._reader = FileSystemReader(path)
        self._metadata = self._reader.read_metadata()
        # An empty one asks for what was saved beside the tensors.
        if self._state:
            _check_fit(leaves_of(self._state), self._metadata, path)

    def run(self) -> None:
        reader, planner = self._reader, DefaultLoadPlanner()
        reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        planner.set_up_planner(self._state, self._metadata, is_coordinator=False)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        plan = reader.prepare_global_plan(planner.create_global_plan([plan]))[0]
        with torch.no_grad():
            reader.read_data(planner.finish_plan(plan), planner).wait()
        for name, value in list(self._target.items()):
            if is_stateful(value):
                value.load_state_dict(self._state[name])
            else:
                self._target[name] = self._state[name]


def _check_fit(leaves: Leaves, metadata: Metadata, path: Path) -> None:
    saved = metadata.state_dict_metadata
    problems = []
    for name, value in leaves:
        there = saved.get(name)
        if there is None:
            problems.append(f"{name!r} is not in it")
        elif isinstance(value, torch.Tensor) is not isinstance(there, TensorStorageMetadata):
            kinds = (
                ("a tensor", "no tensor") if isinstance(value, torch.Tensor) else ("no tensor", "a tensor")
            )
            problems.append(f"{name!r} is {kinds[0]} here and {kinds[1]} in it")
        elif isinstance(there, TensorStorageMetadata) and tuple(there.size) != tuple(value.shape):
            problems.append(f"{name!r} has shape {tuple(value.shape)} here and {tuple(there.size)} in it")
    if problems:
        more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
        raise StateMismatchError(
            f"the state dict does not fit the checkpoint {path}: {'; '.join(problems[:_NAMED])}{more}. Give it as it "
            "was saved, or leave out what is not to be loaded"
        )


def _manifest_of(path: Path) -> dict[str, Any]:
    """What is recorded of a whole checkpoint."""
    if path.name.startswith(".") or not (path / _MANIFEST).is_file():
        raise NotFoundError(
            errno.ENOENT,
            f"no whole checkpoint is here: what a save under way or cut short leaves has no {_MANIFEST}, and "
            "what torch saved by itself is read by torch.distributed.checkpoint.load",
            str(path),
        )
    try:
        manifest = json.loads((path / _MANIFEST).read_bytes())
        facts = manifest["format_version"], manifest["kind"], manifest["world_size"], manifest["extra"]
        step = manifest["step"]
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptCheckpointError(f"{path / _MANIFEST} is damaged: {error!r}", (_MANIFEST,)) from None
    version, kind, world_size, extra = facts
    if (version, kind) != (1, "dcp") or not isinstance(world_size, int):
        raise StateMismatchError(
            f"{path} is a checkpoint of kind {kind!r} in format {version!r}: load_dcp reads kind 'dcp' in format 1"
        )
    return {"step": step, "world_size": world_size, "extra": {} if extra is None else extra}


def _rank_extra_of(path: Path, index: int) -> Any:
    file = path / rank_extra_name(index)
    if not file.exists():
        return None
    try:
        return from_json(file.read_bytes())
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise CorruptCheckpointError(f"{file} is damaged: {error!r}", (file.name,)) from None
