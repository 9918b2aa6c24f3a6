"""`DcpSave`, one DCP save of one rank: from the arguments of `save_dcp` to a `WritePlan`.

Invariants:
    - Making one is local, and raises everything that is refused early.
    - Each rank stages only the tensors that it writes, each with one copy into the image of its file.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import marshal
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan as TorchPlan
from torch.distributed.checkpoint.planner import SavePlanner as TorchPlanner
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from tundish.checkpoint.copies import optimizers_of
from tundish.checkpoint.dcp.format import METADATA, FileLayout, rank_extra_name, shard_name
from tundish.checkpoint.dcp.plan import RankShare, SavePlanner, local_values_of, make_metadata
from tundish.checkpoint.dcp.rank_extra import to_json
from tundish.checkpoint.dcp.state import flatten_state
from tundish.checkpoint.dcp.unpickling import UntrustedNameError, names_of, read_object
from tundish.checkpoint.replicas import digest_of
from tundish.checkpoint.tensors import any_on_cuda, check_memories, local_of
from tundish.checkpoint.write_plan import SmallFile, WritePlan
from tundish.distributed import VoteId
from tundish.errors import InvalidTypeError, format_type

_SIMPLE = (int, float, str, bytes, type(None))


class DcpSave:
    """A `SavePlan` of a state dict.

    Args:
        planner: of the ranks that save together.
        state_dict, extra, rank_extra, trusted, staging, optimizer: as `Checkpointer.save_dcp` takes them.

    Raises:
        InvalidInputError: a layout cannot be saved, a name is invalid, there is nothing to save, or a lazy staging has
            no optimizer.
        InvalidTypeError: a value cannot be saved, `extra` is no JSON, or `rank_extra` contains another type.
    """

    def __init__(
        self,
        planner: SavePlanner,
        state_dict: Mapping[str, Any],
        *,
        extra: Mapping[str, Any] | None = None,
        rank_extra: Any = None,
        trusted: Sequence[type] = (),
        staging: Literal["eager", "lazy"] = "eager",
        optimizer: Any = None,
    ) -> None:
        self._optimizers = optimizers_of(staging, optimizer)
        extra_text = _check_extra(extra)
        self._rank_extra = b"" if rank_extra is None else to_json(rank_extra, "rank_extra")
        self._state = flatten_state(state_dict, planner.known_structure)
        self._planner = planner
        self._trusted = names_of(trusted)
        self._pickles: dict[int, bytes] = {}
        self._sources: list[torch.Tensor] = []
        # None where the structure of the state dict is new, until the ranks have planned it.
        self._part = planner.known_part(self._state)
        self._layout: FileLayout | None = None
        if self._part is None:
            self._rank_values = local_values_of(self._state, planner.rank)
            self._pickle(
                number for number, value in enumerate(self._rank_values) if value and not value.dtype
            )
        else:
            self._rank_values = self._part.local_values
        self.fingerprint = (
            f"staging {staging}, extra (what differs by rank goes into rank_extra) {extra_text}"
        )

    @property
    def needs_ranks(self) -> bool:
        """Whether the structure of the state dict is new to this rank."""
        return self._part is None

    @property
    def replicas(self) -> Mapping[str, str]:
        """Hashes of the values that other ranks hold too, by a name for these ranks; none for a new structure."""
        shared = {} if self._part is None else self._part.shared
        return {
            name: digest_of([self._state.values[number] for number in numbers])
            for name, numbers in shared.items()
        }

    def agree(
        self,
        vote: VoteId,  # noqa: ARG002 (the planner votes by itself)
        *,
        any_needs: bool,
        do_replicas_differ: bool,
    ) -> bool:
        """Collective where a rank needs it, or replicas differ: plan what each rank saves. Returns whether it did."""
        if any_needs or do_replicas_differ:
            self._part, self._layout = self._planner.plan(self._state, self._rank_values), None
            return True
        return False

    def write_plan(self) -> WritePlan:
        """This rank's part of the state, as its file; after `agree` where the structure is new."""
        layout, part, index = self._file_layout(), self._planned_part(), self._planner.index
        objects = [self._pickles[number] for number in part.objects]
        file = layout.file(shard_name(index), self._sources, self._names(part.tensors), objects)
        rank_extra = SmallFile(rank_extra_name(index), self._rank_extra)
        return WritePlan(
            files=[file] if layout.size else [],
            small_files=[rank_extra] if self._rank_extra else [],
            late_files=None if part.files is None else functools.partial(_late_files, part),
            # The lengths of the objects, for `.metadata`.
            note=json.dumps(layout.object_lengths),
            optimizers=self._optimizers,
            is_pinned=any_on_cuda(self._sources),
            checkpoint_bytes=0 if part.files is None else part.files.total_bytes,
        )

    def release(self) -> None:
        """Nothing is open."""

    def _planned_part(self) -> RankShare:
        if self._part is None:
            raise RuntimeError("used before it was prepared")
        return self._part

    def _file_layout(self) -> FileLayout:
        """The layout of this rank's file; a file with the lengths of the last save has its layout."""
        if self._layout is None:
            part = self._planned_part()
            self._pickle(part.objects)
            lengths = [len(self._pickles[number]) for number in part.objects]
            if part.layout is None or part.layout.object_lengths != lengths:
                part.layout = FileLayout((value.block for value in part.values(part.tensors)), lengths)
            self._sources = [local_of(self._state.values[number]) for number in part.tensors]
            # The memory of a tensor may be gone since its last save, which its structure does not show.
            check_memories(self._names(part.tensors), self._sources)
            self._layout = part.layout
        return self._layout

    def _pickle(self, numbers: Iterable[int]) -> None:
        """Pickle values that are no tensors, equal immutable ones once."""
        names, known = list(self._state.structure.paths), dict[Any, bytes]()
        for number in numbers:
            value = self._state.values[number]
            key = (type(value), marshal.dumps(value, 2)) if type(value) in _SIMPLE else number
            if key not in known:
                known[key] = _pickled(names[number], value, self._trusted)
            self._pickles[number] = known[key]

    def _names(self, numbers: Sequence[int]) -> list[str]:
        names = list(self._state.structure.paths)
        return [names[number] for number in numbers]


def plan_of_torch(plan: TorchPlan, planner: TorchPlanner, name: str) -> tuple[WritePlan, list[WriteResult]]:
    """Make the `WritePlan` of what torch's planner has a rank save, for those who bring a planner of their own.

    Args:
        plan: of this rank, as `finish_plan` returned it.
        planner: gives the tensors and objects of its items.
        name: of the file.

    Returns:
        The plan of one file, and where each item lies in it, as torch's `finish` of a storage writer takes it.
    """
    objects = [item for item in plan.items if item.type is WriteItemType.BYTE_IO]
    tensors = [item for item in plan.items if item.type is not WriteItemType.BYTE_IO]
    names = [item.index.fqn for item in tensors]
    sources: list[Any] = [planner.resolve_data(item) for item in tensors]
    check_memories(names, sources)
    pickles: list[Any] = [planner.resolve_data(item) for item in objects]
    contents = [pickled.getvalue() for pickled in pickles]
    layout = FileLayout(((source.dtype, source.shape) for source in sources), list(map(len, contents)))
    places = zip(tensors + objects, layout.items(), strict=True)
    results = [
        WriteResult(item.index, length, _StorageInfo(name, start, length)) for item, (start, length) in places
    ]
    files = [layout.file(name, sources, names, contents)] if layout.size else []
    return WritePlan(files=files, is_pinned=any_on_cuda(sources)), results


def _check_extra(extra: Any) -> str:
    """`extra` as text, by which ranks compare it."""
    if extra is None:
        return "{}"
    if not isinstance(extra, Mapping):
        raise InvalidTypeError(f"extra is {format_type(extra)}: give a dict of values of the run")
    try:
        text = json.dumps(dict(extra), allow_nan=False)
        # A save deep-copies `extra`, so one that is nested too deep to copy is refused here.
        if json.loads(text) == copy.deepcopy(dict(extra)):
            return json.dumps(dict(extra), sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        pass
    try:
        problem = _not_json(extra, "extra") or "it does not survive a JSON round trip"
    except RecursionError:
        problem = "it is nested too deep, or contains itself"
    raise InvalidTypeError(
        f"extra is no JSON: {problem}. Give strings, finite numbers, booleans, None, lists and dicts with strings for "
        "keys; random generators go into rank_extra, tensors into the state dict"
    )


def _not_json(value: Any, where: str) -> str | None:
    """The first part of `value` that JSON does not give back; None if there is none."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{where} is {value}"
    if value is None or isinstance(value, str | int | float):
        return None
    if isinstance(value, list):
        found = (_not_json(item, f"{where}[{number}]") for number, item in enumerate(value))
    elif isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                return f"{where} has the key {key!r}"
        found = (_not_json(item, f"{where}[{key!r}]") for key, item in value.items())
    else:
        return f"{where} is {format_type(value)}"
    return next((problem for problem in found if problem), None)


def _pickled(name: str, value: Any, trusted: frozenset[tuple[str, str]]) -> bytes:
    """`value` as torch's planner pickles it.

    Raises:
        InvalidTypeError: it cannot be pickled, or `load_dcp` could not read it.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        if type(value) not in _SIMPLE:
            # Only reading shows what can be read.
            read_object(stream.getvalue(), trusted)
    except UntrustedNameError as error:
        raise InvalidTypeError(
            f"{name!r}, which is {format_type(value)}, could not be loaded: its pickle names {error.name}. Give its "
            f"state as numbers, text, containers, arrays and tensors; if {error.name} is a type of yours, give "
            f"trusted=[{error.name}] here and to load_dcp"
        ) from None
    except Exception as error:
        raise InvalidTypeError(
            f"{name!r}, which is {format_type(value)}, cannot be saved as a pickle that can be read: {error}. Give its "
            "state as numbers, text, containers, arrays and tensors"
        ) from error
    return stream.getvalue()


def _late_files(part: RankShare, notes: Sequence[str]) -> list[SmallFile]:
    """On the first rank: `.metadata`."""
    if part.files is None:
        raise RuntimeError("only the first rank knows what all ranks save")
    if part.metadata is None or part.metadata[0] != notes:
        part.metadata = notes, make_metadata(part.files, [json.loads(note) for note in notes])
    return [SmallFile(METADATA, part.metadata[1])]
