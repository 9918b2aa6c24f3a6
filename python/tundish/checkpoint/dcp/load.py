"""Loads a DCP checkpoint into a state dict, on any number of ranks.

Invariants: the state dict is not touched before the checkpoint is verified and known to fit. A failure on one rank
fails on all. Pickles are read by `unpickling` alone, before any tensor, and after their checksums were compared (unless
the caller declined, or the checkpoint has none). Files that no save wrote are not read.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import math
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from tundish.checkpoint.dcp.format import METADATA
from tundish.checkpoint.dcp.rank_extra import RankExtras
from tundish.checkpoint.dcp.reader import TensorReader
from tundish.checkpoint.dcp.state import (
    AbsentState,
    FlattenedState,
    Keys,
    absent_states,
    check_can_set,
    check_fit,
    empty_mappings,
    flatten_state,
    is_stateful,
    plain_state,
    set_value,
)
from tundish.checkpoint.dcp.unpickling import UntrustedNameError, names_of, read_object
from tundish.checkpoint.dcp.verify import OpenCheckpoint, lock_folder, open_checkpoint
from tundish.checkpoint.readonly import ReadonlyRoot
from tundish.checkpoint.root import Published, Root, check_step, format_steps, name_of, path_of
from tundish.checkpoint.tensors import tied_names
from tundish.distributed import DEFAULT_TIMEOUT, Voter, same_arguments
from tundish.errors import (
    CorruptCheckpointError,
    InvalidTypeError,
    NotFoundError,
    StateMismatchError,
    format_type,
)

_logger = logging.getLogger("tundish.checkpoint")

# A message names so many parameters.
_MOST_NAMED = 5

# `extra`, and the `rank_extra` of every rank that saved.
Loaded = tuple[dict[str, Any], Mapping[int, Any]]


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """A verified checkpoint before any tensor is read.

    Attributes:
        path: of the checkpoint.
        step: of the checkpoint; None where it was opened by its path.
        paths: the name of each value of the state dict to the keys that lead to it; keys of mappings are text.
        tensors: size, dtype and parts of the values that are tensors, by name.
        read_object: reads a value that is no tensor, by name.
        extra: of its save.
        rank_extras: of each rank that saved, by rank.
        voter: of the ranks that load.
    """

    path: Path
    step: int | None
    paths: Mapping[str, Keys]
    tensors: Mapping[str, TensorStorageMetadata]
    read_object: Callable[[str], Any]
    extra: dict[str, Any]
    rank_extras: Mapping[int, Any]
    voter: Voter


# The state dict to load into, or a function that makes it from what the checkpoint holds; it may refuse that.
Target = dict[str, Any] | Callable[[SavedState], dict[str, Any]]


def load_dcp(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    group: Any = None,
    verify: bool = True,
    trusted: Sequence[type] = (),
    timeout: float = DEFAULT_TIMEOUT.total_seconds(),
) -> Loaded:
    """Collective over `group` (None: all ranks): load the DCP checkpoint at `path` into `state_dict`, in place.

    Args:
        state_dict: as it was saved, or parts of it, with the tensors to load into; on any number of ranks.
        path: of a published checkpoint, which is not removed or replaced meanwhile.
        group: the ranks that load together.
        verify: read all bytes first, each rank a part, and compare their checksums.
        trusted: types of objects in the state dict that are read too, beside those that `Checkpointer.load_dcp` names.
        timeout: seconds that ranks wait for each other.

    Returns:
        `extra`, and the `rank_extra` of every rank that saved, by rank, as `Checkpointer.load_dcp` does.

    Raises:
        NotFoundError: there is no whole checkpoint at `path`.
        CorruptCheckpointError: a file is damaged.
        StateMismatchError: the state dict does not fit. After each of these errors, which all ranks raise, the state
            dict is unchanged, but in two cases: bytes are damaged and `verify` is False, or an object's own
            `load_state_dict` raises, which runs when all tensors are loaded.

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
    with Voter(group, timeout=timeout) as voter:
        with voter.agreed("finding the checkpoint to load"):
            # A link is resolved once.
            folder = Path(os.path.realpath(path_of(path, "path")))
        lock = functools.partial(lock_folder, folder)
        with open_checkpoint(lock, folder.name, step=None, every_byte=verify, voter=voter) as checkpoint:
            return _load_verified(state_dict, checkpoint, trusted)


def load_from_root(
    target: Target,
    root: ReadonlyRoot,
    step: int | None,
    *,
    verify: bool,
    trusted: Sequence[type],
    voter: Voter,
) -> tuple[int, Loaded] | None:
    """Collective: load a checkpoint of `root`, as `Checkpointer.load_dcp` says; returns its step too.

    Returns None, on all ranks, if no step is named and there is no checkpoint.
    """
    what = "choosing the checkpoint to load"
    with voter.agreed(what, same=same_arguments(call="load_dcp", step=repr(step), verify=bool(verify))):
        if step is not None:
            check_step(step)
    reader = root.reader
    if step is not None:
        name = name_of("dcp", step)
        lock = functools.partial(_lock, reader, name)
        with open_checkpoint(lock, name, step=step, every_byte=verify, voter=voter) as checkpoint:
            return step, _load_verified(target, checkpoint, trusted)
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
                return None
            name = name_of("dcp", step)
            lock = functools.partial(_lock, reader, name)
            with open_checkpoint(lock, name, step=step, every_byte=verify, voter=voter) as checkpoint:
                problem = checkpoint.verify()
                if problem is None:
                    return step, _load(target, checkpoint, trusted)
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


@contextlib.contextmanager
def _lock(root: Root, name: str) -> Iterator[Published]:
    """Lock a checkpoint of `root`. If it does not exist, the error lists the steps that do."""
    with contextlib.ExitStack() as stack:
        try:
            published = stack.enter_context(root.lock(name))
        except NotFoundError as error:
            steps = format_steps([one.step for one in root.list() if one.kind == "dcp"])
            raise NotFoundError(
                error.errno, f"does not exist: give the step of a DCP checkpoint ({steps})", error.filename
            ) from None
        yield published


def no_checkpoint(root: Path) -> NotFoundError:
    """The error of a call that needs a checkpoint where there is none."""
    return NotFoundError(
        errno.ENOENT,
        "there is no DCP checkpoint: train from the start, or give the root of an earlier run",
        str(root),
    )


def _load_verified(target: Target, checkpoint: OpenCheckpoint, trusted: Sequence[type]) -> Loaded:
    """Collective: load an open checkpoint."""
    voter, problem = checkpoint.voter, checkpoint.verify()
    if problem is not None:
        with voter.agreed(f"verifying {checkpoint.path}"):
            if voter.is_first:
                raise problem
    return _load(target, checkpoint, trusted)


def _load(target: Target, checkpoint: OpenCheckpoint, trusted: Sequence[type]) -> Loaded:
    voter = checkpoint.voter
    with voter.agreed(f"reading the metadata of {checkpoint.path}"):
        rank_extras = RankExtras(checkpoint)
        checkpoint.check({METADATA})
        load = _Load(checkpoint, names_of(trusted))
        load.prepare(target if isinstance(target, dict) else _made(target, load, rank_extras))
        if voter.is_first:
            load.warn()
    with voter.agreed(f"loading {checkpoint.path}"):
        load.run()
    return checkpoint.extra, rank_extras


def _made(target: Any, load: _Load, rank_extras: RankExtras) -> dict[str, Any]:
    if not callable(target):
        raise InvalidTypeError(f"the state dict is {format_type(target)}: give a dict to load into")
    made: dict[str, Any] = target(load.saved_state(rank_extras))
    return made


class _Load:
    """The local steps of `torch.distributed.checkpoint.load`; loading has no others."""

    def __init__(self, checkpoint: OpenCheckpoint, trusted: frozenset[tuple[str, str]]) -> None:
        self._target: dict[str, Any] = {}
        self._state: dict[str, Any] = {}
        self._checkpoint = checkpoint
        self._path = checkpoint.path
        self._trusted = trusted
        self._reader = TensorReader(checkpoint.published)
        self._metadata = _read_metadata(self._reader, checkpoint)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        self._planner = DefaultLoadPlanner(flatten_state_dict=False)
        self._plan = LoadPlan([])
        # None for an empty state dict, which loads only `extra` and `rank_extra`.
        self._flat: FlattenedState | None = None
        self._absent: list[AbsentState] = []
        # By name: the values that are no tensors.
        self._objects: dict[str, Any] = {}

    def saved_state(self, rank_extras: Mapping[int, Any]) -> SavedState:
        """What the checkpoint holds."""
        about = self._metadata.state_dict_metadata
        known: Mapping[str, Any] = self._metadata.planner_data or {}
        return SavedState(
            path=self._path,
            step=self._checkpoint.step,
            paths={name: known.get(name, (name,)) for name in about},
            tensors={name: one for name, one in about.items() if isinstance(one, TensorStorageMetadata)},
            read_object=self._read_object,
            extra=self._checkpoint.extra,
            rank_extras=rank_extras,
            voter=self._checkpoint.voter,
        )

    def prepare(self, target: dict[str, Any]) -> None:
        """Check that the state dict fits, read everything except tensors, and plan which tensors are read."""
        self._target, self._state = target, plain_state(target)
        if not self._state:
            return
        self._flat = flatten_state(self._state)
        saved = self._metadata.state_dict_metadata
        self._absent = absent_states(self._state, self._flat, saved, self._read_object)
        left_out = frozenset[str]().union(*(absent.names for absent in self._absent))
        wanted = {name: value for name, value in self._flat if name not in left_out}
        check_fit(wanted, self._metadata, self._path)
        tensors = {name: value for name, value in wanted.items() if isinstance(value, torch.Tensor)}
        for name in wanted:
            if name not in tensors:
                check_can_set(self._state, self._flat.structure.paths[name])
        self._objects = {name: self._read_object(name) for name in wanted if name not in tensors}
        for first, *others in tied_names(tensors):
            for other in others:
                self._refuse_untied(first, other)
                # It is the same memory.
                del tensors[other]
        self._planner.set_up_planner(tensors, self._metadata, is_coordinator=False)
        self._plan = self._reader.prepare_local_plan(self._planner.create_local_plan())
        places = self._reader.storage_data
        self._checkpoint.check({places[item.storage_index].relative_path for item in self._plan.items})

    def _refuse_untied(self, first: str, other: str) -> None:
        """Refuse two names of one tensor under which the checkpoint has different values: one of them would be lost.

        Each rank compares a part of the values.
        """
        one, two = (self._metadata.state_dict_metadata[name] for name in (first, other))
        voter, places = self._checkpoint.voter, self._reader.storage_data
        is_same = False
        if isinstance(one, TensorStorageMetadata) and isinstance(two, TensorStorageMetadata):
            chunks = {tuple(chunk.offsets): chunk.sizes for chunk in one.chunks}
            is_same = one.properties.dtype == two.properties.dtype and chunks == {
                tuple(chunk.offsets): chunk.sizes for chunk in two.chunks
            }
            own = one.chunks[voter.index :: len(voter.ranks)]
            is_same = is_same and all(
                self._reader.are_equal(
                    *(places[MetadataIndex(name, chunk.offsets)] for name in (first, other))
                )
                for chunk in own
            )
        if not is_same:
            raise StateMismatchError(
                f"{first!r} and {other!r} are one tensor here, and have different values in the checkpoint "
                f"{self._path}: load into a model that does not tie them (transformers: tie_word_embeddings=False), "
                "or remove one of the two from the state dict"
            )

    def warn(self) -> None:
        """Warn of a checkpoint of another user, and of state that is not loaded."""
        if self._checkpoint.published.is_of_another_user(METADATA):
            _logger.warning(
                "%s belongs to another user: load only checkpoints of users whom you trust",
                self._path / METADATA,
            )
        if self._absent:
            _logger.warning(
                "%s has no optimizer state of %d parameters, which got no gradient before it was saved; here they have "
                "none either: %s",
                self._path,
                len(self._absent),
                ", ".join(str(absent.parameter) for absent in self._absent[:_MOST_NAMED]),
            )
        saved = list((self._metadata.planner_data or {}).values())
        for place in empty_mappings(self._state):
            written = tuple(map(str, place))
            count = sum(tuple(map(str, path[: len(place)])) == written for path in saved)
            if count:
                _logger.warning(
                    "%d values that %s holds under %r are not loaded: it is empty in the state dict. An optimizer has "
                    "no state before its first step: take the state dict from "
                    "torch.distributed.checkpoint.state_dict.get_state_dict, which makes one",
                    count,
                    self._path,
                    ".".join(written),
                )

    def run(self) -> None:
        """Load everything into the state dict."""
        with torch.no_grad():
            try:
                self._reader.read_data(self._plan, self._planner).wait()
            except (OSError, MemoryError):
                raise
            except Exception as error:
                raise CorruptCheckpointError(
                    f"the tensors in {self._path} cannot be read ({type(error).__name__}), and some of them are loaded "
                    "already: without verify=False all bytes are compared first, and damaged files are named"
                ) from error
            if self._flat is not None:
                for name, value in self._objects.items():
                    set_value(self._state, self._flat.structure.paths[name], value)
                for absent in self._absent:
                    absent.reset(self._flat, self._state)
        for name, value in list(self._target.items()):
            if is_stateful(value):
                value.load_state_dict(self._state[name])
            else:
                self._target[name] = self._state[name]

    def _read_object(self, name: str) -> Any:
        """A saved value that is no tensor."""
        place = self._reader.storage_data[MetadataIndex(name)]
        self._checkpoint.check({place.relative_path})
        with self._checkpoint.published.open(place.relative_path) as file:
            file.seek(place.offset)
            data = file.read(place.length)
        try:
            return read_object(data, self._trusted)
        except UntrustedNameError as error:
            raise InvalidTypeError(
                f"{name!r} in {self._path} is an object whose pickle names {error.name}: where you trust those who "
                f"can write there, load it with trusted=[{error.name}]"
            ) from None
        except (OSError, MemoryError):
            raise
        except Exception as error:
            raise CorruptCheckpointError(
                f"{name!r} in {self._path} cannot be read ({type(error).__name__}: {error}): it is damaged, or not a "
                "plain object",
                (place.relative_path,),
            ) from error


def _read_metadata(reader: TensorReader, checkpoint: OpenCheckpoint) -> Metadata:
    problem: str | None
    try:
        metadata: object = reader.read_metadata()
        problem = f"it is {format_type(metadata)}"
        if isinstance(metadata, Metadata):
            problem = _problem_of(metadata, {name: size for name, size, _ in checkpoint.files})
            if problem is None:
                return metadata
    except (OSError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 (a pickle, and what was in it, may fail with anything)
        problem = f"{type(error).__name__}: {error}"
    raise CorruptCheckpointError(
        f"{checkpoint.path} cannot be loaded: its {METADATA} cannot be read ({problem}); it is damaged, or of a "
        "version of torch that this one does not know",
        (METADATA,),
    )


def _problem_of(metadata: Metadata, sizes: Mapping[str, int]) -> str | None:
    """Describe what is wrong with a checkpoint's metadata; None if nothing is. Malformed metadata may raise any error.

    Args:
        metadata: as it was read.
        sizes: bytes of each file of the checkpoint.
    """
    paths: Any = metadata.planner_data or {}
    for path in paths.values():
        if not isinstance(path, tuple):
            return f"it holds the path {path!r}"
    for name, about in metadata.state_dict_metadata.items():
        places = [MetadataIndex(name)]
        if isinstance(about, TensorStorageMetadata):
            dtype: Any = about.properties.dtype
            if not isinstance(dtype, torch.dtype):
                return f"{name!r} has the dtype {dtype!r}"
            if not _covers(about):
                return f"the parts of {name!r} do not make up its shape {tuple(about.size)}"
            places = [MetadataIndex(name, chunk.offsets) for chunk in about.chunks]
        for index in places:
            place = metadata.storage_data.get(index)
            if place is None:
                return f"it does not say where {name!r} lies"
            # Files that the checkpoint does not have are refused by name when they are read.
            end = sizes.get(place.relative_path, sys.maxsize)
            start, length = operator.index(place.offset), operator.index(place.length)
            if not 0 <= start <= start + length <= end:
                return f"{name!r} lies outside of the file {place.relative_path!r}"
    return None


def _covers(tensor: TensorStorageMetadata) -> bool:
    """Whether the chunks of a tensor cover each element once."""
    shape, volume = tuple(tensor.size), 0
    boxes: list[tuple[tuple[int, int], ...]] = []
    for chunk in tensor.chunks:
        box = tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        if not all(0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=True)):
            return False
        if size := math.prod(stop - start for start, stop in box):
            boxes.append(box)
            volume += size
    if volume != math.prod(shape):
        return False
    # Along the dimension with the most cuts: only boxes that are open there can overlap with the next one.
    along = max(range(len(shape)), key=lambda one: len({box[one] for box in boxes}), default=None)
    if along is None:
        return len(boxes) == 1
    open_boxes: list[tuple[tuple[int, int], ...]] = []
    for box in sorted(boxes, key=lambda one: one[along]):
        open_boxes = [other for other in open_boxes if other[along][1] > box[along][0]]
        for other in open_boxes:
            if all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True)):
                return False
        open_boxes.append(box)
    return True
