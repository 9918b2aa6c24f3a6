"""Contestants: libraries that fetch tensors from another process, one module each.

A contestant has two classes. `Owner(cases)` serves the tensors of these cases from its process; its `place`, a string,
is the address. `Consumer(place)` has `fetch(case)`, which returns the case's tensors, and `forget(case)`, which drops
what the library keeps of them. Some have `put(tensors)`, which stores copies for other processes, and `take_back()`,
which removes them.
"""

from __future__ import annotations

import importlib
from typing import Any

# The module of each contestant, and its class of consumers.
_CONSUMERS = {
    "ours": ("tundish_rtensor", "SocketConsumer"),
    "ours, same node": ("tundish_rtensor", "SharedMemoryConsumer"),
    "ours, from the buffer": ("tundish_rtensor", "BufferConsumer"),
    "AReaL": ("areal_http", "Consumer"),
    "Ray": ("ray_object_store", "TensorConsumer"),
    "Ray, arrays": ("ray_object_store", "ArrayConsumer"),
    "torch RPC": ("torch_rpc", "Consumer"),
    "pyzmq": ("zmq_frames", "Consumer"),
    "Arrow Flight": ("arrow_flight", "Consumer"),
    "gRPC": ("grpc_calls", "UnaryConsumer"),
    "gRPC, one stream": ("grpc_calls", "StreamConsumer"),
    "sockets": ("floor_sockets", "Consumer"),
    "reading": ("floor_own_memory", "Consumer"),
}


def owner_class(contestant: str) -> Any:
    """The class of a contestant's owners."""
    return _module(contestant).Owner


def consumer_class(contestant: str) -> Any:
    """The class of a contestant's consumers."""
    return getattr(_module(contestant), _CONSUMERS[contestant][1])


def _module(contestant: str) -> Any:
    # Imported on demand: no process needs the packages of all.
    return importlib.import_module(f"rtensor.contestants.{_CONSUMERS[contestant][0]}")
