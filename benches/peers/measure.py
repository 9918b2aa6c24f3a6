"""How time, memory and the machine are measured.

Owns the clock, the interleaving of the contestants and the reading of /proc. Always holds: in each round
every contestant runs once, so that a drift of the machine meets all alike; a contestant's earlier result is
freed before its next call; the time reported is the least of all rounds.
"""

from __future__ import annotations

import json
import os
import platform
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

# A resident page counts whether it is private memory or shared memory that no file on a disk stands behind.
COUNTED_FIELDS = ("RssAnon", "RssShmem")
SAMPLING_SECONDS = 0.002


@dataclass(frozen=True)
class Contestant:
    """One way of doing the work. `prepare` and `clean_up` run outside the clock, `digest` on each result."""

    call: Callable[[], Any]
    digest: Callable[[Any], Any]
    prepare: Callable[[], None] = lambda: None
    clean_up: Callable[[], None] = lambda: None


class OutputsDiffer(RuntimeError):
    """Two contestants that should agree do not."""


def race(contestants: Mapping[str, Contestant], rounds: int) -> dict[str, float]:
    """Least seconds of each contestant over `rounds` interleaved rounds.

    The digest of every result is taken outside the clock and must be the same in all rounds of a contestant.
    Raises OutputsDiffer where it is not.
    """
    seconds = {name: float("inf") for name in contestants}
    digests: dict[str, Any] = {}
    for _ in range(rounds):
        for name, contestant in contestants.items():
            contestant.prepare()
            begin = time.perf_counter()
            result = contestant.call()
            seconds[name] = min(seconds[name], time.perf_counter() - begin)
            digest = contestant.digest(result)
            # Freed before the next contestant runs, so that nobody's clock includes another's memory.
            del result
            contestant.clean_up()
            if digests.setdefault(name, digest) != digest:
                raise OutputsDiffer(
                    f"{name} gave another result in a later round: {digest} after {digests[name]}"
                )
    return seconds


def counted_memory(process_id: int) -> int:
    """Bytes of resident memory that no file on a disk stands behind; 0 once the process is gone."""
    try:
        status = Path(f"/proc/{process_id}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in COUNTED_FIELDS if name in fields)


def run_child(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run pack_child.py on `request`; its reply, with `peak` added: bytes above what it held before its first call.

    The child says "ready" and waits, so that what it holds then is the baseline; it is sampled from outside every
    SAMPLING_SECONDS, because a thread of its own would share its interpreter with the work.
    """
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "packing" / "pack_child.py"), json.dumps(request)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdin is not None and child.stdout is not None
        if child.stdout.readline() != "ready\n":
            raise RuntimeError(f"pack_child.py did not start for {request}; its error is above")
        baseline = counted_memory(child.pid)
        peak = baseline
        child.stdin.write("go\n")
        child.stdin.flush()
        # The reply is one line after a silence, so a readable pipe means that the work is over (or the child is).
        while not select.select([child.stdout], [], [], SAMPLING_SECONDS)[0]:
            peak = max(peak, counted_memory(child.pid))
        reply = child.stdout.readline()
    if child.returncode != 0:
        raise RuntimeError(f"pack_child.py ended with {child.returncode} for {request}; its error is above")
    return {**json.loads(reply), "peak": peak - baseline}


def family(process: int) -> list[int]:
    """A process and all below it, itself first."""
    members = [process]
    for parent in members:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                members += [int(child) for child in children.read_text().split()]
            except (FileNotFoundError, ProcessLookupError):
                continue
    return members


def file_system(folder: Path) -> str:
    """Type of the file system that holds `folder`, such as ext4."""
    kinds: dict[str, str] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, kind = line.split(" - ", 1)
        kinds[mount.split()[4]] = kind.split()[0]
    resolved = folder.resolve()
    return next(kinds[str(parent)] for parent in (resolved, *resolved.parents) if str(parent) in kinds)


def describe_machine(folder: Path, packages: Sequence[str]) -> list[tuple[str, str]]:
    """What a reader needs to judge the figures: hardware, system, versions."""
    model = next(
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.lower().startswith(("model name", "cpu part"))
    )
    memory = int(Path("/proc/meminfo").read_text().split()[1]) / 2**20
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return [
        ("Date", datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")),
        ("Processor", f"{model}, {len(os.sched_getaffinity(0))} cores ({platform.machine()})"),
        ("Memory", f"{memory:.0f} GiB"),
        ("Kernel", f"{platform.system()} {platform.release()}"),
        ("Transparent huge pages", huge_pages.read_text().strip() if huge_pages.exists() else "none"),
        ("File system", file_system(folder)),
        ("Python", platform.python_version()),
        ("Packages", ", ".join(f"{name} {version(name)}" for name in packages)),
    ]
