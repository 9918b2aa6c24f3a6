"""Failpoints for processes that a test starts: system calls that kill the process, fail or panic.

The compiled module of a checkout has them, a wheel has not. `rust/commit/src/failpoints.rs` says what they do. A
process reads its setting from the environment at its first system call that changes a disk.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SystemCall:
    """One system call among those of a process: the `number`th of this operation on this path, from 0."""

    operation: str
    path: str
    number: int

    @property
    def sort(self) -> tuple[str, str]:
        """The part of it that is the same for another step, file or folder."""
        path = re.sub(r"\d+", "N", self.path).replace("dcp-", "hf-")
        return self.operation, re.sub(r"(\.removed-N/).*", r"\1", path)


def system_calls(trace: Path) -> list[SystemCall]:
    """The calls of a process that wrote a trace, but for the heartbeats."""
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    for line in trace.read_text().splitlines():
        operation, path, _ = line.split("\t")
        # The random part of a name.
        path = re.sub(r"\.[0-9a-f]{16}\.", ".*.", path)
        found.append(SystemCall(operation, path, seen[operation, path]))
        seen[operation, path] += 1
    return [call for call in found if not (call.path.endswith("/.owner") and call.number > 0)]


def environment(call: SystemCall, fault: str) -> dict[str, str]:
    """The setting that makes a call of a process fail; `fault` counts among the calls that `call` is one of."""
    return {
        "TUNDISH_FAILPOINT": fault,
        "TUNDISH_FAILPOINT_OF": f"{call.operation}\t{call.path}",
    }


def arm(setting: dict[str, str]) -> None:
    """Set the failpoints of this process, which has not changed a disk yet."""
    from tundish import _native

    assert _native.HAS_FAILPOINTS, "the compiled module has no failpoints: run the tests with `make test`"
    os.environ |= setting
