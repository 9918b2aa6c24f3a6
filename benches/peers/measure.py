"""Measures time and memory, and describes the machine.

Each round runs every contestant once, so that a drift of the machine affects all of them. The reported time is the
minimum of all rounds.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from processes import Program

# Resident pages count if no file on a disk backs them: private memory and shared memory.
COUNTED_FIELDS = ("RssAnon", "RssShmem")
SAMPLING_SECONDS = 0.002


class Seconds(float):
    """The least of several times. `spread`: by what share of it the largest is more."""

    spread: float = 0.0

    @classmethod
    def least(cls, times: list[float]) -> Seconds:
        made = cls(min(times))
        made.spread = max(times) / made - 1
        return made


@dataclass(frozen=True)
class Contestant:
    """One implementation to time. `prepare`, `clean_up` and `digest` (of each result) are not timed."""

    call: Callable[[], Any]
    digest: Callable[[Any], Any]
    prepare: Callable[[], None] = lambda: None
    clean_up: Callable[[], None] = lambda: None


class OutputsDiffer(RuntimeError):
    """Two results that must be equal are not."""


def race(contestants: Mapping[str, Contestant], rounds: int) -> dict[str, Seconds]:
    """Return the minimum seconds of each contestant over interleaved rounds.

    Raises:
        OutputsDiffer: The digest of a contestant's result changed between rounds.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    digests: dict[str, Any] = {}
    for _ in range(rounds):
        for name, contestant in contestants.items():
            contestant.prepare()
            begin = time.perf_counter()
            result = contestant.call()
            times[name].append(time.perf_counter() - begin)
            digest = contestant.digest(result)
            # Freed here, so that no contestant's time includes freeing another's memory.
            del result
            contestant.clean_up()
            if digests.setdefault(name, digest) != digest:
                raise OutputsDiffer(
                    f"{name}: the result changed between rounds, from {digests[name]} to {digest}"
                )
    return {name: Seconds.least(each) for name, each in times.items()}


def counted_memory(process_id: int) -> int:
    """Return the resident bytes of a process that no file on a disk backs; 0 after it has exited."""
    try:
        status = Path(f"/proc/{process_id}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in COUNTED_FIELDS if name in fields)


def run_child(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run pack_child.py on `request` and return its reply, with `peak`: its peak memory above the baseline, in bytes.

    The baseline is the child's memory when it prints "ready". This process samples the memory, because a sampling
    thread in the child would compete with the work for the GIL.
    """
    with Program(Path(__file__).parent / "packing" / "pack_child.py", json.dumps(request)) as child:
        child.expect("ready")
        baseline = peak = counted_memory(child.pid)

        def look() -> None:
            nonlocal peak
            peak = max(peak, counted_memory(child.pid))

        child.say("go")
        reply = json.loads(child.hear(str(request), look, SAMPLING_SECONDS))
        child.wait()
    return {**reply, "peak": peak - baseline}


def family(process: int) -> list[int]:
    """Return the IDs of a process and all its descendants, the process first."""
    members = [process]
    for parent in members:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                members += [int(child) for child in children.read_text().split()]
            except (FileNotFoundError, ProcessLookupError):
                continue
    return members


def file_system(folder: Path) -> str:
    """Return the type of the file system of `folder`, such as "ext4"."""
    kinds: dict[str, str] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, kind = line.split(" - ", 1)
        kinds[mount.split()[4]] = kind.split()[0]
    resolved = folder.resolve()
    return next(kinds[str(parent)] for parent in (resolved, *resolved.parents) if str(parent) in kinds)


def describe_machine(folder: Path, packages: Sequence[str]) -> list[tuple[str, str]]:
    """Return the hardware, the system and the versions of packages, as names and values."""
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
