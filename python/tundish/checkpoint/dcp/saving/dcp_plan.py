"""`DcpPlan`, one DCP save of one rank: checked early, compared with the other ranks, staged.

Invariants: when `stage` returns from an eager staging, later changes by the caller do not affect what is saved. Each
rank stages only what it writes: one copy of each tensor, directly into the image of its file.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from tundish.checkpoint.dcp.flattened_state import flatten_state
from tundish.checkpoint.dcp.json_values import to_json
from tundish.checkpoint.dcp.saving.file_layout import FileLayout
from tundish.checkpoint.dcp.saving.plan_exchange import PlanExchange
from tundish.checkpoint.dcp.saving.rank_comparison import OwnedPart, RankComparison
from tundish.checkpoint.dcp.saving.staged_state import StagedState
from tundish.checkpoint.dcp.saving.torch_planning import DTensorLayout, StagedPlanner
from tundish.checkpoint.staging.buffers import Buffer
from tundish.checkpoint.staging.copies import EagerCopy, LazyCopy, begin_copies, optimizers_of, run_copies
from tundish.checkpoint.staging.tensor_copy import Block
from tundish.checkpoint.tensors import any_on_cuda, check_memories, is_dtensor, local_of
from tundish.distributed import VoteId
from tundish.errors import InvalidInputError, InvalidTypeError

__all__ = ["DcpPlan"]

# A longer `extra` appears in messages as a digest.
_READABLE = 200
_SIMPLE = (int, float, str, bytes, type(None))


class DcpPlan:
    """A `tundish.checkpoint.stager.Stager`. Its constructor is local and raises everything that is refused early.

    Args:
        state_dict: nested, of tensors, DTensors and other objects.
        extra: facts about the run, the same on all ranks; JSON.
        rank_extra: state of this rank alone.
        staging: "eager" or "lazy".
        optimizer: one or several, whose steps wait for a lazy staging.
        ranks: that save together.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Any],
        *,
        extra: Mapping[str, Any] | None,
        rank_extra: Any,
        staging: Literal["eager", "lazy"],
        optimizer: Any,
        ranks: RankComparison,
    ) -> None:
        if staging not in ("eager", "lazy"):
            raise InvalidInputError(f'staging is {staging!r}: give "eager" or "lazy"')
        self._optimizers = optimizers_of(optimizer) if staging == "lazy" else ()
        extra_text = _check_extra(extra)
        self._rank_extra = b"" if rank_extra is None else to_json(rank_extra, "rank_extra")
        self._state = flatten_state(state_dict, ranks.known_form)
        self._ranks = ranks
        # The generation of the group in which other ranks wait for this one, if they do.
        self._awaited_in: int | None = None
        # After the preparation.
        self._exchange: PlanExchange | None = None
        self._part = ranks.expected_part(self._state)
        self._objects: dict[str, bytes] = {}
        self._layout = self._layout_of(self._part)
        self._sources = self._sources_of(self._layout)
        self._buffer: Buffer | None = None
        self._copies: list[EagerCopy | LazyCopy] = []
        self.checkpoint_bytes = self._part.total_bytes
        self.fingerprint = (
            f"staging {staging}, extra (what differs by rank goes into rank_extra) {_shortened(extra_text)}"
        )

    @property
    def staged_bytes(self) -> int:
        """Bytes of this rank's file image."""
        return self._layout.size

    @property
    def file_bytes(self) -> int:
        """Bytes of this rank's file."""
        return self._layout.size

    @property
    def needs_preparation(self) -> bool:
        """Whether the form of the state dict is new, or a group is not connected."""
        return self._ranks.needs_preparation

    def prepare(self, vote: VoteId, *, any_needs: bool) -> bool:
        """Collective if a rank needs it: connect the groups and find what this rank saves.

        Args:
            vote: the vote that took the save.
            any_needs: whether any rank `needs_preparation`.

        Returns:
            Whether `staged_bytes` may have changed.
        """
        if any_needs:
            self._ranks.connect_where_absent(vote)
            self._awaited_in = self._ranks.generation
        part, self._exchange = self._ranks.compare(self._state, is_known=not any_needs)
        self._awaited_in = None
        is_new = part is not self._part
        if is_new:
            self._part, self._layout = part, self._layout_of(part)
            self._sources = self._sources_of(self._layout)
        return is_new

    def reserve(self) -> None:
        """Allocate the image of this rank's file."""
        if self._layout.size > 0:
            is_pinned = any_on_cuda(self._sources)
            self._buffer = Buffer(self._layout.size, is_pinned=is_pinned)

    def stage(self) -> StagedState:
        """Copy this rank's part; after `prepare`."""
        buffer = self._buffer
        begin_copies([] if buffer is None else [self._block(buffer)], self._optimizers, self._copies)
        run_copies(self._copies)
        return self._staged(buffer=buffer, copies=tuple(self._copies))

    def release(self) -> None:
        """Release the memory, and fail the ranks that wait for this one."""
        if self._awaited_in is not None:
            self._ranks.break_off(self._awaited_in)
        for copies in self._copies:
            # The save fails with their errors anyway.
            with contextlib.suppress(Exception):
                copies.release()
        if self._buffer is not None:
            self._buffer.release()
            self._buffer = None

    def _staged(
        self,
        *,
        buffer: Buffer | None = None,
        copies: Sequence[EagerCopy | LazyCopy] = (),
    ) -> StagedState:
        if self._exchange is None:
            raise RuntimeError("staged before it was prepared")
        return StagedState(
            index=self._ranks.index,
            exchange=self._exchange,
            layout=self._layout,
            buffer=buffer,
            copies=copies,
            planner=self._planner(),
            objects=self._objects,
            rank_extra=self._rank_extra,
        )

    def _layout_of(self, part: OwnedPart) -> FileLayout:
        """The layout of the part: that of the last save if all lengths are the same."""
        lengths = {}
        pickles: dict[Any, bytes] = {}
        for number, name in part.objects:
            if name not in self._objects:
                self._objects[name] = _pickled(name, self._state.values[number], pickles)
            lengths[name] = len(self._objects[name])
        if part.layout is None or part.layout.objects != lengths:
            part.layout = FileLayout(part.tensors, lengths)
        return part.layout

    def _planner(self) -> StagedPlanner:
        """The planner for the staged values. It is not used if the layout was planned before."""
        staged: dict[str, torch.Tensor | None] = {}
        dtensors: dict[str, DTensorLayout] = {}
        if self._layout.plan is None:
            for item in self._layout.tensors:
                staged[item.name] = torch.empty(item.size, dtype=item.dtype, device="meta")
                value = self._state.values[item.number]
                if is_dtensor(value):
                    dtensors[item.name] = DTensorLayout(
                        value.device_mesh, value.placements, value.shape, value.stride()
                    )
            staged.update(dict.fromkeys(self._layout.objects))
        return StagedPlanner(staged, dtensors, self._state.form.paths)

    def _block(self, buffer: Buffer) -> Block:
        places = self._layout.tensor_places
        return Block(
            buffer=buffer,
            places=places,
            sources=self._sources,
            names=[item.name for item in self._layout.tensors],
            # The frames are filled in when the file is written.
            free_from=places.stops_before,
        )

    def _sources_of(self, layout: FileLayout) -> list[torch.Tensor]:
        values = self._state.values
        sources = [local_of(values[item.number]) for item in layout.tensors]
        # The memory of a tensor may be gone since its last save, which its form does not show.
        check_memories((item.name for item in layout.tensors), sources)
        return sources


def _check_extra(extra: Any) -> str:
    """`extra` as text, by which ranks compare it."""
    if extra is None:
        return "{}"
    if not isinstance(extra, Mapping):
        raise InvalidTypeError(f"extra is a {type(extra).__name__}: give a dict of facts about the run")
    problem: object = "not all of it comes back as it is"
    try:
        text = json.dumps(dict(extra), allow_nan=False)
        if json.loads(text) == extra:
            return json.dumps(dict(extra), sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        problem = error
    raise InvalidTypeError(
        f"extra is no JSON ({problem}): give strings, finite numbers, lists and dicts with strings for keys; state of "
        "a loader or a sampler goes into rank_extra, tensors into the state dict"
    )


def _shortened(text: str) -> str:
    """`text`, or its digest if it is too long for a message."""
    return text if len(text) <= _READABLE else hashlib.sha256(text.encode()).hexdigest()


def _pickled(name: str, value: Any, known: dict[Any, bytes]) -> bytes:
    """`value` as torch's planner pickles it; `known`: pickles of immutable values of the same save."""
    key = (type(value), repr(value)) if type(value) in _SIMPLE else None
    if key is not None and key in known:
        return known[key]
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception as error:
        raise InvalidTypeError(
            f"{name!r}, a {type(value).__qualname__}, cannot be pickled: {error}"
        ) from error
    pickled = stream.getvalue()
    if key is not None:
        known[key] = pickled
    return pickled
