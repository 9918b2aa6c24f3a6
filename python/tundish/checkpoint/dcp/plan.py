"""One DCP save of one rank: refused or planned, staged, written.

What always holds: when `stage` returns from an eager staging, nothing that the caller does changes what is saved;
each rank stages only what it writes, one copy of each tensor, straight into the image of its file.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from tundish._native import FileMetadata, write_small_file
from tundish.checkpoint.dcp.layout import Layout
from tundish.checkpoint.dcp.leaves import leaves_of
from tundish.checkpoint.dcp.ranks import Exchange, Ranks, Share
from tundish.checkpoint.dcp.values import to_json
from tundish.checkpoint.dcp.writer import ImageWriter, Spread, StagedPlanner, save_together
from tundish.checkpoint.stager import WriteOptions
from tundish.checkpoint.staging.buffers import Buffer
from tundish.checkpoint.staging.copies import (
    EagerCopy,
    LazyCopy,
    begin_copies,
    optimizers_of,
    run_copies,
)
from tundish.checkpoint.staging.tensor_copy import Block
from tundish.checkpoint.tensors import any_on_cuda, check_memories, is_dtensor, local_of
from tundish.distributed import VoteId
from tundish.errors import InvalidInputError, InvalidTypeError

__all__ = ["DcpPlan", "rank_extra_name"]

_READABLE = 200
_SIMPLE = (int, float, str, bytes, type(None))


def rank_extra_name(index: int) -> str:
    """The file that holds what a rank, by its number in the group, has to remember."""
    return f"rank_extra-{index:05d}.json"


class DcpPlan:
    """A `tundish.checkpoint.stager.Stager`; its constructor is local and raises for everything that is refused early.

    Args:
        state_dict: nested, of tensors, DTensors and other objects.
        extra: facts about the run, the same on all ranks; JSON.
        rank_extra: what this rank has to remember.
        staging: "eager" or "lazy".
        optimizer: whose steps a lazy staging is fenced by; one or several.
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
        ranks: Ranks,
    ) -> None:
        if staging not in ("eager", "lazy"):
            raise InvalidInputError(f'staging is {staging!r}: give "eager" or "lazy"')
        self._optimizers = optimizers_of(optimizer) if staging == "lazy" else ()
        facts = _facts_of(extra)
        self._rank_extra = b"" if rank_extra is None else to_json(rank_extra, "rank_extra")
        self._leaves = leaves_of(state_dict, ranks.known_form)
        self._ranks = ranks
        # The generation of the group in which other ranks wait for this one to compare, if they do.
        self._awaited_in: int | None = None
        # Once it compared.
        self._exchange: Exchange | None = None
        self._share = ranks.expected_share(self._leaves)
        self._objects: dict[str, bytes] = {}
        self._layout = self._layout_of(self._share)
        self._sources = self._sources_of(self._layout)
        self._buffer: Buffer | None = None
        self._copies: list[EagerCopy | LazyCopy] = []
        self.checkpoint_bytes = self._share.total_bytes
        self.fingerprint = (
            f"staging {staging}, extra (what differs by rank goes into rank_extra) {_shortened(facts)}"
        )

    @property
    def staged_bytes(self) -> int:
        """The image of this rank's file."""
        return self._layout.size

    @property
    def file_bytes(self) -> int:
        """This rank's file."""
        return self._layout.size

    @property
    def needs_preparation(self) -> bool:
        """Whether the state dict has another form than at the last save, or a group is not connected."""
        return self._ranks.needs_preparation

    def prepare(self, vote: VoteId, *, any_needs: bool) -> bool:
        """Collective where a rank needs it: connect the groups, and find what this rank saves."""
        if any_needs:
            self._ranks.connect_where_absent(vote)
            self._awaited_in = self._ranks.generation
        share, self._exchange = self._ranks.compare(self._leaves, is_known=not any_needs)
        self._awaited_in = None
        is_new = share is not self._share
        if is_new:
            self._share, self._layout = share, self._layout_of(share)
            self._sources = self._sources_of(self._layout)
        return is_new

    def reserve(self) -> None:
        """Take the memory for the image of this rank's file."""
        if self._layout.size > 0:
            is_pinned = any_on_cuda(self._sources)
            self._buffer = Buffer(self._layout.size, is_pinned=is_pinned)

    def stage(self) -> StagedState:
        """Copy this rank's part; after `compare`."""
        buffer = self._buffer
        begin_copies([] if buffer is None else [self._block(buffer)], self._optimizers, self._copies)
        run_copies(self._copies)
        return self._staged(buffer=buffer, copies=tuple(self._copies))

    def release(self) -> None:
        """Give the memory back; no rank goes on waiting for this one."""
        if self._awaited_in is not None:
            self._ranks.break_off(self._awaited_in)
        for copies in self._copies:
            # Whatever went wrong with them, the save fails with.
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
            raise RuntimeError("staged before the ranks compared what they save")
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

    def _layout_of(self, share: Share) -> Layout:
        """Where all of the share lies; the layout of the last save, if nothing has another length."""
        lengths = {}
        pickles: dict[Any, bytes] = {}
        for number, name in share.objects:
            if name not in self._objects:
                self._objects[name] = _pickled(name, self._leaves.values[number], pickles)
            lengths[name] = len(self._objects[name])
        if share.layout is None or share.layout.objects != lengths:
            share.layout = Layout(share.tensors, lengths)
        return share.layout

    def _planner(self) -> StagedPlanner:
        """The planner for what is staged; it is not asked where the layout was planned before."""
        staged: dict[str, torch.Tensor | None] = {}
        spread: dict[str, Spread] = {}
        if self._layout.plan is None:
            for item in self._layout.tensors:
                staged[item.name] = torch.empty(item.size, dtype=item.dtype, device="meta")
                value = self._leaves.values[item.number]
                if is_dtensor(value):
                    spread[item.name] = Spread(
                        value.device_mesh, value.placements, value.shape, value.stride()
                    )
            staged.update(dict.fromkeys(self._layout.objects))
        return StagedPlanner(staged, spread, self._leaves.form.paths)

    def _block(self, buffer: Buffer) -> Block:
        places = self._layout.places_in_whole
        return Block(
            buffer=buffer,
            places=places,
            sources=self._sources,
            names=[item.name for item in self._layout.tensors],
            # What frames them is filled in when it is written.
            free_from=places.stops_before,
        )

    def _sources_of(self, layout: Layout) -> list[torch.Tensor]:
        values = self._leaves.values
        sources = [local_of(values[item.number]) for item in layout.tensors]

        def names() -> Iterator[str]:
            known = list(self._leaves.form.paths)
            for item in layout.tensors:
                yield known[item.number]

        # Of one that was saved before the memory may be gone, which its form does not show.
        check_memories(names(), sources)
        return sources


class StagedState:
    """A `tundish.checkpoint.stager.StagedSave`.

    Args:
        index: of this rank in the group.
        exchange: with the other ranks, in the background.
        layout: of this rank's file.
        buffer: the file, with tensors copied into it by `copies`; None where it is empty.
        planner: for what is in the file.
        objects: pickles of what is no tensor.
        rank_extra: the contents of the file that holds it; empty where there is none.
    """

    def __init__(
        self,
        *,
        index: int,
        exchange: Exchange,
        layout: Layout,
        buffer: Buffer | None,
        copies: Sequence[EagerCopy | LazyCopy],
        planner: StagedPlanner,
        objects: Mapping[str, bytes],
        rank_extra: bytes,
    ) -> None:
        self._index = index
        self._exchange = exchange
        self._layout = layout
        self._buffer = buffer
        self._copies = copies
        self._planner = planner
        self._objects = objects
        self._rank_extra = rank_extra

    def wait_staged(self, timeout: float | None) -> None:
        """Block until host memory holds everything that this rank saves."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for copies in self._copies:
            copies.wait(deadline)

    def allow_changes(self) -> None:
        """The caller was told that everything is in host memory, and may change its tensors from here on."""
        for copies in self._copies:
            copies.allow_changes()

    def write_other_files(self, folder: Path) -> list[FileMetadata]:  # noqa: ARG002 (nothing is known before the ranks planned)
        """Nothing: what describes the weights is written beside them."""
        return []

    def write(self, folder: Path, options: WriteOptions) -> list[FileMetadata]:
        """Plan with the other ranks and write this rank's files; on the first rank also `.metadata`."""
        writer = ImageWriter(
            folder,
            self._index,
            layout=self._layout,
            buffer=self._buffer,
            objects=self._objects,
            options=options,
        )
        save_together(self._planner, writer, self._layout, self._exchange)
        if self._rank_extra:
            writer.facts.append(write_small_file(folder, rank_extra_name(self._index), self._rank_extra))
        for copies in self._copies:
            copies.confirm()
        return writer.facts

    def abort(self) -> None:
        """Do not plan, while other ranks may: those that wait for this one fail at once."""
        self._exchange.break_off()

    def release(self) -> None:
        """Give the memory back, once nothing is copied into it any more."""
        for copies in self._copies:
            # Whatever went wrong with them was raised where they were waited for.
            with contextlib.suppress(Exception):
                copies.release()
        if self._buffer is not None:
            self._buffer.release()
            self._buffer = None


def _facts_of(extra: Any) -> str:
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


def _shortened(facts: str) -> str:
    """`facts` where people can read them in a message, else a digest of them."""
    return facts if len(facts) <= _READABLE else hashlib.sha256(facts.encode()).hexdigest()


def _pickled(name: str, value: Any, known: dict[Any, bytes]) -> bytes:
    """`value` as torch's planner pickles it; `known`: pickles of the same save, of values that nobody can change."""
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
