"""The measurements of pools: contestants and repeats.

In each round every pool runs in a process of its own, one after the other, so that a drift of the machine affects all
of them. A row has the minimum time of all rounds on both sides, and the maximum memory. The process that submits a task
checks its result; a wrong result ends the bench.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure import Seconds
from processes import run_programs
from report import Row, Section, compared, duration, rate, size

from shm.contestants import CONTESTANTS, LOKY

OURS, QUEUES, EXECUTOR = "ours", "queues", "executor"
FLOORS, BARE = "floors", "bare workers"
_METHODS = ("fork", "spawn")
_CHILD = Path(__file__).with_name("child.py")

_ARRAY_SHARE = 1.03
_WORKER_BYTES = 25 << 20
# Their tasks carry the array, so they do not measure results.
_NO_RESULTS = ("executor each",)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The size of a run: the full bench or a smoke test."""

    array_bytes: int = 256 << 20
    workers: int = 2
    readers: tuple[int, ...] = (2, 8)
    rounds: int = 3
    # A process binds once.
    binding_rounds: int = 5
    reading_rounds: int = 2
    repeats: int = 2
    seconds: float = 0.4
    results: Mapping[str, int] = field(default_factory=lambda: {"large": 24, "small": 480})
    contestants: tuple[str, ...] = tuple(CONTESTANTS)
    ranks: int = 8
    node_bytes: int = 1 << 30
    node_rounds: int = 5


# All values of one contestant, by measurement.
Found = dict[str, list[float]]


def measure(name: str, plan: Plan) -> list[Section]:
    """Run one measurement."""
    return [{"tasks": _tasks, "results": _results, "binding": _binding, "readers": _readers}[name](plan)]


def _gather(
    plan: Plan, measure: str, contestants: Sequence[str], rounds: int, **more: Any
) -> dict[tuple[str, str], Found]:
    """Return the values of all rounds by contestant and start method, lower bounds included."""
    found: dict[tuple[str, str], Found] = {}
    methods = more.pop("methods", ("fork",))
    for _ in range(rounds):
        for contestant in contestants:
            known = contestant in CONTESTANTS
            for method in _methods_of(contestant, methods) if known else ("",):
                request = {
                    "measures": [measure if known else contestant],
                    "contestant": contestant,
                    "method": method,
                    "array_bytes": plan.array_bytes,
                    "workers": plan.workers,
                    "repeats": plan.repeats,
                    "seconds": plan.seconds,
                    "results": dict(plan.results),
                    **more,
                }
                print(f"bench: {measure}: {contestant} {method}", file=sys.stderr, flush=True)
                [reply] = run_programs(_CHILD, request)[0].values()
                for name, values in reply.items():
                    found.setdefault((contestant, method), {}).setdefault(name, []).extend(values)
    return found


def _methods_of(contestant: str, methods: Iterable[str]) -> list[str]:
    """Return the start methods that a contestant supports, or its own one."""
    own = CONTESTANTS[contestant].methods
    return [method for method in methods if method in own] or list(own)


def _least(found: Mapping[tuple[str, str], Found], name: str, method: str = "fork") -> dict[str, float]:
    """Return the minimum of each contestant, in the order of the contestants."""
    return {
        contestant: Seconds.least(values[name])
        for (contestant, own), values in found.items()
        if own in (method, LOKY, "") and name in values
    }


def _as_rate(seconds: float) -> str:
    return f"{rate(1 / seconds)} ({duration(seconds)})"


def _tasks(plan: Plan) -> Section:
    section = Section(
        title=f"An empty task, {plan.workers} workers",
        note=f"A pool bound to an array of {size(plan.array_bytes)}; the task gives back its item and the worker's "
        "process id in one integer. Unchunked: `map` with every task sent on its own, the results in a list. Chunked: "
        'as the pool chunks of itself (`chunksize="auto"`, `Pool.map`, `batch_size="auto"`), for the executor as '
        "`Pool.map` does. Latency: one task after the other, `submit(item).result()`, `apply(item)`, or "
        "`Parallel` on one task. Of the floors, a call is the task in a list comprehension without any pool, and the "
        "pipe a byte to another process and one back.",
    )
    found = _gather(plan, "tasks", (*plan.contestants, FLOORS), plan.rounds)
    each, chunked, one = (_least(found, name) for name in ("each", "chunked", "one"))
    floors = found[FLOORS, ""]
    for contestant in plan.contestants:
        if contestant != OURS:
            section.rows.append(
                compared(
                    "unchunked",
                    each[OURS],
                    CONTESTANTS[contestant].name,
                    each[contestant],
                    show=_as_rate,
                )
            )
    ratio = each[EXECUTOR] / each[QUEUES]
    section.rows.append(
        Row(
            case="unchunked, two-queue pool",
            ours="–",
            peer=f"over {CONTESTANTS[EXECUTOR].name}, {_as_rate(each[EXECUTOR])}",
            peers=_as_rate(each[QUEUES]),
            figure=f"{ratio:.3g}×",
        )
    )
    speed = 1 / chunked[OURS]
    section.rows.append(
        Row(
            case="chunked",
            ours=_as_rate(chunked[OURS]),
            peer="–",
            peers="–",
            figure=rate(speed),
        )
    )
    section.rows += [
        compared("chunked", chunked[OURS], CONTESTANTS[contestant].name, chunked[contestant], show=_as_rate)
        for contestant in plan.contestants
        if contestant not in (OURS, QUEUES)
    ]
    section.rows.append(
        compared(
            "chunked",
            chunked[OURS],
            "a call, the floor of one process",
            min(floors["call"]),
            show=_as_rate,
        )
    )
    section.rows += [
        compared("latency", one[OURS], CONTESTANTS[contestant].name, one[contestant])
        for contestant in plan.contestants
        if contestant != OURS
    ]
    section.rows.append(
        compared("latency", one[OURS], "a pipe there and back, the floor", min(floors["trip"]))
    )
    return section


def _results(plan: Plan) -> Section:
    section = Section(
        title=f"Arrays as results, {plan.workers} workers",
        note="The task copies a part of the bound array and stamps it; `map`, every task on its own, each result "
        "let go of when the next is there. The time is that of a result, its share of all; one element of each of "
        "its pages is read inside the clock, all of them in a run before it. Where multiprocessing.shared_memory "
        "brings the results, the caller copies them out, since nothing tells it when a view is gone. The floor is "
        "one copy into shared pages that were used before.",
    )
    contestants = [contestant for contestant in plan.contestants if contestant not in _NO_RESULTS]
    found = _gather(plan, "results", (*contestants, FLOORS), plan.rounds)
    for name, said in (("large", "16 MiB"), ("small", "400 KiB")):
        least = _least(found, name)
        section.rows += [
            compared(said, least[OURS], CONTESTANTS[contestant].name, least[contestant])
            for contestant in contestants
            if contestant != OURS
        ]
        section.rows.append(compared(said, least[OURS], "one copy, the floor", least[FLOORS]))
    return section


def _binding(plan: Plan) -> Section:
    section = Section(
        title=f"Binding {size(plan.array_bytes)}, {plan.workers} workers",
        note="The constructor: until the call returns. First result: until a task that looks at both ends of the "
        "array is back, which is where a pool that starts late has to have everything. What the array adds is that "
        "time less the same for an array of one page. One in a process, after two pools with an array of one page. "
        "The floor is one copy, by one thread, into shared pages that nobody used before.",
    )
    found = _gather(
        plan, "binding", (*plan.contestants, FLOORS), plan.binding_rounds, methods=_METHODS, repeats=1
    )
    copy = min(found[FLOORS, ""]["fresh"])
    for method in _METHODS:
        constructor, first, small = (
            _least(found, name, method) for name in ("constructor", "first", "small first")
        )
        for case, seconds in (
            (f"{method}, constructor", constructor[OURS]),
            (f"{method}, what the array adds", max(0.0, first[OURS] - small[OURS])),
        ):
            section.rows.append(
                Row(
                    case=case,
                    ours=duration(seconds),
                    peer="one copy into fresh shared pages",
                    peers=duration(copy),
                    figure=duration(seconds) if method == "fork" else f"{seconds / copy:.3g}×",
                )
            )
        section.rows += [
            compared(f"{method}, first result", first[OURS], CONTESTANTS[contestant].name, first[contestant])
            for contestant in plan.contestants
            if contestant != OURS
        ]
    return section


def _readers(plan: Plan) -> Section:
    section = Section(
        title=f"Memory of workers that read one array of {size(plan.array_bytes)}",
        note="Proportional set size of the caller and all processes below it, when every worker has summed the array, "
        "above what the caller held before it opened the pool, the array included; the most of all rounds. Bare "
        "workers are processes that are spawned, have imported numpy and wait.",
    )
    found = {
        workers: _gather(
            plan, "readers", (*plan.contestants, BARE), plan.reading_rounds, methods=_METHODS, workers=workers
        )
        for workers in plan.readers
    }
    for workers, each in found.items():
        limit = _ARRAY_SHARE * plan.array_bytes + workers * _WORKER_BYTES
        for (contestant, method), values in each.items():
            held = max(values["held"])
            name = CONTESTANTS[contestant].name if contestant in CONTESTANTS else "bare workers with numpy"
            section.rows.append(
                Row(
                    case=f"{workers} workers, {method or 'spawn'}, {name}",
                    ours=size(held),
                    peer=f"the array + 3% + {size(_WORKER_BYTES)} a worker",
                    peers=size(limit),
                    figure=f"{held / limit:.3g}×",
                )
            )
    return section
