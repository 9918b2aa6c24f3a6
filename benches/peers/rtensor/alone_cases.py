"""The measures of one process alone: drains, and handles as bytes. Owns their targets."""

from __future__ import annotations

import contextlib

from report import Row, Section, duration

from rtensor.actors import Process
from rtensor.cases import Plan

__all__ = ["drains", "handles"]

_AREAL = "AReaL"


def drains(plan: Plan) -> Section:
    """Drains of many entries."""
    section = Section(
        title="Drains",
        note="By step: the end of a step() that fetched so many of another process; how long it holds the lock that "
        "fetches need is in the bench in Rust. By ids: clear_fetch_buffer, while "
        "another thread of the process fetches one that is in the buffer, again and again, and the longest that it "
        "waits.",
    )
    many, some = (10**6, 10**5) if plan.judges else (10**4, 10**3)
    with contextlib.closing(Process("alone.py")) as owner:
        stored = owner.ask("store", many)
        step = min(_answer("drain_by_step", stored)["seconds"] for _ in range(plan.rounds))
    section.rows.append(
        Row(
            case=f"{many} entries, by step",
            ours=duration(step),
            peer="–",
            peers="–",
            figure=duration(step),
            target="≤ 1 ms" if plan.judges else "–",
            met=step <= 1e-3 if plan.judges else None,
        )
    )
    with contextlib.closing(Process("alone.py")) as owner:
        stored = owner.ask("store", some)
        found = {
            way: [_answer("drain_by_ids", way, some, stored) for _ in range(plan.rounds)]
            for way in ("ours", _AREAL)
        }
    for what, least in (("stall", 50.0), ("seconds", None)):
        ours, theirs = (min(one[what] for one in found[way]) for way in ("ours", _AREAL))
        judged = plan.judges and least is not None
        section.rows.append(
            Row(
                case=f"{some} entries, by ids: {'a fetch meanwhile' if what == 'stall' else 'the call'}",
                ours=duration(ours),
                peer=_AREAL,
                peers=duration(theirs),
                figure=f"{theirs / ours:.3g}×",
                target=f"≥ {least:g}×" if judged else "–",
                met=theirs / ours >= least if judged and least is not None else None,
            )
        )
    return section


def handles(plan: Plan) -> Section:
    """Handles as bytes."""
    section = Section(
        title="Handles, dumps and loads",
        note="Of tensors of one call; AReaL's serialize_value and orjson, and back.",
    )
    count = 10**5 if plan.judges else 10**3
    found = {way: [_answer("handles", way, count) for _ in range(plan.rounds)] for way in ("ours", _AREAL)}
    ours, theirs = (min(one["seconds"] for one in found[way]) for way in ("ours", _AREAL))
    size, other_size = (found[way][0]["bytes"] / count for way in ("ours", _AREAL))
    section.rows += [
        Row(
            case=f"{count} handles",
            ours=duration(ours),
            peer=_AREAL,
            peers=duration(theirs),
            figure=f"{theirs / ours:.3g}×",
            target="≥ 100×" if plan.judges else "–",
            met=theirs / ours >= 100 if plan.judges else None,
        ),
        Row(
            case="bytes a handle",
            ours=f"{size:.3g}",
            peer=_AREAL,
            peers=f"{other_size:.3g}",
            figure=f"{size:.3g}",
            target="≤ 40" if plan.judges else "–",
            met=size <= 40 if plan.judges else None,
        ),
    ]
    return section


def _answer(what: str, *arguments: object) -> dict[str, float]:
    """Of a process of its own."""
    with contextlib.closing(Process("alone.py")) as process:
        answer: dict[str, float] = process.ask(what, *arguments)
        return answer
