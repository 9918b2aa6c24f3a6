"""Loading a DCP checkpoint into a state dict, on whatever ranks there are.

What always holds: nothing of the state dict is touched before the checkpoint is known to be whole and to fit; what
fails on one rank fails on all; of the files only what torch's own reader unpickles is unpickled, after its checksum
was compared, unless the caller wants none compared or the checkpoint has none; what no save wrote into the checkpoint
is not read at all.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.tensor import DTensor

from tundish.checkpoint.dcp.leaves import Leaves, is_stateful, leaves_of, plain_state
from tundish.checkpoint.dcp.opened import Opened, Readers, opened
from tundish.checkpoint.dcp.rankextras import RankExtras
from tundish.checkpoint.dcp.reader import Reader
from tundish.checkpoint.publish.read_only_root import Damaged, ReadOnlyRoot
from tundish.checkpoint.publish.retention import Checkpoint
from tundish.errors import CorruptCheckpointError, InvalidTypeError, NotFoundError, StateMismatchError

__all__ = ["Loaded", "load_from", "load_newest"]

_logger = logging.getLogger("tundish.checkpoint")

_NAMED = 5
# Where torch says what a checkpoint holds.
_METADATA = ".metadata"

Loaded = tuple[dict[str, Any], Mapping[int, Any]]


def load_from(
    state_dict: dict[str, Any], path: Path, *, step: int | None = None, verify: bool, readers: Readers
) -> Loaded:
    """Collective: load the checkpoint at `path`, in place, kept from being removed or replaced until it is loaded.

    Args:
        state_dict: to load into.
        path: of the checkpoint, the same one on all ranks.
        step: of which it has to be.
        verify: whether all its bytes are read before any rank uses one; each rank reads a part of them.
        readers: the ranks that load.

    Returns `extra`, and the `rank_extra` of every rank that saved.
    """
    with opened(path, step=step, every_byte=verify, readers=readers) as checkpoint:
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
    """Collective: as `load_from`, the newest DCP checkpoint that is whole; those passed over are logged.

    `choose`: collective; takes the step that the first rank proposes, or why it has none, and gives it on all ranks.

    Returns None without any. Raises `CorruptCheckpointError` where there are some and none is whole.
    """
    candidates = _Candidates(view)
    while True:
        # It stays from when the first rank sees it until all ranks hold it.
        with contextlib.ExitStack() as kept:
            proposed, error = None, None
            try:
                if readers.is_first:
                    proposed = candidates.propose(kept)
            except BaseException as caught:  # noqa: BLE001 (the vote raises it again)
                error = caught
            step = choose(proposed, error)
            if step is None:
                return None
            path = view.path / f"dcp-{step}"
            with opened(path, step=step, every_byte=verify, readers=readers) as checkpoint:
                problem = checkpoint.verify()
                if problem is None:
                    return _load(state_dict, checkpoint)
        if readers.is_first:
            candidates.pass_over(step, problem)


class _Candidates:
    """The DCP checkpoints of a root from the newest on, for the rank that chooses one of them."""

    def __init__(self, view: ReadOnlyRoot) -> None:
        self._view = view
        self._left: list[Checkpoint | Damaged] | None = None
        self._problems: list[str] = []

    def propose(self, kept: contextlib.ExitStack) -> int | None:
        """The step of the next one that is there, and stays until `kept` is closed; None where there never was any.

        Raises `CorruptCheckpointError` where all were passed over.
        """
        while True:
            if self._left is None:
                whole, damaged = self._view.survey("dcp")
                self._left = sorted([*whole, *damaged], key=lambda one: one.step)
            while self._left:
                one = self._left.pop()
                if isinstance(one, Damaged):
                    problem = CorruptCheckpointError(f"{one.path} is no whole checkpoint: {one.reason}")
                    self.pass_over(one.step, problem)
                    continue
                # Else it was removed meanwhile.
                with contextlib.suppress(NotFoundError):
                    kept.enter_context(self._view.reading(one.step, "dcp"))
                    return one.step
            if self._problems:
                raise CorruptCheckpointError(
                    f"no DCP checkpoint under {self._view.path} is whole: {'; '.join(self._problems)}. Nothing starts "
                    "anew by itself: move them away to do so"
                )
            # Where all were removed, then for one that was published since they were looked for.
            if self._view.latest("dcp") is None:
                return None
            self._left = None

    def pass_over(self, step: int, problem: CorruptCheckpointError) -> None:
        """Say that this one is not loaded, and why."""
        _logger.error(
            "the DCP checkpoint of step %d cannot be loaded, the one before is tried: %s", step, problem
        )
        self._problems.append(str(problem))


def _load(state_dict: dict[str, Any], checkpoint: Opened) -> Loaded:
    readers = checkpoint.readers
    with readers.agreed(f"reading what {checkpoint.path} holds"):
        rank_extras = RankExtras(checkpoint)
        checkpoint.check({_METADATA})
        load = _Load(state_dict, checkpoint.path)
        checkpoint.check(load.files())
        if readers.is_first:
            load.tell_what_is_left_out()
    with readers.agreed(f"loading {checkpoint.path}"):
        load.run()
    return checkpoint.extra, rank_extras


class _Load:
    """The steps of `torch.distributed.checkpoint.load` that each rank does for itself; there are no others."""

    def __init__(self, state_dict: dict[str, Any], path: Path) -> None:
        if not isinstance(state_dict, dict):
            raise InvalidTypeError(
                f"the state dict is a {type(state_dict).__name__}: give a dict to load into"
            )
        self._target = state_dict
        self._state = plain_state(state_dict)
        self._reader = Reader(path)
        self._metadata = _metadata_of(self._reader, path)
        self._path = path
        # An empty one asks for what was saved beside the tensors.
        if self._state:
            _check_fit(leaves_of(self._state), self._metadata, path)
        self._planner = DefaultLoadPlanner()
        self._plan = self._planned()

    def _planned(self) -> LoadPlan:
        reader, planner = self._reader, self._planner
        reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        planner.set_up_planner(self._state, self._metadata, is_coordinator=False)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        plan = reader.prepare_global_plan(planner.create_global_plan([plan]))[0]
        return planner.finish_plan(plan)

    def tell_what_is_left_out(self) -> None:
        """Warn of what was saved and finds an empty mapping in its place: an optimizer before its first step."""
        saved = list((self._metadata.planner_data or {}).values())
        for place in _empty_places(self._state):
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
        """Those that `run` reads."""
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


def _metadata_of(reader: Reader, path: Path) -> Metadata:
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
        f"{path} does not say what it holds: {_METADATA} cannot be read ({problem}); it is damaged, or of a version of "
        "torch that this one does not know",
        (_METADATA,),
    )


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
        elif isinstance(there, TensorStorageMetadata):
            problems.extend(f"{name!r} {problem}" for problem in _misfits(value, there.properties.dtype))
    if problems:
        more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
        raise StateMismatchError(
            f"the state dict does not fit the checkpoint {path}: {'; '.join(problems[:_NAMED])}{more}. Give it as it "
            "was saved, or leave out what is not to be loaded"
        )


def _misfits(tensor: torch.Tensor, saved: torch.dtype) -> Iterator[str]:
    """Why values of the dtype `saved` cannot be copied into `tensor`, or would lose what they are."""
    if _sort(saved) > _sort(tensor.dtype) or _is_cut(saved, tensor.dtype):
        yield f"is {tensor.dtype} here and {saved} in it, which it cannot hold"
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    is_dense = local.layout is torch.strided
    if is_dense and any(
        step == 0 and size > 1 for step, size in zip(local.stride(), local.shape, strict=True)
    ):
        yield "is expanded here, so that its elements share memory: give a clone() of it"


def _sort(dtype: torch.dtype) -> int:
    """Truth values, integers, floating-point numbers, complex ones: each holds those before it, but for rounding."""
    if dtype is torch.bool:
        return 0
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1


def _is_cut(saved: torch.dtype, here: torch.dtype) -> bool:
    """Whether whole numbers of the one dtype can be beyond those of the other, which torch would wrap around."""
    # Not all kinds of numbers tell their range.
    if saved is here or _sort(saved) != 1 or _sort(here) != 1:
        return False
    there, own = torch.iinfo(saved), torch.iinfo(here)
    return there.min < own.min or there.max > own.max


def _empty_places(state: Mapping[str, Any], place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to the empty mappings in `state`."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            if not value:
                yield (*place, key)
            yield from _empty_places(value, (*place, key))
