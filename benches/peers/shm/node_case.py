"""One array for all ranks of a node: how long it takes, and how often it lies in memory.

In each round the ranks are new processes, which share the array once through each contestant. The time is that of the
slowest rank; the memory is the sum over all ranks.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from processes import rank_environments, run_programs
from report import Row, Section, duration, size

from shm.cases import Plan

_FORMS = {"ours": "td.shm.node_shared", "file": "np.save to memory, barrier, np.load(mmap_mode)"}
_CHILD = Path(__file__).with_name("node_child.py")
# A folder in memory.
_MEMORY = Path("/dev/shm")


def node(plan: Plan) -> Section:
    """An array that one rank has, on all ranks."""
    section = Section(
        title=f"{size(plan.node_bytes)} on {plan.ranks} ranks of a node",
        note="The first rank has the array, in memory of its own; until the slowest rank has it too. The floor is one "
        "copy, by one thread, into shared pages that nobody used before. Memory is the proportional set size of all "
        "ranks when each has summed the array, above what they held before: the first rank's own array is not in it.",
    )
    seconds: dict[str, list[float]] = defaultdict(list)
    held: dict[str, list[int]] = defaultdict(list)
    for number in range(plan.node_rounds):
        print(f"bench: node: round {number + 1}", file=sys.stderr, flush=True)
        forms = list(_FORMS) if number % 2 else list(reversed(_FORMS))
        with tempfile.TemporaryDirectory(dir=_MEMORY, prefix="bench-") as folder:
            request = {"array_bytes": plan.node_bytes, "forms": forms, "folder": folder}
            replies = run_programs(_CHILD, request, rank_environments(plan.ranks))
        seconds["copy"].append(replies[0]["copy"])
        for form in forms:
            seconds[form].append(max(reply[form]["seconds"] for reply in replies))
            held[form].append(sum(reply[form]["held"] for reply in replies))
    copy = min(seconds["copy"])
    for form, name in _FORMS.items():
        took = min(seconds[form])
        section.rows.append(
            Row(
                case=f"time, {name}",
                ours=duration(took),
                peer="one copy into fresh shared pages",
                peers=duration(copy),
                figure=f"{took / copy:.3g}×",
            )
        )
    for form, name in _FORMS.items():
        most = max(held[form])
        section.rows.append(
            Row(
                case=f"memory, {name}",
                ours=size(most),
                peer="the array",
                peers=size(plan.node_bytes),
                figure=f"{most / plan.node_bytes:.3g}×",
            )
        )
    return section
