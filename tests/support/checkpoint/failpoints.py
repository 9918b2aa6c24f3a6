"""The compiled module with its failpoints, for processes that a test starts.

It is built beside the one that users get and never installed: a process of a test loads it in place of the other,
before it uses tundish. What the failpoints do is said in `rust/commit/src/disk/failpoints.rs`.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_NAME = "tundish._native"
_CHECKOUT = Path(__file__).parents[3]


@functools.cache
def built() -> Path:
    """The module with failpoints; compiled where anything changed."""
    command = ["cargo", "build", "--locked", "--package", "tundish-python", "--features", "failpoints"]
    environment = {name: value for name, value in os.environ.items() if name != "CONDA_PREFIX"}
    # As the Makefile has it: with another interpreter cargo would compile everything again.
    environment["VIRTUAL_ENV"] = sys.prefix
    finished = subprocess.run(
        [*command, "--message-format", "json-render-diagnostics"],
        cwd=_CHECKOUT,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    messages = [json.loads(line) for line in finished.stdout.splitlines()]
    (library,) = [
        name
        for message in messages
        if message["reason"] == "compiler-artifact" and message["target"]["name"] == "_native"
        for name in message["filenames"]
    ]
    return Path(library)


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


def load(library: Path) -> None:
    """In a process that has not used tundish yet: make this module its compiled one."""
    # Modules that the fork server of the tests imported, with the other one.
    for name in [name for name in sys.modules if name.partition(".")[0] == "tundish"]:
        del sys.modules[name]
    specification = importlib.util.spec_from_file_location(_NAME, library)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[_NAME] = module
    specification.loader.exec_module(module)
