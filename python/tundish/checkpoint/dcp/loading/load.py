"""Loads a DCP checkpoint into a state dict, on any number of ranks.

Invariants: the state dict is not touched before the checkpoint is verified and known to fit. A failure on one rank
fails on all. Only what torch's own reader unpickles is unpickled, after its checksum was compared (unless the caller
declined, or the checkpoint has none). Files that no save wrote are not read.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from tundish.checkpoint.dcp.file_names import METADATA
from tundish.checkpoint.dcp.flattened_state import flatten_state, is_stateful, plain_state
from tundish.checkpoint.dcp.loading.open_checkpoint import OpenCheckpoint, Readers, open_checkpoint
from tundish.checkpoint.dcp.loading.rank_extras import RankExtras
from tundish.checkpoint.dcp.loading.state_fit import check_fit, empty_mappings
from tundish.checkpoint.dcp.loading.tensor_reader import TensorReader
from tundish.checkpoint.publish.read_only_root import Damaged, ReadOnlyRoot
from tundish.checkpoint.publish.retention import Checkpoint
from tundish.errors import CorruptCheckpointError, InvalidTypeError, NotFoundError

__all__ = ["Loaded", "load_from", "load_newest"]

_logger = logging.getLogger("tundish.checkpoint")

# `extra`, and the `rank_extra` of every rank that saved.
Loaded = tuple[dict[str, Any], Mapping[int, Any]]


def load_from(
    state_dict: dict[str, Any], path: Path, *, step: int | None = None, verify: bool, readers: Readers
) -> Loaded:
    """Collective: load the checkpoint at `path` in place; meanwhile it is not removed or replaced.

    Args:
        state_dict: to load into.
        path: of the checkpoint, the same on all ranks.
        step: that it must have.
        verify: read all its bytes before any rank uses one; each rank reads a part.
        readers: the ranks that load.

    Returns:
        `extra`, and the `rank_extra` of every rank that saved.
    """
    with open_checkpoint(path, step=step, every_byte=verify, readers=readers) as checkpoint:
        problem = checkpoint.verify()
        if problem is not None:
            with readers.agreed(f"verifying {path}"):
                if readers.is_first:
                    raise problem
        return _load(state_dict, checkpoint)


def load_newest(
    state_dict: dict[str, Any],
    view: ReadOnlyRoot,
    *,
    verify: bool,
    readers: Readers,
    choose: Callable[[int | None, BaseException | None], int | None],
) -> Loaded | None:
    """Collective: as `load_from`, of the newest DCP checkpoint that is whole; logs those that it skips.

    Args:
        state_dict: to load into.
        view: the root.
        verify: as in `load_from`.
        readers: the ranks that load.
        choose: collective; takes the step that the first rank proposes, or its error, and returns it on all ranks.

    Returns:
        None if there is no checkpoint.

    Raises:
        CorruptCheckpointError: there are some, and none is whole.
    """
    candidates = _Candidates(view)
    while True:
        # The lock lasts from the first rank's proposal until all ranks have locked the checkpoint.
        with contextlib.ExitStack() as proposal_lock:
            proposed, error = None, None
            try:
                if readers.is_first:
                    proposed = candidates.propose(proposal_lock)
            except BaseException as caught:  # noqa: BLE001 (the vote raises it again)
                error = caught
            step = choose(proposed, error)
            if step is None:
                return None
            path = view.path / f"dcp-{step}"
            with open_checkpoint(path, step=step, every_byte=verify, readers=readers) as checkpoint:
                problem = checkpoint.verify()
                if problem is None:
                    return _load(state_dict, checkpoint)
        if readers.is_first:
            candidates.skip(step, problem)


class _Candidates:
    """The DCP checkpoints of a root, the newest first, for the rank that proposes one."""

    def __init__(self, view: ReadOnlyRoot) -> None:
        self._view = view
        self._left: list[Checkpoint | Damaged] | None = None
        self._problems: list[str] = []

    def propose(self, lock: contextlib.ExitStack) -> int | None:
        """The step of the next checkpoint, locked until `lock` is closed; None if there never was one.

        Raises:
            CorruptCheckpointError: all were skipped.
        """
        while True:
            if self._left is None:
                whole, damaged = self._view.survey("dcp")
                self._left = sorted([*whole, *damaged], key=lambda one: one.step)
            while self._left:
                one = self._left.pop()
                if isinstance(one, Damaged):
                    problem = CorruptCheckpointError(f"{one.path} is no whole checkpoint: {one.reason}")
                    self.skip(one.step, problem)
                    continue
                # It may have been removed meanwhile.
                with contextlib.suppress(NotFoundError):
                    lock.enter_context(self._view.reading(one.step, "dcp"))
                    return one.step
            if self._problems:
                raise CorruptCheckpointError(
                    f"no DCP checkpoint under {self._view.path} is whole: {'; '.join(self._problems)}. Training does "
                    "not start anew by itself: move them away to do so"
                )
            # If all were removed, then for one that was published since the survey.
            if self._view.latest("dcp") is None:
                return None
            self._left = None

    def skip(self, step: int, problem: CorruptCheckpointError) -> None:
        """Log why this one is not loaded."""
        _logger.error(
            "the DCP checkpoint of step %d cannot be loaded, the one before is tried: %s", step, problem
        )
        self._problems.append(str(problem))


def _load(state_dict: dict[str, Any], checkpoint: OpenCheckpoint) -> Loaded:
    readers = checkpoint.readers
    with readers.agreed(f"reading what {checkpoint.path} holds"):
        rank_extras = RankExtras(checkpoint)
        checkpoint.check({METADATA})
        load = _Load(state_dict, checkpoint.path)
        checkpoint.check(load.files())
        if readers.is_first:
            load.warn_of_empty_mappings()
    with readers.agreed(f"loading {checkpoint.path}"):
        load.run()
    return checkpoint.extra, rank_extras


class _Load:
    """The local steps of `torch.distributed.checkpoint.load`; loading has no others."""

    def __init__(self, state_dict: dict[str, Any], path: Path) -> None:
        if not isinstance(state_dict, dict):
            raise InvalidTypeError(
                f"the state dict is a {type(state_dict).__name__}: give a dict to load into"
            )
        self._target = state_dict
        self._state = plain_state(state_dict)
        self._reader = TensorReader(path)
        self._metadata = _read_metadata(self._reader, path)
        self._path = path
        # An empty state dict loads only `extra` and `rank_extra`.
        if self._state:
            check_fit(flatten_state(self._state), self._metadata, path)
        self._planner = DefaultLoadPlanner()
        self._plan = self._make_plan()

    def _make_plan(self) -> LoadPlan:
        reader, planner = self._reader, self._planner
        reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        planner.set_up_planner(self._state, self._metadata, is_coordinator=False)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        plan = reader.prepare_global_plan(planner.create_global_plan([plan]))[0]
        return planner.finish_plan(plan)

    def warn_of_empty_mappings(self) -> None:
        """Warn of saved values whose place in the state dict is empty: an optimizer before its first step."""
        saved = list((self._metadata.planner_data or {}).values())
        for place in empty_mappings(self._state):
            count = sum(path[: len(place)] == place for path in saved)
            if count:
                _logger.warning(
                    "%d values that %s holds under %r are not loaded: it is empty in the state dict. An optimizer has "
                    "no state before its first step: take the state dict from "
                    "torch.distributed.checkpoint.state_dict.get_state_dict, which makes one",
                    count,
                    self._path,
                    ".".join(map(str, place)),
                )

    def files(self) -> set[str]:
        """The files that `run` reads."""
        places = self._reader.storage_data
        return {places[item.storage_index].relative_path for item in self._plan.items}

    def run(self) -> None:
        with torch.no_grad():
            self._reader.read_data(self._plan, self._planner).wait()
        for name, value in list(self._target.items()):
            if is_stateful(value):
                value.load_state_dict(self._state[name])
            else:
                self._target[name] = self._state[name]


def _read_metadata(reader: TensorReader, path: Path) -> Metadata:
    try:
        metadata: object = reader.read_metadata()
    except (OSError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 (a pickle may fail with anything)
        problem = f"{type(error).__name__}: {error}"
    else:
        if isinstance(metadata, Metadata):
            return metadata
        problem = f"it is a {type(metadata).__name__}"
    raise CorruptCheckpointError(
        f"{path} does not say what it holds: {METADATA} cannot be read ({problem}); it is damaged, or of a version of "
        "torch that this one does not know",
        (METADATA,),
    )
