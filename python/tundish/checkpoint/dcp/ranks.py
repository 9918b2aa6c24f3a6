"""The ranks that save DCP checkpoints together: what they tell each other, and when.

Owns two gloo groups: one for the callers' threads, one for the finalize threads; made by the first save. What always
holds:

1. A save costs the callers' threads nothing but the vote that it is taken with, where no rank has news: a state dict of
   another form than at the last save, or a group that is not there. Else it costs one reduction of three numbers; more
   only when the ranks do not all hold the same.
2. No plan travels twice: what a rank sent before and did not change is known to the first rank, as it came: of ten
   thousand ranks the plans of a thousand tensors each are many gigabytes as objects, and of packed text hundreds of
   megabytes.
3. Background exchanges do not depend on torch's list of groups, so that a script may destroy its process group while
   a save is under way.
4. A rank that gives up in the middle breaks off the group that it was in. The next save's callers make new ones, and
   nothing is taken for known that was told on the old ones.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import traceback
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed
from torch.distributed.checkpoint.planner import SavePlan

from tundish.checkpoint.dcp.layout import Layout, TensorItem, tensor_items
from tundish.checkpoint.dcp.leaves import Form, Leaves
from tundish.checkpoint.dcp.outline import (
    Census,
    Outline,
    digest_of,
    outline_from_json,
    outline_of,
    outline_to_json,
    total_bytes,
)
from tundish.checkpoint.dcp.owners import owned_by
from tundish.checkpoint.private_group import PrivateGroup, is_peer_failure
from tundish.distributed import VoteId, Voter, group_info
from tundish.errors import PeerFailedError
from tundish.waiting import was_let_go

__all__ = ["Exchange", "Ranks", "Share"]


class Share:
    """What one rank saves of state dicts of one form.

    `census`: who holds what. `owned`: for each leaf, whether it is this rank's to save. `tensors`: where those among
    them lie in its file. `objects`: numbers and names of the others. `layout`: of the last save.
    """

    def __init__(self, rank: int, leaves: Leaves, outline: Outline, census: Census) -> None:
        self.form = leaves.form
        self.outline = outline
        self.census = census
        self.owned = owned_by(rank, leaves, census)
        self.tensors: list[TensorItem] = tensor_items(leaves, self.owned)
        self.objects = [
            (number, name)
            for number, (name, value) in enumerate(leaves)
            if self.owned[number] and not isinstance(value, torch.Tensor)
        ]
        self.layout: Layout | None = None

    @functools.cached_property
    def digest(self) -> int:
        """By which ranks see whether they hold the same."""
        return digest_of(self.outline)

    @functools.cached_property
    def total_bytes(self) -> int:
        """About what the files of all ranks take."""
        return total_bytes(self.census)


class Ranks:
    """The ranks of `group` (None: all). Collective; made, used and closed on the caller's thread.

    Args:
        group: the `ProcessGroup`; without torch.distributed a world of one.
        timeout: seconds that anything here waits for the other ranks.
        voter: of the callers' threads.
    """

    def __init__(self, group: Any = None, *, timeout: float, voter: Voter) -> None:
        member = group_info(group)
        self.members = member.ranks
        self.rank = member.rank
        self.index = member.ranks.index(member.rank)
        self._timeout = timeout
        self._share: Share | None = None
        self._is_compared = False
        self._callers = PrivateGroup(self.members, timeout, voter) if len(self.members) > 1 else None
        self._voter = voter
        self._exchange = Exchange(self.members, self.index, timeout, voter)

    @property
    def _group(self) -> Any:
        return None if self._callers is None else self._callers.group

    @property
    def known_form(self) -> Form | None:
        """Of the last state dict, which was checked."""
        return None if self._share is None else self._share.form

    @property
    def needs_preparation(self) -> bool:
        """Whether the ranks have to connect or compare before the next staging, as far as this rank knows."""
        return self._callers is not None and (self._lacks_a_group or not self._is_compared)

    @property
    def _lacks_a_group(self) -> bool:
        return self._callers is not None and (self._callers.is_absent or self._exchange.is_absent)

    def expected_share(self, leaves: Leaves) -> Share:
        """What this rank saves if the others hold what they held last, or else the same as this one. Not collective.

        Raises `InvalidInputError` for layouts that cannot be saved.
        """
        share = self._share
        if share is None or share.form is not leaves.form:
            outline = outline_of(leaves, self.rank, frozenset(self.members))
            self._share = share = Share(self.rank, leaves, outline, ((outline, frozenset(self.members)),))
            self._is_compared = False
        return share

    def connect_where_absent(self, vote: VoteId) -> None:
        """Collective: connect both groups, where a rank lacks one."""
        what = "looking for the groups of the ranks"
        if self._callers is not None and self._voter.vote(
            what=what, flag=self._lacks_a_group, timeout=self._timeout
        ):
            self._callers.connect(f"{vote.name}-callers")
            # What was sent over another group is not known any more.
            self._exchange.break_off()
            self._exchange = Exchange(self.members, self.index, self._timeout, self._voter)
            self._exchange.make(f"{vote.name}-plans")

    def compare(self, leaves: Leaves, *, is_known: bool) -> tuple[Share, Exchange]:
        """Collective: what this rank saves, for certain, and the way to tell the first rank in the background.

        `is_known`: on all ranks alike, that none of them has `news`; then it is no collective.

        Raises `InvalidInputError` where another rank holds something else under the same name, `PeerFailedError` where
        one gave up.
        """
        share = self.expected_share(leaves)
        if self._callers is None or is_known:
            return share, self._exchange
        with self._together():
            seen = self._greatest(
                is_changed=not self._is_compared, digest=share.digest, minus_digest=-share.digest
            )
            # The greatest is the least.
            is_same = seen["digest"] == -seen["minus_digest"]
            everyone: Census = ((share.outline, frozenset(self.members)),)
            census = everyone if is_same or not seen["is_changed"] else self._take_census(share)
        if seen["is_changed"]:
            self._is_compared = False
            if not is_same or len(share.census) > 1:
                share = Share(self.rank, leaves, share.outline, census)
            self._share, self._is_compared = share, True
        return share, self._exchange

    @property
    def generation(self) -> int:
        """How often the groups were made."""
        return 0 if self._callers is None else self._callers.generation

    def break_off(self, generation: int | None = None) -> None:
        """Let those fail who wait for this rank to compare, in groups of this generation. Not collective."""
        if self._callers is not None:
            self._callers.close(generation)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """A block of collectives of the callers' threads; who leaves it early breaks off the group."""
        try:
            yield
            return
        except BaseException as error:
            if was_let_go(error):
                # The group may be another by now, in which nobody waits; whoever was interrupted sees to its own.
                raise
            # What it holds on to would keep the group.
            traceback.clear_frames(error.__traceback__)
            self.break_off()
            if not is_peer_failure(error):
                raise
            others = [rank for rank in self.members if rank != self.rank]
            problem = PeerFailedError(
                f"comparing what the ranks save broke off: {error}", others[0] if len(others) == 1 else -1
            )
        raise problem

    def close(self) -> None:
        """Let go of the groups; not collective."""
        self._exchange.break_off()
        self.break_off()

    def _greatest(self, **numbers: int) -> dict[str, int]:
        """The greatest of each number on all ranks, in one reduction."""
        told = _numbers(*map(int, numbers.values()))
        if self._callers is not None:
            distributed.all_reduce(told, distributed.ReduceOp.MAX, group=self._group)
        return dict(zip(numbers, told.tolist(), strict=True))

    def _take_census(self, share: Share) -> Census:
        """Each distinct outline, told by the lowest rank that has it."""
        digests = [_numbers(0) for _ in self.members]
        distributed.all_gather(digests, _numbers(share.digest), group=self._group)
        ranks_of: dict[int, list[int]] = {}
        for rank, digest in zip(self.members, digests, strict=True):
            ranks_of.setdefault(int(digest.item()), []).append(rank)
        census: list[tuple[Outline, frozenset[int]]] = []
        for common, ranks in ranks_of.items():
            own = outline_to_json(share.outline).encode() if ranks[0] == self.rank else b""
            told = self._broadcast(own, ranks[0])
            outline = share.outline if common == share.digest else outline_from_json(told.decode())
            census.append((outline, frozenset(ranks)))
        return tuple(census)

    def _broadcast(self, text: bytes, teller: int) -> bytes:
        length = _numbers(len(text))
        distributed.broadcast(length, teller, group=self._group)
        told = torch.zeros(int(length.item()), dtype=torch.uint8, device="cpu")
        if self.rank == teller:
            told = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        distributed.broadcast(told, teller, group=self._group)
        return told.numpy().tobytes()


class Exchange:
    """How plans get to the first rank, in the background, once `make` made a group for it; one thread at a time.

    `is_coordinator`: whether this is the first rank. `metadata`: on the
    first rank what was made of the plans that it knows.
    """

    def __init__(self, members: tuple[int, ...], index: int, timeout: float, voter: Voter) -> None:
        self._members = members
        self._index = index
        self._own = PrivateGroup(members, timeout, voter) if len(members) > 1 else None
        self._sent: SavePlan | None = None
        # Of each rank, on the first one: the plan, or what went wrong; packed.
        self._known = [b""] * len(members)
        self.is_coordinator = index == 0
        self.metadata: bytes | None = None

    @property
    def is_absent(self) -> bool:
        """Whether there is no group on this rank, of those that need one."""
        return self._own is not None and self._own.is_absent

    def make(self, name: str) -> None:
        """Collective: make the group; as `PrivateGroup.connect`."""
        if self._own is not None:
            self._own.connect(name)

    def gather(self, plan: SavePlan | BaseException) -> list[SavePlan] | None:
        """Collective: on the first rank the plans of all; None where `metadata` is of them, and on the others.

        `plan`: this rank's; the same object as last time where it did not change. Where it has none, what it failed
        with, so that the first rank does not wait for it.

        Raises `PeerFailedError` on the first rank where another one failed.
        """
        sent = b"" if plan is self._sent else _packed(_told(plan))
        try:
            brought = {0: sent} if self._own is None else self._bring(self._own.group, sent)
        except BaseException as error:
            # What it holds on to would keep the group, in which others may wait.
            traceback.clear_frames(error.__traceback__)
            self.break_off()
            if not is_peer_failure(error):
                raise
            problem = f"planning with the other ranks broke off: {error}"
            raise PeerFailedError(problem, -1) from None
        # Not an error: its traceback would hold on to what was staged.
        self._sent = plan if isinstance(plan, SavePlan) else None
        for index, told in brought.items():
            if told:
                self._known[index] = told
                self.metadata = None
        if not self.is_coordinator or self.metadata is not None:
            return None
        plans: list[SavePlan] = []
        for rank, known in zip(self._members, self._known, strict=True):
            told = _unpacked(known)
            if isinstance(told, str):
                raise PeerFailedError(f"rank {rank} could not plan what it saves: {told}", rank)
            plans.append(told)
        return plans

    def break_off(self) -> None:
        """Let go of the group; whoever waits in it for this rank fails at once. Not collective."""
        if self._own is not None:
            self._own.close()

    def _bring(self, group: Any, sent: bytes) -> dict[int, bytes]:
        """What each rank that has something new sent, on the first one; nothing on the others."""
        own = _numbers(len(sent))
        lengths = [torch.zeros_like(own) for _ in self._members]
        group.allgather([lengths], [own]).wait()
        if not self.is_coordinator:
            if sent:
                group.send([torch.frombuffer(bytearray(sent), dtype=torch.uint8)], 0, 0).wait()
            return {}
        brought = {self._index: sent}
        # One after the other, each as long as it is: to gather, all would have to be as long as the longest.
        for index, length in enumerate(lengths):
            if index != self._index and length.item():
                told = torch.empty(int(length.item()), dtype=torch.uint8, device="cpu")
                group.recv([told], index, 0).wait()
                brought[index] = told.numpy().tobytes()
        return brought


def _numbers(*numbers: int) -> torch.Tensor:
    """In host memory, wherever the script has torch make its tensors."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _packed(told: SavePlan | str) -> bytes:
    # Names and files come again and again in a plan; to look for more takes longer than it saves.
    return zlib.compress(pickle.dumps(told), 1)


def _unpacked(packed: bytes) -> Any:
    return pickle.loads(zlib.decompress(packed))  # noqa: S301 (from a rank of the same process group)


def _told(plan: SavePlan | BaseException) -> SavePlan | str:
    return plan if isinstance(plan, SavePlan) else f"{type(plan).__name__}: {plan}"
