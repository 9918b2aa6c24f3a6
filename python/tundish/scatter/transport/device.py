"""From device to device: batches for ranks of other nodes, through the kind of backend that their group has.

Owns a group of the source and those ranks. What always holds:

1. It is used on the caller's thread only, as NCCL and HCCL want it.
2. The head of a batch has come another way before, and all that may fail on the source is done by then.
3. What is sent lives until the device has sent it.
4. It begins and ends on one device of each rank: with another one a communicator would have to be made, for which all
   members would be waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from tundish.distributed import new_subgroup, torch_distributed, unique_name
from tundish.scatter.outgoing_batch import OutgoingBatch

__all__ = ["Direct", "direct_backend"]

# Those whose collectives are of the caller's thread, and between devices.
_BACKENDS = ("nccl", "hccl", "xccl")


def direct_backend(group: Any) -> tuple[str, str] | None:
    """The kind of device and the backend by which the ranks of a process group reach each other's; None without one."""
    distributed = torch_distributed()
    if distributed is None or not distributed.is_initialized():
        return None
    group = distributed.group.WORLD if group is None else group
    if not isinstance(group, distributed.ProcessGroup):
        return None
    for device in group._device_types:
        name = group._get_backend(device).name() if device.type != "cpu" else ""
        if name in _BACKENDS:
            return device.type, name
    return None


class Direct:
    """The way from the source, the first of `members`, to the others, ranks of other nodes. Collective over them.

    Attributes:
        kind: of the devices.
        backend: by which they are reached.
    """

    def __init__(self, kind: str, backend: str, members: tuple[int, ...], timeout: timedelta) -> None:
        self.kind = kind
        self.backend = backend
        name = unique_name("scatter-direct", members)
        self._group = new_subgroup(torch_distributed(), members, name, timeout, backend)
        self._source = members[0]
        self._has_met = False
        self._device: torch.device | None = None
        self._sent: list[Tensor] = []

    def device_for(self, wanted: torch.device | None) -> torch.device:
        """This rank's device on this way: the one that is `wanted` first, else the caller's current one.

        What is on other devices, or wanted there, is copied.
        """
        if self._device is None:
            any_of_kind = torch.device(self.kind)
            device = wanted if wanted is not None and wanted.type == self.kind else any_of_kind
            if device == any_of_kind and self.kind != "cpu":
                device = torch.device(self.kind, torch.get_device_module(device).current_device())
            self._device = device
        return self._device

    def load(self, departure: OutgoingBatch, wanted: torch.device) -> Tensor:
        """The bytes of a batch, shape (size,), uint8; `wanted`: as `device_for` has it."""
        device, layout = self.device_for(wanted), departure.schema.layout
        if departure.is_plain and self.kind != "cpu":
            # Together, in one transfer that goes on while the caller does.
            pinned = torch.empty(departure.size, dtype=torch.uint8, device="cpu", pin_memory=True)
            for place, tensor in zip(layout.tensors_in(pinned), departure.tensors, strict=True):
                place.copy_(tensor)
            return pinned.to(device, non_blocking=True)
        buffer = torch.empty(departure.size, dtype=torch.uint8, device=device)
        for place, tensor in zip(layout.tensors_in(buffer), departure.tensors, strict=True):
            place.copy_(tensor, non_blocking=tensor.is_pinned())
        return buffer

    def send(self, buffers: Mapping[int, Tensor], wanted: torch.device) -> None:
        """Send what `load` made, by rank; to all of those who were told of it."""
        self.meet(wanted)
        distributed = torch_distributed()
        self._exchange([(distributed.isend, buffer, rank) for rank, buffer in buffers.items()])
        # The device may be at it when this returns; it is through with these when it sends the next ones.
        self._sent = list(buffers.values())

    def receive(self, size: int, wanted: torch.device | None) -> Tensor:
        """What the source sends this rank, shape (size,), uint8."""
        self.meet(wanted)
        buffer = torch.empty(size, dtype=torch.uint8, device=self.device_for(wanted))
        self._exchange([(torch_distributed().irecv, buffer, self._source)])
        return buffer

    def meet(self, wanted: torch.device | None) -> None:
        """Collective over the members, once: a communicator's first operation is one that all take part in."""
        if not self._has_met:
            torch_distributed().all_reduce(torch.zeros(1, device=self.device_for(wanted)), group=self._group)
            self._has_met = True

    def _exchange(self, operations: list[tuple[Any, Tensor, int]]) -> None:
        distributed = torch_distributed()
        wanted = [
            distributed.P2POp(call, tensor, rank, self._group)
            for call, tensor, rank in operations
            if tensor.numel()
        ]
        if wanted:
            for work in distributed.batch_isend_irecv(wanted):
                work.wait()
