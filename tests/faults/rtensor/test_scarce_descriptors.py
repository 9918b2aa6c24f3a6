"""A process at the end of its descriptors, or of its addresses, goes on, and as before when it has some again."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from typing import Any

import pytest

_BEGIN = """
import os, resource, torch
from tundish import rtensor

def addresses():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

rtensor.serve(limit_bytes=2 << 30)
stored = rtensor.remotize([torch.full((1 << 20,), float(number)) for number in range(32)])
rtensor.localize(stored)
# The first call opens the descriptors that later ones use.
rtensor.remotize(torch.ones(1 << 20))
"""

_ADDRESSES = """
limit = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (addresses() + (8 << 20), limit))
"""


def assert_done(program: str) -> None:
    # A thread's first allocation sets 64 MiB of addresses aside, whenever it comes: after they were counted, say.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.stdout == "done\n", done.stderr[-3000:]


_SMALL = (
    """
small = torch.ones(1 << 18)
rtensor.clear_fetch_buffer()
"""
    + _ADDRESSES
    + """
for _ in range(31):
    rtensor.remotize(small)
print("done")
"""
)


def test_small_tensors_are_stored_where_a_whole_slab_does_not_fit() -> None:
    assert_done(_BEGIN + _SMALL)


def in_buffer_after_a_want(handles: list[Any]) -> tuple[int, int]:
    """Bytes of its own that a consumer has fetched others' into, when it had no descriptors once, and before."""
    from tundish import rtensor

    def fetched_into() -> int:
        return int(rtensor.fetch_buffer_stats()["memory"]["used_bytes"])

    rtensor.localize(handles[0])
    before = fetched_into()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 1, limits[1]))
    filled = []
    try:
        while True:
            filled.append(os.dup(0))
    except OSError:
        with pytest.raises(OSError, match="Too many open files"):
            rtensor.localize(handles[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in filled:
            os.close(descriptor)
    assert rtensor.localize(handles[2])[0] == 2
    return before, fetched_into()


def test_memory_of_owners_is_read_where_it_lies_again_when_there_are_descriptors() -> None:
    from support.rtensor import peer_functions
    from support.rtensor.peers import Peer

    with Peer() as owner, Peer() as consumer:
        stored = [
            handle for start in range(3) for handle in owner.call(peer_functions.make, 1, 1 << 18, start)
        ]
        assert consumer.call(in_buffer_after_a_want, stored) == (0, 0)
