"""All channels of one rank in a scatter."""

from __future__ import annotations

import contextlib
from typing import Any

from tundish.daemon_thread import DaemonThread
from tundish.distributed import PeerWatch, torch_distributed
from tundish.scatter.transport.device import DeviceChannel
from tundish.scatter.transport.gloo import GlooReceiver, GlooSender
from tundish.scatter.transport.shared_memory import SharedMemoryReceiver, SharedMemorySender

__all__ = ["Channels"]


class Channels:
    """The channels that `rendezvous.connect` made; `close` them.

    Attributes:
        watch: notices when a rank on the other end of a channel is gone.
        sender_rank: the rank that sends this one its batches: the source, or a rank of this node.
        to_node: on the source, to ranks of its node; else to ranks of this node that get the same batch as this one.
        to_other_nodes: on the source, to ranks of other nodes.
        receiver: on all ranks but the source, for the batches that come.
        device: between devices of different nodes, where the group has a backend for that.
        arena: memory for batches that come from other nodes or go there.
        thread: waits in gloo.
    """

    def __init__(self, watch: PeerWatch, sender_rank: int) -> None:
        self.watch = watch
        self.sender_rank = sender_rank
        self.to_node: list[SharedMemorySender] = []
        self.to_other_nodes: list[GlooSender] = []
        self.receiver: SharedMemoryReceiver | GlooReceiver | None = None
        self.device: DeviceChannel | None = None
        self.arena: Any = None
        self.arena_limit = 0
        self.thread = DaemonThread("tundish-scatter")
        self.gloo_group: Any = None

    @property
    def senders(self) -> list[SharedMemorySender | GlooSender]:
        """To all ranks that get their batches from this one."""
        return [*self.to_node, *self.to_other_nodes]

    def close(self) -> None:
        """Close sockets and free memory; not collective. The other ranks see this one leave."""
        self.watch.close()
        for sender in self.to_node:
            sender.close()
        if self.receiver is not None:
            self.receiver.close()
        self.thread.close()
        self.to_node, self.to_other_nodes, self.receiver = [], [], None
        group, self.gloo_group = self.gloo_group, None
        if group is not None:
            # The default group takes all others along when it is destroyed.
            with contextlib.suppress(Exception):
                distributed = torch_distributed()
                if distributed.is_initialized() and group in distributed.distributed_c10d._world.pg_map:
                    distributed.destroy_process_group(group)
