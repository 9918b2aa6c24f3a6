"""Ways to get tensors from the process that has them, each in a module of its own.

A way has two classes. `Owner(cases)` serves the tensors of these cases from the process that makes it; its `place`, a
text, says where. `Consumer(place)` has `fetch(case)`, the case's tensors, and `forget(case)`, which drops what the way
keeps of them. Some have `put(tensors)`, which leaves copies of tensors where others get at them, and `take_back()`,
which removes these.
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
    "sockets": "bare_sockets",
    "reading": "own_memory",
}


def module_of(way: str) -> Any:
    """The module of a way. Imported where it is asked for: nobody needs the packages of all."""
    return importlib.import_module(f"rtensor.ways.{_MODULES[way]}")
