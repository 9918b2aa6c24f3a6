"""Sends the plans of all ranks to the first rank, in the background.

Invariants: a plan is sent only if it differs from the last one. The plans of ten thousand ranks with a thousand tensors
each take many gigabytes as objects, and hundreds of megabytes packed. The exchange does not depend on torch's list of
groups, so a script may destroy its process group while a save is under way.
"""

from __future__ import annotations

import pickle
import traceback
import zlib
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan

from tundish.checkpoint.private_group import PrivateGroup, is_peer_failure
from tundish.distributed import Voter
from tundish.errors import PeerFailedError

__all__ = ["PlanExchange", "integers"]


class PlanExchange:
    """Gathers plans on the first rank, after `connect`; one thread at a time.

    Attributes:
        is_coordinator: whether this is the first rank.
        metadata: on the first rank, the contents of `.metadata` for the plans that it knows.
    """

    def __init__(self, members: tuple[int, ...], index: int, timeout: float, voter: Voter) -> None:
        self._members = members
        self._index = index
        self._group = PrivateGroup(members, timeout, voter) if len(members) > 1 else None
        self._sent: SavePlan | None = None
        # On the first rank, for each rank: its packed plan, or its error.
        self._known = [b""] * len(members)
        self.is_coordinator = index == 0
        self.metadata: bytes | None = None

    @property
    def is_absent(self) -> bool:
        """Whether this rank needs a group and has none."""
        return self._group is not None and self._group.is_absent

    def connect(self, name: str) -> None:
        """Collective: connect the group; as `PrivateGroup.connect`."""
        if self._group is not None:
            self._group.connect(name)

    def gather(self, plan: SavePlan | BaseException) -> list[SavePlan] | None:
        """Collective: gather the plans of all ranks on the first one.

        Args:
            plan: of this rank, the same object as last time if it did not change; or the error with which planning
                failed, so that the first rank does not wait.

        Returns:
            The plans on the first rank; None on the others, and where `metadata` is still valid.

        Raises:
            PeerFailedError: on the first rank, another rank failed.
        """
        message = b"" if plan is self._sent else _pack(_message_of(plan))
        try:
            received = (
                {0: message} if self._group is None else self._send_to_first(self._group.group, message)
            )
        except BaseException as error:
            # Its frames would keep the group alive, in which other ranks may wait.
            traceback.clear_frames(error.__traceback__)
            self.break_off()
            if not is_peer_failure(error):
                raise
            problem = f"planning with the other ranks broke off: {error}"
            raise PeerFailedError(problem, -1) from None
        # An error is not kept: its traceback would keep staged memory alive.
        self._sent = plan if isinstance(plan, SavePlan) else None
        for index, packed in received.items():
            if packed:
                self._known[index] = packed
                self.metadata = None
        if not self.is_coordinator or self.metadata is not None:
            return None
        plans: list[SavePlan] = []
        for rank, packed in zip(self._members, self._known, strict=True):
            known = _unpack(packed)
            if isinstance(known, str):
                raise PeerFailedError(f"rank {rank} could not plan what it saves: {known}", rank)
            plans.append(known)
        return plans

    def break_off(self) -> None:
        """Close the group; a rank that waits in it for this one fails at once. Not collective."""
        if self._group is not None:
            self._group.close()

    def _send_to_first(self, group: Any, message: bytes) -> dict[int, bytes]:
        """On the first rank, the new messages by index; nothing on the others."""
        own = integers(len(message))
        lengths = [torch.zeros_like(own) for _ in self._members]
        group.allgather([lengths], [own]).wait()
        if not self.is_coordinator:
            if message:
                group.send([torch.frombuffer(bytearray(message), dtype=torch.uint8)], 0, 0).wait()
            return {}
        received = {self._index: message}
        # One after the other: a gather would pad all of them to the longest.
        for index, length in enumerate(lengths):
            if index != self._index and length.item():
                packed = torch.empty(int(length.item()), dtype=torch.uint8, device="cpu")
                group.recv([packed], index, 0).wait()
                received[index] = packed.numpy().tobytes()
        return received


def integers(*numbers: int) -> torch.Tensor:
    """An int64 tensor in host memory, whatever torch's default device is."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _pack(message: SavePlan | str) -> bytes:
    # Names and files repeat often; a higher level takes longer than it saves.
    return zlib.compress(pickle.dumps(message), 1)


def _unpack(packed: bytes) -> Any:
    return pickle.loads(zlib.decompress(packed))  # noqa: S301 (from a rank of the same process group)


def _message_of(plan: SavePlan | BaseException) -> SavePlan | str:
    return plan if isinstance(plan, SavePlan) else f"{type(plan).__name__}: {plan}"
