"""The measures of saving: who saves what, how often, and which ratio is asked for.

Owns the targets. What always holds: in each round every way saves in fresh processes, one way after the other, so that
a drift of the machine meets all alike; a row takes the least of all rounds on both sides; what a save wrote is
read back and compared bit for bit in the first round, and a difference ends the bench. What checksums take is less
than a disk varies by from one process to the next: saves with and without them take turns in one process, and their
medians are compared.
"""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure import OutputsDiffer
from report import Row, Section, duration, size

from checkpoint.contestants import WAYS
from checkpoint.processes import run_ranks
from checkpoint.state import WORKLOADS
from checkpoint.training import LOOPS

__all__ = ["Plan", "measure"]

# What a step may at most take beside a save, over what it takes without.
_WORST_STEP = 1.5
_MEMORY = 1.05
_CHECKSUMS = 0.06


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is run: the full bench, or a smoke test of it."""

    folder: Path
    processors: int
    large: str = "large"
    small: str = "small"
    rounds: int = 2
    saves: int = 2
    turns: int = 8
    judges: bool = True


@dataclass(kw_only=True)
class Figures:
    """Of one way, over all rounds: seconds, bytes."""

    stall: float = float("inf")
    durable: float = float("inf")
    memory: int = 0
    lost: dict[str, list[dict[str, float]]] = field(default_factory=dict)


@dataclass(kw_only=True)
class GatherSchedule:
    """Of saves that took turns in one process: the seconds of each until it was durable."""

    summed: list[float] = field(default_factory=list)
    unsummed: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ways that save the same on the same ranks.

    `beside`: copies, which are timed between our saves and in the same processes, since where a process's memory lies
    decides over how fast it is. `looping`: those that also save beside training. `sums`: whether it is shown what
    checksums take.
    """

    title: str
    workload: str
    world: int
    sharded: bool
    ways: tuple[str, ...]
    beside: tuple[str, ...] = ("copy", "bytes")
    looping: tuple[str, ...] = ()
    sums: bool = False


_ALONE = (
    "writes",
    "hf",
    "hf lazy",
    "dcp",
    "safetensors",
    "seed",
    "torch save",
    "torch thread",
    "torch process",
    "torch-checkpointing",
    "orbax",
    "nvrx",
)
_LOOPING = ("hf", "hf lazy", "torch thread", "torch process", "torch-checkpointing", "orbax", "nvrx")
_REPLICATED = ("writes", "hf", "hf lazy", "safetensors", "seed")
_SHARDED = (
    "writes",
    "dcp",
    "hf",
    "torch save",
    "torch thread",
    "torch process",
    "torch-checkpointing",
    "nvrx",
)

# Of stalls, and of the time until a save is durable: the least ratio of a peer to tundish, by workload.
_STALLS = {
    "large": {"copy": 1.0, "seed": 4.0},
    "small": {"torch-checkpointing": 8.0, "torch thread": 15.0},
}
_LAZY_SECONDS = 0.002
_LAZY_OVER = 50.0
_DURABLE = {
    "large": {
        "safetensors": 1.6,
        "torch save": 1.6,
        "orbax": 3.0,
        "torch thread": 3.0,
        "seed": 4.0,
        "torch-checkpointing": 4.5,
    },
    "small": {"safetensors": 1.7, "torch-checkpointing": 12.0, "orbax": 20.0, "torch thread": 20.0},
}
_LOST_OVER = 4.0


def _groups(plan: Plan) -> dict[str, list[Group]]:
    workloads = tuple(dict.fromkeys((plan.large, plan.small)))
    alone = {
        workload: Group(
            title="one rank",
            workload=workload,
            world=1,
            sharded=False,
            ways=_ALONE,
            looping=_LOOPING if workload == plan.large else (),
            sums=True,
        )
        for workload in workloads
    }
    together = [
        group
        for workload in workloads
        for group in (
            Group(
                title="two ranks that hold the same",
                workload=workload,
                world=2,
                sharded=False,
                ways=_REPLICATED,
                # Of which each rank copies all, and tundish a half.
                beside=("copy",),
            ),
            Group(
                title="two ranks that hold a half each",
                workload=workload,
                world=2,
                sharded=True,
                ways=_SHARDED,
            ),
        )
    ]
    return {"large": [alone[plan.large]], "small": [alone[plan.small]], "worlds": together}


def measure(name: str, plan: Plan) -> list[Section]:
    """Run the groups of one measure, and judge them."""
    return [section for group in _groups(plan)[name] for section in _sections(group, plan)]


def _figures(group: Group, plan: Plan) -> dict[str, Figures]:
    figures = {way: Figures() for way in (*group.beside, *group.ways)}
    for number in range(plan.rounds):
        for way in group.ways:
            reply = _saved(
                group,
                plan,
                way=way,
                rounds=plan.saves,
                compare=number == 0,
                beside=list(group.beside) if way == _ours(group) else [],
                loops=list(LOOPS) if way in group.looping else [],
            )
            _add(figures[way], reply)
            for floor, stalls in reply["beside"].items():
                figures[floor].stall = min([figures[floor].stall, *stalls])
    return figures


def _turns(group: Group, plan: Plan) -> GatherSchedule:
    turns = GatherSchedule()
    for number in range(plan.rounds):
        reply = _saved(group, plan, way="hf", rounds=plan.turns, compare=number == 0, in_turn=["hf unsummed"])
        turns.summed += reply["durable"]
        turns.unsummed += reply["in_turn"]["hf unsummed"]
    return turns


def _saved(group: Group, plan: Plan, *, way: str, **asked: Any) -> dict[str, Any]:
    """What the processes of one way reply.

    Raises OutputsDiffer where what was saved is not what is read back.
    """
    root = plan.folder / "saves"
    root.mkdir()
    request = {
        "way": way,
        "workload": group.workload,
        "world": group.world,
        "sharded": group.sharded,
        "root": str(root),
        "beside": [],
        "in_turn": [],
        "loops": [],
        **asked,
    }
    reply = run_ranks(request, threads=max(1, plan.processors // group.world))
    shutil.rmtree(root)
    if reply["differing"]:
        raise OutputsDiffer(f"{WAYS[way].name} did not save {reply['differing'][:3]} as they were")
    said = f"stall {duration(min(reply['stall']))}, durable {duration(min(reply['durable']))}"
    print(
        f"bench: {WORKLOADS[group.workload].name}, {group.title}: {WAYS[way].name}: {said}",
        file=sys.stderr,
        flush=True,
    )
    return reply


def _add(figures: Figures, reply: Mapping[str, Any]) -> None:
    figures.stall = min([figures.stall, *reply["stall"]])
    figures.durable = min([figures.durable, *reply["durable"]])
    figures.memory = max(figures.memory, reply["memory"])
    for loop, lost in reply["lost"].items():
        figures.lost.setdefault(loop, []).extend(lost)


def _sections(group: Group, plan: Plan) -> list[Section]:
    workload = WORKLOADS[group.workload]
    figures = _figures(group, plan)
    section = Section(
        title=f"{workload.name}, {group.title}",
        note=_note(group),
        rows=[
            *_stall_rows(group, figures, plan),
            *_durable_rows(group, figures, plan),
            *([_sums_row(group, _turns(group, plan), plan)] if group.sums else []),
            *_memory_rows(group, figures, plan),
        ],
    )
    sections = [section]
    if group.looping:
        sections.append(
            Section(
                title=f"{workload.name}, {group.title}, beside training",
                note="Time lost a save: the stall, and how much longer the steps beside the save take than as many "
                "without one; the median of the rounds. A step of matrix products keeps all processors busy, one of "
                "400 tiny operations the interpreter. Eager unless a row says lazy. Where the stall of an eager save "
                "takes more than a target leaves, whatever the steps beside it take, a row says so.",
                rows=_training_rows(group, figures, plan),
            )
        )
    return sections


def _note(group: Group) -> str:
    fsynced = [WAYS[way].name for way in group.ways if not WAYS[way].fsyncs]
    stalls = (
        "So is the floor of a stall, one call of tundish's own copy, past the caches and on all processors, of the "
        "same bytes, for which nothing is planned. "
    )
    return (
        "Stall: until the call returns and the tensors may be changed, which they are at once. Durable: until every "
        f"file is on the disk and the save is known to be over. Of {' and '.join(fsynced)} no file is made "
        "durable: an fsync of each file is added to their time. `Tensor.copy_` is of the same tensors into buffers "
        "that were used before, in the processes of tundish and between its saves: where a process's memory lies "
        f"decides over how fast it is. {stalls if 'bytes' in group.beside else ''}The floor of a durable save writes "
        "as many bytes that lie ready in memory; tundish writes what it has staged, once nobody waits for that any "
        "more, so that its own begins when the stall is over. Where a target asks for less time than its floor takes, "
        "and tundish takes longer, a row says so."
    )


def _ours(group: Group) -> str:
    return "dcp" if group.sharded else "hf"


def _row(case: str, ours: float, peer: str, peers: float, at_least: float | None, plan: Plan) -> Row:
    ratio = peers / ours
    judged = at_least is not None and plan.judges
    return Row(
        case=case,
        ours=duration(ours),
        peer=peer,
        peers=duration(peers),
        figure=f"{ratio:.3g}×",
        target=f"≥ {at_least:g}×" if judged else "–",
        met=ratio >= at_least if judged and at_least is not None else None,
    )


def _floor_rows(
    what: str, floor: float, ours: float, peers: Mapping[str, float], targets: Mapping[str, float], plan: Plan
) -> list[Row]:
    """What our way does not get below, beside each peer over which a target asks for something."""
    return [
        _row(
            what + (": the target is out of reach" if seconds / targets[way] < floor < ours else ""),
            floor,
            WAYS[way].name,
            seconds,
            None,
            plan,
        )
        for way, seconds in peers.items()
    ]


def _stall_rows(group: Group, figures: Mapping[str, Figures], plan: Plan) -> list[Row]:
    ours = _ours(group)
    targets = _STALLS.get(group.workload, {})
    rows = [
        _row(
            f"stall, {WAYS[ours].name}",
            figures[ours].stall,
            WAYS[way].name,
            figures[way].stall,
            targets.get(way),
            plan,
        )
        for way in ("copy", *group.ways)
        if not way.startswith("hf") and way not in (ours, "writes")
    ]
    if "bytes" in figures:
        stalls = {way: figures[way].stall for way in ("copy", *group.ways) if way in targets}
        rows += _floor_rows(
            "stall, the floor", figures["bytes"].stall, figures[ours].stall, stalls, targets, plan
        )
    if "hf lazy" in figures:
        lazy = figures["hf lazy"].stall
        judged = plan.judges and group.workload == "large"
        case = f"stall, {WAYS['hf lazy'].name}"
        rows.append(
            Row(
                case=case,
                ours=duration(lazy),
                peer="–",
                peers="–",
                figure=duration(lazy),
                target=f"≤ {duration(_LAZY_SECONDS)}" if judged else "–",
                met=lazy <= _LAZY_SECONDS if judged else None,
            )
        )
        if "torch process" in figures:
            peer = figures["torch process"].stall
            rows.append(
                _row(case, lazy, WAYS["torch process"].name, peer, _LAZY_OVER if judged else None, plan)
            )
    if group.sharded:
        # Gathered, where the others save their own parts.
        rows.append(
            _row(
                f"stall, {WAYS['hf'].name}, gathered",
                figures["hf"].stall,
                WAYS["copy"].name,
                figures["copy"].stall,
                None,
                plan,
            )
        )
    return rows


def _durable_rows(group: Group, figures: Mapping[str, Figures], plan: Plan) -> list[Row]:
    ours = _ours(group)
    targets = _DURABLE.get(group.workload, {})
    rows = [
        _row(
            f"durable, {WAYS[ours].name}",
            figures[ours].durable,
            WAYS[way].name + ("" if WAYS[way].fsyncs else " + fsync"),
            figures[way].durable,
            targets.get(way),
            plan,
        )
        for way in group.ways
        if way not in (ours, "hf lazy")
    ]
    durable = {way: figures[way].durable for way in group.ways if way in targets}
    writes, stall = figures["writes"].durable, figures[ours].stall
    rows += _floor_rows("durable, the floor", writes, figures[ours].durable, durable, targets, plan)
    rows += _floor_rows(
        "durable, the stall and the floor", stall + writes, figures[ours].durable, durable, targets, plan
    )
    return rows


def _sums_row(group: Group, turns: GatherSchedule, plan: Plan) -> Row:
    summed, unsummed = statistics.median(turns.summed), statistics.median(turns.unsummed)
    share = (summed - unsummed) / summed
    judged = plan.judges and group.workload == "large"
    return Row(
        case=f"checksums, of the durable time, the medians of {len(turns.summed)} in turn",
        ours=duration(summed),
        peer=WAYS["hf unsummed"].name,
        peers=duration(unsummed),
        figure=f"{share:.1%}",
        target=f"≤ {_CHECKSUMS:.0%}" if judged else "–",
        met=share <= _CHECKSUMS if judged else None,
    )


def _memory_rows(group: Group, figures: Mapping[str, Figures], plan: Plan) -> list[Row]:
    staged = WORKLOADS[group.workload].size
    judged = plan.judges and group.workload == "large"
    rows = []
    for way in group.ways:
        if way == "writes":
            continue
        memory = figures[way].memory
        is_judged = judged and way.startswith(("hf", "dcp"))
        rows.append(
            Row(
                case=f"extra memory, {WAYS[way].name}",
                ours=size(memory),
                peer="what is saved",
                peers=size(staged),
                figure=f"{memory / staged:.3g}×",
                target=f"≤ {_MEMORY:g}×" if is_judged else "–",
                met=memory <= _MEMORY * staged if is_judged else None,
            )
        )
    return rows


def _training_rows(group: Group, figures: Mapping[str, Figures], plan: Plan) -> list[Row]:
    ours, lazy, *peers = group.looping
    rows = []
    for loop in LOOPS:
        lost = {way: _median(figures[way].lost[loop], "lost") for way in group.looping}
        best = min(peers, key=lost.__getitem__)
        rows += [
            _row(
                f"time lost, {loop}",
                # Less than this is the clock's.
                max(lost[ours], 1e-3),
                f"{WAYS[way].name}{', the best of them' if way == best else ''}",
                lost[way],
                _LOST_OVER if way == best else None,
                plan,
            )
            for way in peers
        ]
        stall, said = figures[ours].stall, f"{WAYS[best].name}, the best of them"
        reach = ": the target is out of reach" if lost[best] < _LOST_OVER * stall else ""
        rows += [
            _row(f"time lost, {loop}, the stall alone{reach}", stall, said, lost[best], None, plan),
            _row(f"time lost, {loop}, lazy", max(lost[lazy], 1e-3), said, lost[best], _LOST_OVER, plan),
        ]
        worst = min(each["worst"] / each["base"] for each in figures[ours].lost[loop])
        judged = plan.judges and loop == "matrix products"
        rows.append(
            Row(
                case=f"worst step, {loop}",
                ours=duration(min(each["worst"] for each in figures[ours].lost[loop])),
                peer="a step without a save",
                peers=duration(_median(figures[ours].lost[loop], "base")),
                figure=f"{worst:.3g}×",
                target=f"≤ {_WORST_STEP:g}×" if judged else "–",
                met=worst <= _WORST_STEP if judged else None,
            )
        )
    return rows


def _median(found: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.median(each[name] for each in found)
