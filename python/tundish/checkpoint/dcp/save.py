"""`DcpStager`, one DCP save of one rank: checked early, planned with the other ranks, staged and written.

Invariants:
    - After an eager `stage` returns, the caller may change the tensors: the save does not change.
    - Each rank stages only the tensors that it writes, each with one copy into the image of its file.
"""

from __future__ import annotations

import functools
import io
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tundish._native import FileMetadata, write_small_file
from tundish.checkpoint.buffers import Buffer
from tundish.checkpoint.copies import BufferCopy, Copies, optimizers_of
from tundish.checkpoint.dcp.format import METADATA, FileLayout, rank_extra_name, shard_name
from tundish.checkpoint.dcp.plan import RankShare, SavePlanner, local_values_of, make_metadata
from tundish.checkpoint.dcp.rank_extra import to_json
from tundish.checkpoint.dcp.state import flatten_state
from tundish.checkpoint.dcp.unpickling import unread_types
from tundish.checkpoint.publish.shard_writing import write_files
from tundish.checkpoint.replicas import digest_of
from tundish.checkpoint.stager import StagedSave, WriteOptions
from tundish.checkpoint.tensors import any_on_cuda, check_memories, local_of
from tundish.distributed import VoteId
from tundish.errors import InvalidTypeError, format_type

_logger = logging.getLogger("tundish.checkpoint")

_SIMPLE = (int, float, str, bytes, type(None))


class DcpStager:
    """A `tundish.checkpoint.stager.Stager`. Its constructor is local and raises everything that is refused early.

    Args:
        planner: of the ranks that save together.
        state_dict: nested, of tensors, DTensors and other objects.
        extra: values of the run, the same on all ranks; JSON.
        rank_extra: state of this rank alone.
        staging: "eager" or "lazy".
        optimizer: one or several, whose steps wait for a lazy staging.

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
        staging: Literal["eager", "lazy"] = "eager",
        optimizer: Any = None,
    ) -> None:
        self._optimizers = optimizers_of(staging, optimizer)
        extra_text = _check_extra(extra)
        self._rank_extra = b"" if rank_extra is None else to_json(rank_extra, "rank_extra")
        self._state = flatten_state(state_dict, planner.known_structure)
        self._planner = planner
        self._pickles: dict[int, bytes] = {}
        # The image of this rank's file, unless that is empty.
        self._buffers: list[Buffer] = []
        self._copies = Copies()
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
    def staged_bytes(self) -> int:
        """Bytes of the image of this rank's file, once the structure is planned."""
        return self._file_layout().size

    @property
    def file_bytes(self) -> int:
        """Bytes of this rank's file, once the structure is planned."""
        return self._file_layout().size

    @property
    def checkpoint_bytes(self) -> int:
        """About the bytes of all ranks' files, on the first rank, once the structure is planned."""
        files = None if self._part is None else self._part.files
        return 0 if files is None else files.total_bytes

    @property
    def needs_preparation(self) -> bool:
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

    def prepare(self, vote: VoteId, *, any_needs: bool, do_replicas_differ: bool) -> bool:  # noqa: ARG002 (the planner votes by itself)
        """Collective where a rank needs it, or replicas differ: plan what each rank saves. Returns whether it did."""
        if any_needs or do_replicas_differ:
            self.release()
            self._part, self._layout = self._planner.plan(self._state, self._rank_values), None
            return True
        return False

    def reserve(self) -> None:
        """Allocate the image of this rank's file."""
        size = self._file_layout().size
        if size > 0:
            self._buffers.append(Buffer(size, is_pinned=any_on_cuda(self._sources)))

    def stage(self) -> StagedState:
        """Copy this rank's part; after `prepare`."""
        layout, part = self._file_layout(), self._planned_part()
        blocks = [
            BufferCopy(
                buffer=buffer,
                places=layout.tensor_places,
                sources=self._sources,
                names=self._names(part.tensors),
                # The bytes around tensors are filled in when the file is written.
                are_gaps_free=True,
            )
            for buffer in self._buffers
        ]
        self._copies.begin(blocks, self._optimizers)
        self._copies.run()
        return StagedState(
            index=self._planner.index,
            part=part,
            layout=layout,
            buffers=self._buffers,
            copies=self._copies,
            note=json.dumps(layout.object_lengths),
            objects=[self._pickles[number] for number in part.objects],
            rank_extra=self._rank_extra,
        )

    def release(self) -> None:
        """Release the memory."""
        self._copies.release()
        for buffer in self._buffers:
            buffer.release()
        self._buffers = []

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
            key = (type(value), repr(value)) if type(value) in _SIMPLE else number
            if key not in known:
                known[key] = _pickled(names[number], value)
            self._pickles[number] = known[key]

    def _names(self, numbers: Sequence[int]) -> list[str]:
        names = list(self._state.structure.paths)
        return [names[number] for number in numbers]


def _check_extra(extra: Any) -> str:
    """`extra` as text, by which ranks compare it."""
    if extra is None:
        return "{}"
    if not isinstance(extra, Mapping):
        raise InvalidTypeError(f"extra is {format_type(extra)}: give a dict of values of the run")
    try:
        text = json.dumps(dict(extra), allow_nan=False)
        if json.loads(text) == extra:
            return json.dumps(dict(extra), sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        pass
    try:
        problem = _not_json(extra, "extra") or "not all of it comes back as it is"
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


def _pickled(name: str, value: Any) -> bytes:
    """`value` as torch's planner pickles it.

    Raises:
        InvalidTypeError: it cannot be pickled, or `load_dcp` could not read it.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        data = stream.getvalue()
        unread = () if type(value) in _SIMPLE else unread_types(data)
    except Exception as error:
        raise InvalidTypeError(
            f"{name!r}, which is {format_type(value)}, cannot be saved as a pickle: {error}. Give its state as "
            "numbers, text, containers, arrays and tensors"
        ) from error
    for kind in unread:
        _warn_of_unread(name, kind)
    return data


@functools.cache
def _warn_of_unread(name: str, kind: str) -> None:
    _logger.warning(
        "%r is saved as a pickle of %s: load_dcp reads it only with trusted=[%s]", name, kind, kind
    )


@dataclass(kw_only=True, eq=False)
class StagedState(StagedSave):
    """A rank's part of a DCP save. Its note: the lengths of `objects` as JSON, for `.metadata`.

    Attributes:
        index: of this rank in the group.
        part: what this rank saves.
        layout: of its file, which is the only buffer; there is none if the file is empty.
        objects: pickles of the values that are no tensors, in order.
        rank_extra: the contents of the file for it; empty if there is none.
    """

    index: int
    part: RankShare
    layout: FileLayout
    objects: Sequence[bytes]
    rank_extra: bytes

    def write(self, folder: Path, options: WriteOptions) -> list[FileMetadata]:
        """Write this rank's files."""
        for buffer in self.buffers:
            self.layout.fill(buffer, self.objects)
        name, size = shard_name(self.index), self.layout.size
        # Without a name: a later error would keep the image alive.
        files = write_files(folder, [(name, size, buffer.image) for buffer in self.buffers], options)
        if self.rank_extra:
            files.append(write_small_file(folder, rank_extra_name(self.index), self.rank_extra))
        self.copies.confirm()
        return files

    def write_other_files(self, folder: Path, notes: Sequence[str]) -> list[FileMetadata]:
        """On the first rank: write `.metadata`."""
        part = self.part
        if part.files is None:
            raise RuntimeError("only the first rank knows what all ranks save")
        if part.metadata is None or part.metadata[0] != notes:
            part.metadata = notes, make_metadata(part.files, [json.loads(note) for note in notes])
        return [write_small_file(folder, METADATA, part.metadata[1])]
