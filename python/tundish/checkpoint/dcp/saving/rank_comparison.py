"""Compares the state dicts of the ranks, so that all know who saves what.

Invariants:

1. If no rank needs preparation (the form is that of the last save, and the groups are connected), a save costs the
   callers' threads only its vote. Otherwise it costs two more votes or reductions, and more only if the ranks hold
   different things.
2. A rank that gives up in the middle breaks off the group. The next save makes new groups, and nothing that was
   exchanged in the old ones is used again.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed

from tundish.checkpoint.dcp.flattened_state import FlattenedState, Form
from tundish.checkpoint.dcp.saving.file_layout import FileLayout, TensorItem, tensor_items
from tundish.checkpoint.dcp.saving.ownership import owned_values
from tundish.checkpoint.dcp.saving.plan_exchange import PlanExchange, integers
from tundish.checkpoint.dcp.saving.state_summary import (
    StateSummary,
    SummariesByRank,
    digest_of,
    summarize,
    summary_from_json,
    summary_to_json,
    total_bytes,
)
from tundish.checkpoint.private_group import PrivateGroup, is_peer_failure
from tundish.distributed import VoteId, Voter, group_info
from tundish.errors import PeerFailedError

__all__ = ["OwnedPart", "RankComparison"]


class OwnedPart:
    """The part of a state dict of one form that one rank saves.

    Attributes:
        form: of the state dict.
        summary: of this rank's state dict.
        summaries: of all ranks.
        owned: for each value, whether this rank saves it.
        tensors: the owned tensors in this rank's file.
        objects: indices and names of the other owned values.
        layout: of the last save.
    """

    def __init__(
        self, rank: int, state: FlattenedState, summary: StateSummary, summaries: SummariesByRank
    ) -> None:
        self.form = state.form
        self.summary = summary
        self.summaries = summaries
        self.owned = owned_values(rank, state, summaries)
        self.tensors: list[TensorItem] = tensor_items(state, self.owned)
        self.objects = [
            (number, name)
            for number, (name, value) in enumerate(state)
            if self.owned[number] and not isinstance(value, torch.Tensor)
        ]
        self.layout: FileLayout | None = None

    @functools.cached_property
    def digest(self) -> int:
        """Equal on ranks with equal summaries."""
        return digest_of(self.summary)

    @functools.cached_property
    def total_bytes(self) -> int:
        """About the bytes of all ranks' files together."""
        return total_bytes(self.summaries)


class RankComparison:
    """The ranks of a group that save together. Collective; for the caller's thread.

    Args:
        group: the `ProcessGroup`, None for all ranks; without torch.distributed a world of one.
        timeout: seconds to wait for other ranks.
        voter: of the callers' threads.
    """

    def __init__(self, group: Any = None, *, timeout: float, voter: Voter) -> None:
        member = group_info(group)
        self.members = member.ranks
        self.rank = member.rank
        self.index = member.ranks.index(member.rank)
        self._timeout = timeout
        self._part: OwnedPart | None = None
        self._is_compared = False
        self._callers = PrivateGroup(self.members, timeout, voter) if len(self.members) > 1 else None
        self._voter = voter
        self._exchange = PlanExchange(self.members, self.index, timeout, voter)

    @property
    def known_form(self) -> Form | None:
        """The form of the last state dict, which was checked."""
        return None if self._part is None else self._part.form

    @property
    def needs_preparation(self) -> bool:
        """Whether the ranks must connect or compare before the next staging, as far as this rank knows."""
        return self._callers is not None and (self._lacks_a_group or not self._is_compared)

    @property
    def generation(self) -> int:
        """How often the groups were made."""
        return 0 if self._callers is None else self._callers.generation

    def expected_part(self, state: FlattenedState) -> OwnedPart:
        """What this rank saves if the others hold the same as before, or else the same as this rank. Not collective.

        Raises:
            InvalidInputError: a DTensor cannot be saved.
        """
        part = self._part
        if part is None or part.form is not state.form:
            everyone = frozenset(self.members)
            summary = summarize(state, self.rank, everyone)
            self._part = part = OwnedPart(self.rank, state, summary, ((summary, everyone),))
            self._is_compared = False
        return part

    def connect_where_absent(self, vote: VoteId) -> None:
        """Collective: connect both groups if a rank lacks one."""
        what = "looking for the groups of the ranks"
        if self._callers is not None and self._voter.vote(
            what=what, flag=self._lacks_a_group, timeout=self._timeout
        ):
            self._callers.connect(f"{vote.name}-callers")
            # A new exchange knows no plan.
            self._exchange.break_off()
            self._exchange = PlanExchange(self.members, self.index, self._timeout, self._voter)
            self._exchange.connect(f"{vote.name}-plans")

    def compare(self, state: FlattenedState, *, is_known: bool) -> tuple[OwnedPart, PlanExchange]:
        """Collective: find what this rank saves, and the exchange for its plan.

        Args:
            state: of this rank.
            is_known: no rank needs preparation, the same on all ranks; then this is not collective.

        Raises:
            InvalidInputError: another rank holds something else under the same name.
            PeerFailedError: another rank gave up.
        """
        part = self.expected_part(state)
        if self._callers is None or is_known:
            return part, self._exchange
        with self._breaking_off():
            is_changed, digest, minus_digest = self._maxima(
                int(not self._is_compared), part.digest, -part.digest
            )
            # The maximum equals the minimum.
            is_same = digest == -minus_digest
            summaries: SummariesByRank = ((part.summary, frozenset(self.members)),)
            if is_changed and not is_same:
                summaries = self._exchange_summaries(part)
        if is_changed:
            self._is_compared = False
            if not is_same or len(part.summaries) > 1:
                part = OwnedPart(self.rank, state, part.summary, summaries)
            self._part, self._is_compared = part, True
        return part, self._exchange

    def break_off(self, generation: int | None = None) -> None:
        """Fail the ranks that wait for this one in a comparison, in groups of this generation. Not collective."""
        if self._callers is not None:
            self._callers.close(generation)

    def close(self) -> None:
        """Close the groups; not collective."""
        self._exchange.break_off()
        self.break_off()

    @property
    def _lacks_a_group(self) -> bool:
        return self._callers is not None and (self._callers.is_absent or self._exchange.is_absent)

    @property
    def _group(self) -> Any:
        return None if self._callers is None else self._callers.group

    @contextlib.contextmanager
    def _breaking_off(self) -> Iterator[None]:
        """A block of collectives; a rank that leaves it with an error breaks off the group."""
        try:
            yield
            return
        except BaseException as error:
            # Its frames would keep the group alive.
            traceback.clear_frames(error.__traceback__)
            self.break_off()
            if not is_peer_failure(error):
                raise
            others = [rank for rank in self.members if rank != self.rank]
            problem = PeerFailedError(
                f"comparing what the ranks save broke off: {error}", others[0] if len(others) == 1 else -1
            )
        raise problem

    def _maxima(self, *numbers: int) -> list[int]:
        """The maximum of each number over all ranks, in one reduction."""
        reduced = integers(*numbers)
        distributed.all_reduce(reduced, distributed.ReduceOp.MAX, group=self._group)
        return reduced.tolist()

    def _exchange_summaries(self, part: OwnedPart) -> SummariesByRank:
        """Each distinct summary; the lowest rank that has it sends it to all."""
        digests = [integers(0) for _ in self.members]
        distributed.all_gather(digests, integers(part.digest), group=self._group)
        ranks_of: dict[int, list[int]] = {}
        for rank, digest in zip(self.members, digests, strict=True):
            ranks_of.setdefault(int(digest.item()), []).append(rank)
        summaries: list[tuple[StateSummary, frozenset[int]]] = []
        for common, ranks in ranks_of.items():
            own = summary_to_json(part.summary).encode() if ranks[0] == self.rank else b""
            text = self._broadcast(own, ranks[0])
            summary = part.summary if common == part.digest else summary_from_json(text.decode())
            summaries.append((summary, frozenset(ranks)))
        return tuple(summaries)

    def _broadcast(self, text: bytes, source: int) -> bytes:
        length = integers(len(text))
        distributed.broadcast(length, source, group=self._group)
        data = torch.zeros(int(length.item()), dtype=torch.uint8, device="cpu")
        if self.rank == source:
            data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        distributed.broadcast(data, source, group=self._group)
        return data.numpy().tobytes()
