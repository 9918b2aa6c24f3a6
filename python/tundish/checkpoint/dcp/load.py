"""Loads a DCP checkpoint into a state dict, on any number of ranks.

Invariants: the state dict is not touched before the checkpoint is verified and known to fit. A failure on one rank
fails on all. Only what torch's own reader unpickles is unpickled, after its checksum was compared (unless the caller
declined, or the checkpoint has none). Files that no save wrote are not read.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from tundish.checkpoint.dcp.format import METADATA
from tundish.checkpoint.dcp.rank_extra import RankExtras
from tundish.checkpoint.dcp.reader import TensorReader
from tundish.checkpoint.dcp.state import check_fit, empty_mappings, flatten_state, is_stateful, plain_state
from tundish.checkpoint.dcp.verify import OpenCheckpoint, open_checkpoint
from tundish.checkpoint.publish.kinds_and_steps import check_step
from tundish.checkpoint.publish.readonly_root import ReadonlyRoot
from tundish.distributed import DEFAULT_TIMEOUT, Voter, same_arguments
from tundish.errors import CorruptCheckpointError, InvalidTypeError, NotFoundError, format_type

_logger = logging.getLogger("tundish.checkpoint")

# `extra`, and the `rank_extra` of every rank that saved.
Loaded = tuple[dict[str, Any], Mapping[int, Any]]


def load_dcp(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    group: Any = None,
    verify: bool = True,
    timeout: float = DEFAULT_TIMEOUT.total_seconds(),
) -> Loaded:
    """Collective over `group` (None: all ranks): load the DCP checkpoint at `path` into `state_dict`, in place.

    Args:
        state_dict: as it was saved, or parts of it, with the tensors to load into; on any number of ranks.
        path: of a published checkpoint, which is not removed or replaced meanwhile.
        group: the ranks that load together.
        verify: read all bytes first, each rank a part, and compare their checksums.
        timeout: seconds that ranks wait for each other.

    Returns:
        `extra`, and the `rank_extra` of every rank that saved, by rank, as `Checkpointer.load_dcp` does.

    Raises:
        NotFoundError: there is no whole checkpoint at `path`.
        CorruptCheckpointError: a file is damaged.
        StateMismatchError: the state dict does not fit. After each of these errors, which all ranks raise, the state
            dict is unchanged.

    Example:
        >>> import torch
        >>> import tundish as td
        >>> with td.Checkpointer("loaded") as checkpointer:
        ...     save = checkpointer.save_dcp(1, {"w": torch.ones(2)}, extra={"epoch": 3})
        >>> state = {"w": torch.zeros(2)}
        >>> extra, _ = td.checkpoint.load_dcp(state, save.result())
        >>> state["w"], extra
        (tensor([1., 1.]), {'epoch': 3})
    """
    # A link is resolved once.
    folder = Path(os.path.realpath(path))
    with Voter(group, timeout=timeout) as voter:
        return _load_verified(state_dict, folder, None, verify=verify, voter=voter)


def load_from_root(
    state_dict: dict[str, Any], root: ReadonlyRoot, step: int | None, *, verify: bool, voter: Voter
) -> Loaded:
    """Collective: load a checkpoint of `root`, as `Checkpointer.load_dcp` says."""
    what = "choosing the checkpoint to load"
    with voter.agreed(what, same=same_arguments(call="load_dcp", step=repr(step), verify=bool(verify))):
        if step is not None:
            check_step(step)
    if step is not None:
        return _load_verified(state_dict, root.path / f"dcp-{step}", step, verify=verify, voter=voter)
    candidates = _CandidateCheckpoints(root)
    while True:
        # The lock lasts from the first rank's proposal until all ranks have locked the checkpoint.
        with contextlib.ExitStack() as proposal_lock:
            proposed, error = None, None
            try:
                if voter.is_first:
                    proposed = candidates.propose(proposal_lock)
            except BaseException as caught:  # noqa: BLE001 (the vote raises it again)
                error = caught
            step = json.loads(voter.broadcast(json.dumps(proposed), error, what=what))
            if step is None:
                # On all ranks: a first start is not the failure of one rank.
                raise NotFoundError(
                    errno.ENOENT,
                    "there is no DCP checkpoint: train from the start, or give the root of an earlier run",
                    str(root.path),
                )
            path = root.path / f"dcp-{step}"
            with open_checkpoint(path, step=step, every_byte=verify, voter=voter) as checkpoint:
                problem = checkpoint.verify()
                if problem is None:
                    return _load(state_dict, checkpoint)
        candidates.skip(step, problem, is_logged=voter.is_first)


class _CandidateCheckpoints:
    """The DCP checkpoints of a root that were not skipped, for the rank that proposes one.

    - It proposes the newest whole checkpoint. Damaged ones above it are skipped, with an error in the log.
    - A proposed checkpoint that fails its verification is skipped, and the one before it is proposed.
    - If all were skipped, loading fails: training must not start anew by itself.
    - If there is none at all, nothing is proposed: this is a first start.
    """

    def __init__(self, root: ReadonlyRoot) -> None:
        self._root = root
        self._skipped: dict[int, str] = {}

    def propose(self, lock: contextlib.ExitStack) -> int | None:
        """The newest step, locked until `lock` is closed; None if there is no checkpoint.

        Raises:
            CorruptCheckpointError: all were skipped.
        """
        while True:
            whole, damaged = self._root.survey("dcp")
            newest = max(
                (checkpoint.step for checkpoint in whole if checkpoint.step not in self._skipped),
                default=None,
            )
            for checkpoint in reversed(damaged):
                if checkpoint.step not in self._skipped and (newest is None or checkpoint.step > newest):
                    self.skip(
                        checkpoint.step,
                        CorruptCheckpointError(
                            f"{checkpoint.path} is not a whole checkpoint: {checkpoint.reason}"
                        ),
                    )
            if newest is None and self._skipped:
                raise CorruptCheckpointError(
                    f"no DCP checkpoint under {self._root.path} is whole: {'; '.join(self._skipped.values())}. "
                    "To train from the start, move them away"
                )
            # It may have been removed meanwhile, for a newer one.
            with contextlib.suppress(NotFoundError):
                if newest is not None:
                    lock.enter_context(self._root.reading(newest, "dcp"))
                return newest

    def skip(self, step: int, problem: CorruptCheckpointError, *, is_logged: bool = True) -> None:
        """Go on without this one, and log why."""
        if is_logged:
            _logger.error(
                "the DCP checkpoint of step %d cannot be loaded, the one before is tried: %s", step, problem
            )
        self._skipped[step] = str(problem)


def _load_verified(
    state_dict: dict[str, Any], path: Path, step: int | None, *, verify: bool, voter: Voter
) -> Loaded:
    """Collective: load the checkpoint at `path`, which must have `step` where one is given."""
    with open_checkpoint(path, step=step, every_byte=verify, voter=voter) as checkpoint:
        problem = checkpoint.verify()
        if problem is not None:
            with voter.agreed(f"verifying {path}"):
                if voter.is_first:
                    raise problem
        return _load(state_dict, checkpoint)


def _load(state_dict: dict[str, Any], checkpoint: OpenCheckpoint) -> Loaded:
    voter = checkpoint.voter
    with voter.agreed(f"reading the metadata of {checkpoint.path}"):
        rank_extras = RankExtras(checkpoint)
        checkpoint.check({METADATA})
        load = _Load(state_dict, checkpoint.path)
        checkpoint.check(load.files())
        if voter.is_first:
            load.warn_of_empty_mappings()
    with voter.agreed(f"loading {checkpoint.path}"):
        load.run()
    return checkpoint.extra, rank_extras


class _Load:
    """The local steps of `torch.distributed.checkpoint.load`; loading has no others."""

    def __init__(self, state_dict: dict[str, Any], path: Path) -> None:
        if not isinstance(state_dict, dict):
            raise InvalidTypeError(f"the state dict is {format_type(state_dict)}: give a dict to load into")
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
        problem = f"it is {format_type(metadata)}"
    raise CorruptCheckpointError(
        f"{path} cannot be loaded: its {METADATA} cannot be read ({problem}); it is damaged, or of a version of "
        "torch that this one does not know",
        (METADATA,),
    )
