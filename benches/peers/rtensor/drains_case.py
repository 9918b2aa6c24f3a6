"""The rows of the rtensor bench within one process: drains."""

from __future__ import annotations

import contextlib

from measure import Seconds
from report import Row, Section, compared, duration

from rtensor.cases import Plan
from rtensor.processes import Process

_AREAL = "AReaL"


def drains(plan: Plan) -> Section:
    """Drains of many entries."""
    section = Section(
        title="Drains",
        note="By step: the end of a step() that fetched so many tensors; the Rust bench has the time for which it "
        "holds the lock of fetches. By ids: clear_fetch_buffer, and the longest stall of another thread that fetches "
        "from the buffer meanwhile.",
    )
    many, some = plan.drained
    with contextlib.closing(Process("drains_child.py")) as owner:
        stored = owner.ask("store", many)
        step = min(_answer("drain_by_step", stored)["seconds"] for _ in range(plan.rounds))
    section.rows.append(
        Row(
            case=f"{many} entries, by step",
            ours=duration(step),
            peer="–",
            peers="–",
            figure=duration(step),
        )
    )
    with contextlib.closing(Process("drains_child.py")) as owner:
        stored = owner.ask("store", some)
        found = {
            contestant: [_answer("drain_by_ids", contestant, some, stored) for _ in range(plan.rounds)]
            for contestant in ("ours", _AREAL)
        }
    for what in ("stall", "seconds"):
        ours, theirs = (
            Seconds.least([one[what] for one in found[contestant]]) for contestant in ("ours", _AREAL)
        )
        call = "a fetch meanwhile" if what == "stall" else "the call"
        section.rows.append(compared(f"{some} entries, by ids: {call}", ours, _AREAL, theirs))
    return section


def _answer(what: str, *arguments: object) -> dict[str, float]:
    """The answer of a new process."""
    with contextlib.closing(Process("drains_child.py")) as process:
        answer: dict[str, float] = process.ask(what, *arguments)
        return answer
