"""Runs one rank a process, and measures their memory from outside.

The memory of a run is the memory of its processes and their children that no file on a disk backs. Shared memory counts
once. Memory from before the first save is subtracted.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measure import family
from processes import Program, rank_environments

CHILD = Path(__file__).with_name("child.py")
# To count the pages of a process holds it up, and what a save takes it keeps for the next one.
_SAMPLING_SECONDS = 0.05


def run_ranks(request: Mapping[str, Any], *, threads: int) -> dict[str, Any]:
    """Run `request` on `request["world"]` ranks of `threads` threads; the first one's reply.

    `memory` is added: the most bytes that the first save took beyond what was held before.

    Raises RuntimeError, with the end of what was said, where a rank fails.
    """
    with contextlib.ExitStack() as stack:
        ranks = [
            # A peer has torch import a package that says it is old.
            stack.enter_context(
                Program(
                    CHILD,
                    json.dumps(request),
                    environment={**environment, "PYTHONWARNINGS": "ignore::FutureWarning"},
                )
            )
            for environment in rank_environments(request["world"], threads=threads)
        ]
        first = ranks[0]
        first.expect("ready")
        before = peak = _memory_of(ranks)

        def look() -> None:
            nonlocal peak
            peak = max(peak, _memory_of(ranks))

        first.say("go")
        first.expect("warm", look, _SAMPLING_SECONDS)
        reply: dict[str, Any] = json.loads(first.hear(f"the saves of {request['contestant']}"))
        for rank in ranks:
            rank.wait()
    return {**reply, "memory": peak - before}


def _memory_of(ranks: list[Program]) -> int:
    return sum(_own_memory(process) for rank in ranks for process in family(rank.pid))


def _own_memory(process: int) -> int:
    """Bytes that no file stands behind; what several processes share is divided among them."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines[1:]}
    return sizes["Pss_Anon"] + sizes["Pss_Shmem"]
