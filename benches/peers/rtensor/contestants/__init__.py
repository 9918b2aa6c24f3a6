"""Contestants: libraries that fetch tensors from another process, one module each.

A contestant has two classes. `Owner(cases)` serves the tensors of these cases from its process; its `place`, a string,
is the address. `Consumer(place)` has `fetch(case)`, which returns the case's tensors, and `forget(case)`, which drops
what the library keeps of them. Some have `put(tensors)`, which stores copies for other processes, and `take_back()`,
which removes them.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["module_of"]

_MODULES = {
    "ours": "tundish_sockets",
    "ours, same node": "tundish_memory",
    "ours, from the buffer": "tundish_buffer",
    "AReaL": "areal_http",
    "Ray": "ray_tensors",
    "Ray, arrays": "ray_arrays",
    "torch RPC": "torch_rpc",
    "pyzmq": "zmq_frames",
    "Arrow Flight": "arrow_flight",
    "gRPC": "grpc_unary",
    "gRPC, one stream": "grpc_stream",
    "sockets": "floor_sockets",
    "reading": "floor_own_memory",
}


def module_of(contestant: str) -> Any:
    """The module of a contestant, imported on demand: no process needs the packages of all."""
    return importlib.import_module(f"rtensor.contestants.{_MODULES[contestant]}")
