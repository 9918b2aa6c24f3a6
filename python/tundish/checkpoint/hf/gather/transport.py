"""The way that tensors take between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tundish.checkpoint.private_group import PrivateGroup
from tundish.distributed import torch_distributed

__all__ = [
    "NO_TRANSPORT",
    "TAGS",
    "TensorTransport",
    "joins_devices",
    "wire_between_devices",
    "wire_over_host",
]

# Of one save.
TAGS = 1 << 20
# Tags have 31 bits.
_SAVES = 1 << 11
_HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class TensorTransport:
    """How parts travel: in memory of `device`; `tag` is never the same for two saves at a time.

    `own`: the group for them, of this `generation`; where it is None they travel over `callers_group`, on the caller's
    thread, and nobody can give up.
    """

    own: PrivateGroup | None
    generation: int
    callers_group: Any
    device: torch.device
    tag: int

    @property
    def group(self) -> Any:
        """What they travel over; raises `PeerFailedError` where it was broken off."""
        return self.callers_group if self.own is None else self.own.of_generation(self.generation)

    def break_off(self) -> None:
        """Give up in the middle of an exchange. The caller's own group is not ours to break off."""
        if self.own is not None:
            self.own.break_off(self.generation)


# Where nothing is spread over ranks.
NO_TRANSPORT = TensorTransport(own=None, generation=0, callers_group=None, device=_HOST, tag=0)


def wire_between_devices(group: Any, device: torch.device) -> TensorTransport | None:
    """Collective over `group`, on the caller's thread: the way from `device` to `device`; None where there is none."""
    if not joins_devices(group, device):
        return None
    # Ranks that send nothing to each other may be the first to use the group, which takes all of them.
    torch_distributed().all_reduce(torch.zeros(1, device=device), group=group)
    return TensorTransport(own=None, generation=0, callers_group=group, device=device, tag=0)


def wire_over_host(own: PrivateGroup, number: int) -> TensorTransport:
    """The way through host memory; the `number` tells the save from one that is still on its way."""
    return TensorTransport(
        own=own,
        generation=own.generation,
        callers_group=None,
        device=_HOST,
        tag=number % _SAVES * TAGS,
    )


def joins_devices(group: Any, device: torch.device) -> bool:
    """Whether there is a way from `device` to `device` over `group`; not collective."""
    if device.type != "cuda":
        return False
    distributed = torch_distributed()
    try:
        name = (group or distributed.group.WORLD)._get_backend(device).name()
    except RuntimeError:
        return False  # the group knows no such device
    return bool(name == "nccl")
