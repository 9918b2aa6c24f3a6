"""Two nodes on one machine: network namespaces that a link of a given rate joins.

Invariants:
- The namespaces are removed when the context ends. If a bench is killed, the next one removes them, by the process id
  in their names.
- The link is in no namespace of others.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

_RATE = "1gbit"
# Bytes a second, with headers.
_LINK_BYTES = 125_000_000
# Bytes that the link passes at once after a pause: one TCP packet as the kernel hands it on, in 64 KiB.
_BURST_BYTES = 72 * 1024
_PREFIX = "tundish-bench-"
_DEVICE = "wire"
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
# In a namespace of its own any port is free.
_PORT = "29500"


class NamespacesUnavailable(Exception):
    """This machine cannot make the nodes; the message says why."""


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[str, str]]:
    """The names of two namespaces. Raises NamespacesUnavailable."""
    if os.geteuid() != 0:
        raise NamespacesUnavailable("network namespaces take root")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NamespacesUnavailable(f"{' and '.join(missing)} missing: run `apt-get install iproute2`")
    _remove_leftovers()
    first, second = names = f"{_PREFIX}{os.getpid()}-0", f"{_PREFIX}{os.getpid()}-1"
    try:
        for command in setup_commands(first, second):
            _run(command)
        yield names
    finally:
        # A failure may leave one of them.
        for name in sorted({*names} & {*_namespaces()}):
            _run(["ip", "netns", "delete", name])


def setup_commands(first: str, second: str) -> list[list[str]]:
    """The commands that make two namespaces and the link between them."""
    names = first, second
    veth = "type", "veth", "peer", "name", _DEVICE, "netns", second
    shape = "tbf", "rate", _RATE, "burst", str(_BURST_BYTES), "latency", "50ms"
    commands = [
        *(["ip", "netns", "add", name] for name in names),
        ["ip", "link", "add", "name", _DEVICE, "netns", first, *veth],
    ]
    for name, address in zip(names, _ADDRESSES, strict=True):
        inside = ["ip", "-n", name]
        commands += [
            [*inside, "address", "add", f"{address}/30", "dev", _DEVICE],
            # Ranks of one node reach each other through it.
            [*inside, "link", "set", "dev", "lo", "up"],
            [*inside, "link", "set", "dev", _DEVICE, "up"],
            ["tc", "-n", name, "qdisc", "add", "dev", _DEVICE, "root", *shape],
        ]
    return commands


def command_prefix(name: str) -> list[str]:
    """The words before a command that runs it in a namespace."""
    return ["ip", "netns", "exec", name]


def two_node_environments(ranks_a_node: int) -> list[dict[str, str]]:
    """The environment variables that torchrun sets for the ranks of two nodes."""
    return [
        {
            "RANK": str(node * ranks_a_node + local),
            "LOCAL_RANK": str(local),
            "GROUP_RANK": str(node),
            "WORLD_SIZE": str(len(_ADDRESSES) * ranks_a_node),
            "LOCAL_WORLD_SIZE": str(ranks_a_node),
            "GROUP_WORLD_SIZE": str(len(_ADDRESSES)),
            "MASTER_ADDR": _ADDRESSES[0],
            "MASTER_PORT": _PORT,
            "GLOO_SOCKET_IFNAME": _DEVICE,
            "OMP_NUM_THREADS": "1",
        }
        for node in range(len(_ADDRESSES))
        for local in range(ranks_a_node)
    ]


def min_link_seconds(count_of_bytes: int) -> float:
    """The minimum time in which the link passes so many bytes, without headers."""
    return max(0, count_of_bytes - _BURST_BYTES) / _LINK_BYTES


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run(["ip", "netns", "list"]).splitlines()]


def _remove_leftovers() -> None:
    for name in _namespaces():
        process = name.removeprefix(_PREFIX).partition("-")[0]
        if name.startswith(_PREFIX) and not Path("/proc", process).exists():
            _run(["ip", "netns", "delete", name])


def _run(command: list[str]) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise NamespacesUnavailable(f"`{' '.join(command)}` says: {' '.join(ran.stderr.split())}")
    return ran.stdout
