"""How parts of tensors travel between ranks: between devices over the caller's group, or through host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tundish.checkpoint.private_group import PrivateGroup
from tundish.distributed import torch_distributed

__all__ = ["NO_TRANSPORT", "TAGS", "TensorTransport", "device_transport", "host_transport", "joins_devices"]

# Message tags of one save; tags have 31 bits.
TAGS = 1 << 20
_SAVES = 1 << 11
_HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class TensorTransport:
    """How parts travel.

    Attributes:
        private: the group for host memory. None: parts travel over `callers_group`, on the caller's thread.
        generation: of the private group.
        callers_group: the process group of the user.
        device: where the parts are sent from and received.
        tag: the first message tag; no two saves at a time have the same.
    """

    private: PrivateGroup | None
    generation: int
    callers_group: Any
    device: torch.device
    tag: int

    @property
    def group(self) -> Any:
        """The `ProcessGroup`; raises `PeerFailedError` where it was closed."""
        return self.callers_group if self.private is None else self.private.of_generation(self.generation)

    def close(self) -> None:
        """Close the private group in the middle of an exchange, so that the other ranks fail at once."""
        if self.private is not None:
            self.private.close(self.generation)


# Where no tensor is sharded.
NO_TRANSPORT = TensorTransport(private=None, generation=0, callers_group=None, device=_HOST, tag=0)


def device_transport(group: Any, device: torch.device) -> TensorTransport | None:
    """Collective over `group`, on the caller's thread: between devices; None where the group has no way."""
    if not joins_devices(group, device):
        return None
    # NCCL connects at the first call, for which all ranks of the group have to come.
    torch_distributed().all_reduce(torch.zeros(1, device=device), group=group)
    return TensorTransport(private=None, generation=0, callers_group=group, device=device, tag=0)


def host_transport(private: PrivateGroup, number: int) -> TensorTransport:
    """Through host memory. `number`: of the save, apart from one that still travels."""
    return TensorTransport(
        private=private,
        generation=private.generation,
        callers_group=None,
        device=_HOST,
        tag=number % _SAVES * TAGS,
    )


def joins_devices(group: Any, device: torch.device) -> bool:
    """Whether `group` sends between CUDA devices; not collective."""
    if device.type != "cuda":
        return False
    distributed = torch_distributed()
    try:
        name = (group or distributed.group.WORLD)._get_backend(device).name()
    except RuntimeError:
        return False  # the group knows no such device
    return bool(name == "nccl")
