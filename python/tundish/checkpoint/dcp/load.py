"""Loading a DCP checkpoint into a state dict, on whatever ranks there are.

What always holds: nothing of the state dict is touched before the checkpoint is known to be whole and to fit; what
fails on one rank fails on all; of the files only what torch's own reader unpickles is unpickled, after its checksum
was compared; what no save wrote into the checkpoint is not read at all.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from tundish._native import CheckpointReadLock, verify_folder
from tundish.checkpoint.dcp.leaves import Leaves, is_stateful, leaves_of, plain_state
from tundish.checkpoint.dcp.plan import rank_extra_name
from tundish.checkpoint.dcp.reader import Reader
from tundish.checkpoint.dcp.values import from_json
from tundish.checkpoint.reading import MANIFEST, Damaged, ReadOnlyRoot, held, is_file, tell_unsummed
from tundish.checkpoint.retention import Checkpoint
from tundish.distributed import Voter
from tundish.errors import CorruptCheckpointError, InvalidTypeError, NotFoundError, StateMismatchError
from tundish.waiting import was_let_go

__all__ = ["load_from", "newest_whole", "read_lock"]

_logger = logging.getLogger("tundish.checkpoint")

# More than any job has; what says that more ranks saved is damaged, and not counted through.
_MOST_RANKS = 1 << 20
_NAMED = 5


def load_from(
    state_dict: dict[str, Any],
    path: Path,
    *,
    step: int | None = None,
    verify: bool,
    is_first: bool,
    voter: Voter,
    timeout: float,
) -> tuple[dict[str, Any], dict[int, Any]]:
    """Collective: load the checkpoint at `path`, in place, kept from being removed or replaced until it is loaded.

    Args:
        state_dict: to load into.
        path: of the checkpoint, the same one on all ranks.
        step: of which it has to be.
        verify: whether all its bytes are read before any rank uses one; the first rank does it for all.
        is_first: whether this rank is the first.
        voter: of the ranks that load.
        timeout: seconds that they wait for each other.

    Returns `extra`, and the `rank_extra` of every rank that saved.
    """
    with contextlib.ExitStack() as stack:
        with _voted(voter, f"opening {path.name}", timeout) as same:
            lock = stack.enter_context(held(read_lock(path)))
            about, checksum = _about(lock, step)
            # Another one may have come under the name between two ranks' looks at it.
            same(checksum)
        with voter.agreed(f"verifying {path}", timeout=timeout):
            if verify and is_first:
                _verify(path)
        with voter.agreed(f"reading what {path} holds", timeout=timeout):
            rank_extras = _rank_extras_of(path, _recorded(path), about["world_size"])
            load = _Load(state_dict, path)
            if is_first:
                load.tell_what_is_left_out()
        with voter.agreed(f"loading {path}", timeout=timeout):
            load.run()
    return about["extra"], rank_extras


@contextlib.contextmanager
def _voted(voter: Voter, what: str, timeout: float) -> Iterator[Callable[[str], None]]:
    """A block of fallible work that ends in a vote; calls what it yields with what has to be equal on all ranks."""
    error: BaseException | None = None
    same = [what]
    try:
        yield same.append
    except BaseException as caught:
        if was_let_go(caught):
            raise
        error = caught
    voter.vote(error, what=what, same=", ".join(same), timeout=timeout)


def newest_whole(view: ReadOnlyRoot, *, verify: bool, kept: contextlib.ExitStack) -> int | None:
    """The step of the newest DCP checkpoint that is whole, None without any; those passed over are logged.

    It is neither removed nor replaced until `kept` is closed.

    Raises `CorruptCheckpointError` where there are some and none is whole.
    """
    whole, damaged = view.survey("dcp")
    problems: list[str] = []
    found: list[Checkpoint | Damaged] = [*whole, *damaged]
    for one in sorted(found, key=lambda one: one.step, reverse=True):
        try:
            with contextlib.ExitStack() as stack:
                if isinstance(one, Damaged):
                    raise CorruptCheckpointError(f"{one.path} is no whole checkpoint: {one.reason}")
                path = stack.enter_context(view.reading(one.step, "dcp"))
                if verify:
                    _verify(path)
                kept.enter_context(stack.pop_all())
            return one.step
        except NotFoundError:
            # It was removed meanwhile.
            continue
        except CorruptCheckpointError as error:
            _logger.error(
                "the DCP checkpoint of step %d cannot be loaded, the one before is tried: %s", one.step, error
            )
            problems.append(str(error))
    if problems:
        raise CorruptCheckpointError(
            f"no DCP checkpoint under {view.path} is whole: {'; '.join(problems)}. Nothing starts anew by itself: "
            "move them away to do so"
        )
    return None


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
        self._metadata = self._reader.read_metadata()
        self._path = path
        # An empty one asks for what was saved beside the tensors.
        if self._state:
            _check_fit(leaves_of(self._state), self._metadata, path)

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
    if _sort(saved) > _sort(tensor.dtype):
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


def read_lock(path: Path) -> CheckpointReadLock:
    """A lock on the checkpoint at `path`.

    Raises `NotFoundError` where none is, or where it is only being written.
    """
    if path.name.startswith(".") or path.is_symlink() or not is_file(path / MANIFEST):
        raise NotFoundError(
            errno.ENOENT,
            f"no whole checkpoint is here: what a save under way or cut short leaves has no {MANIFEST}, and "
            "what torch saved by itself is read by torch.distributed.checkpoint.load",
            str(path),
        )
    return CheckpointReadLock(path)


def _about(lock: CheckpointReadLock, step: int | None) -> tuple[dict[str, Any], str]:
    """What a whole checkpoint says of itself, and the checksum of that."""
    said, checksum = lock.describe()
    path, kind, world_size = lock.path, said["kind"], said["world_size"]
    extra = {} if said["extra"] is None else said["extra"]
    if kind != "dcp":
        raise StateMismatchError(f"{path} is a checkpoint of kind {kind!r}: load_dcp reads kind 'dcp'")
    if step is not None and said["step"] != step:
        raise CorruptCheckpointError(
            f"{path} is the checkpoint of step {said['step']}: rename it back", (MANIFEST,)
        )
    if world_size is None or not 0 < world_size <= _MOST_RANKS:
        raise CorruptCheckpointError(f"{path} says that {world_size} ranks saved it", (MANIFEST,))
    if not isinstance(extra, dict):
        raise CorruptCheckpointError(
            f"{path} holds as extra what no save gives it: {str(extra)[:100]}", (MANIFEST,)
        )
    return {"world_size": world_size, "extra": extra}, checksum


def _verify(path: Path) -> None:
    """Read every byte of the checkpoint at `path` again; what is not its own is told and left alone.

    Raises `CorruptCheckpointError` where one of its own files is not as it was saved.
    """
    try:
        tell_unsummed(path, verify_folder(path))
    except CorruptCheckpointError as error:
        # A manifest that is damaged is found before all else, and then alone.
        if MANIFEST in error.paths or not _recorded(path).isdisjoint(error.paths):
            raise
        _logger.warning(
            "%s holds files that no save wrote, which are not read: %s", path, "; ".join(error.paths)
        )


def _recorded(path: Path) -> set[str]:
    """The files of the checkpoint at `path`, whose manifest is as it was written."""
    return {file["name"] for file in json.loads((path / MANIFEST).read_bytes())["files"]}


def _rank_extras_of(path: Path, recorded: set[str], world_size: int) -> dict[int, Any]:
    extras: dict[int, Any] = dict.fromkeys(range(world_size))
    for index in extras:
        name = rank_extra_name(index)
        if name not in recorded:
            continue
        try:
            extras[index] = from_json((path / name).read_bytes())
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise CorruptCheckpointError(f"{path / name} is damaged: {error!r}", (name,)) from None
    return extras


def _empty_places(state: Mapping[str, Any], place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to the empty mappings in `state`."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            if not value:
                yield (*place, key)
            yield from _empty_places(value, (*place, key))
