"""A process at the end of its descriptors, or of its addresses, gives back what it keeps warm, and goes on."""

from __future__ import annotations

import subprocess
import sys

import pytest

_BEGIN = """
import os, resource, torch
from tundish import rtensor

def descriptors():
    return len(os.listdir("/proc/self/fd"))

def addresses():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

rtensor.serve(limit_bytes=2 << 30)
stored = rtensor.remotize([torch.full((1 << 20,), float(number)) for number in range(32)])
rtensor.localize(stored)
# What was taken for the first time was taken.
rtensor.remotize(torch.ones(1 << 20))
large = torch.full((16 << 20,), 7.0)
"""

_DESCRIPTORS = """
begun = descriptors()
limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
filled = []
resource.setrlimit(resource.RLIMIT_NOFILE, (begun + 8, limit))
try:
    while True:
        filled.append(os.dup(0))
except OSError:
    pass
"""

_ADDRESSES = """
limit = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (addresses() + (8 << 20), limit))
"""

_END = """
handle = rtensor.remotize(large)
assert rtensor.localize(handle)[-1] == 7
print("done")
"""


@pytest.mark.parametrize("want", [_DESCRIPTORS, _ADDRESSES], ids=["descriptors", "addresses"])
def test_what_is_kept_warm_makes_room(want: str) -> None:
    program = _BEGIN + want + _END
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "done\n", done.stderr[-3000:]
