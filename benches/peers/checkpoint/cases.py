"""The measures of saving: contestants, workloads, numbers of ranks, and the floors.

In each round each contestant saves in new processes, one after the other. So all meet the same drift of the machine.
A row takes the least of all rounds on both sides. The first round reads every save back and compares it bit for bit.

Checksums take less time than a disk varies by from one process to the next. So saves with and without them alternate in
one process, and their medians are compared.
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

from checkpoint.contestants import CONTESTANTS
from checkpoint.processes import run_ranks
from checkpoint.state import WORKLOADS
from checkpoint.training import LOOPS

__all__ = ["Plan", "measure"]


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
    """Seconds and bytes of one contestant, over all rounds."""

    stall: float = float("inf")
    durable: float = float("inf")
    memory: int = 0
    lost: dict[str, list[dict[str, float]]] = field(default_factory=dict)


@dataclass(kw_only=True)
class ChecksumTimes:
    """Seconds until each save was durable, with and without checksums."""

    summed: list[float] = field(default_factory=list)
    unsummed: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Contestants that save the same tensors on the same ranks.

    Attributes:
        beside: copies, timed between our saves in the same process: their speed depends on where its memory lies.
        looping: contestants that also save beside training.
        sums: whether to measure the time of checksums.
    """

    title: str
    workload: str
    world: int
    sharded: bool
    contestants: tuple[str, ...]
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

# The floors: least ratios of another contestant to tundish, and most seconds.
_COPY_OVER_STALL = 1.0
_LAZY_SECONDS = 0.003
_WRITES_OVER_DURABLE = 1 / 1.15
_LOST_OVER = 3.0


def _groups(plan: Plan) -> dict[str, list[Group]]:
    workloads = tuple(dict.fromkeys((plan.large, plan.small)))
    alone = {
        workload: Group(
            title="one rank",
            workload=workload,
            world=1,
            sharded=False,
            contestants=_ALONE,
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
                contestants=_REPLICATED,
                # Each rank copies all tensors; tundish copies a half.
                beside=("copy",),
            ),
            Group(
                title="two ranks that hold a half each",
                workload=workload,
                world=2,
                sharded=True,
                contestants=_SHARDED,
            ),
        )
    ]
    return {"large": [alone[plan.large]], "small": [alone[plan.small]], "worlds": together}


def measure(name: str, plan: Plan) -> list[Section]:
    """Run the groups of one measure, and judge them."""
    return [section for group in _groups(plan)[name] for section in _sections(group, plan)]


def _figures(group: Group, plan: Plan) -> dict[str, Figures]:
    figures = {contestant: Figures() for contestant in (*group.beside, *group.contestants)}
    for number in range(plan.rounds):
        for contestant in group.contestants:
            reply = _saved(
                group,
                plan,
                contestant=contestant,
                rounds=plan.saves,
                compare=number == 0,
                beside=list(group.beside) if contestant == _ours(group) else [],
                loops=list(LOOPS) if contestant in group.looping else [],
            )
            _add(figures[contestant], reply)
            for floor, stalls in reply["beside"].items():
                figures[floor].stall = min([figures[floor].stall, *stalls])
    return figures


def _turns(group: Group, plan: Plan) -> ChecksumTimes:
    turns = ChecksumTimes()
    for number in range(plan.rounds):
        reply = _saved(
            group, plan, contestant="hf", rounds=plan.turns, compare=number == 0, in_turn=["hf unsummed"]
        )
        turns.summed += reply["durable"]
        turns.unsummed += reply["in_turn"]["hf unsummed"]
    return turns


def _saved(group: Group, plan: Plan, *, contestant: str, **asked: Any) -> dict[str, Any]:
    """The reply of the processes of one contestant.

    Raises:
        OutputsDiffer: the tensors that are read back differ from those that were saved.
    """
    root = plan.folder / "saves"
    root.mkdir()
    request = {
        "contestant": contestant,
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
        raise OutputsDiffer(
            f"{CONTESTANTS[contestant].name} did not save {reply['differing'][:3]} as they were"
        )
    said = f"stall {duration(min(reply['stall']))}, durable {duration(min(reply['durable']))}"
    print(
        f"bench: {WORKLOADS[group.workload].name}, {group.title}: {CONTESTANTS[contestant].name}: {said}",
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
            *_memory_rows(group, figures),
        ],
    )
    sections = [section]
    if group.looping:
        sections.append(
            Section(
                title=f"{workload.name}, {group.title}, beside training",
                note="Time lost a save: the stall, and how much longer the steps beside the save take than as many "
                "without one; the median of the rounds. A step of matrix products keeps all processors busy, one of "
                "400 tiny operations the interpreter. Saves are eager unless a row says lazy.",
                rows=_training_rows(group, figures, plan),
            )
        )
    return sections


def _note(group: Group) -> str:
    fsynced = [
        CONTESTANTS[contestant].name for contestant in group.contestants if not CONTESTANTS[contestant].fsyncs
    ]
    stalls = (
        "The floor of a stall is one call of tundish's own copy of the same bytes, past the caches and on all "
        "processors, without a plan. "
    )
    return (
        "Stall: until the call returns; then the tensors are changed at once. Durable: until every "
        f"file is on the disk and the save is known to be over. Of {' and '.join(fsynced)} no file is made "
        "durable: an fsync of each file is added to their time. `Tensor.copy_` is of the same tensors into buffers "
        "that were used before, in the processes of tundish and between its saves: where a process's memory lies "
        f"decides how fast it is. {stalls if 'bytes' in group.beside else ''}Bare writes write as many bytes that lie "
        "ready in memory. tundish begins to write when the stall is over."
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


def _stall_rows(group: Group, figures: Mapping[str, Figures], plan: Plan) -> list[Row]:
    ours = _ours(group)
    judged = plan.judges and group.workload == "large"
    rows = [
        _row(
            f"stall, {CONTESTANTS[ours].name}",
            figures[ours].stall,
            CONTESTANTS[contestant].name,
            figures[contestant].stall,
            _COPY_OVER_STALL if judged and contestant == "copy" else None,
            plan,
        )
        for contestant in ("copy", *group.contestants)
        if not contestant.startswith("hf") and contestant not in (ours, "writes")
    ]
    if "bytes" in figures:
        copy = figures["copy"].stall
        rows.append(
            _row("stall, the floor", figures["bytes"].stall, CONTESTANTS["copy"].name, copy, None, plan)
        )
    if "hf lazy" in figures:
        lazy = figures["hf lazy"].stall
        case = f"stall, {CONTESTANTS['hf lazy'].name}"
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
            rows.append(_row(case, lazy, CONTESTANTS["torch process"].name, peer, None, plan))
    if group.sharded:
        # This contestant gathers; the others save their own parts.
        rows.append(
            _row(
                f"stall, {CONTESTANTS['hf'].name}, gathered",
                figures["hf"].stall,
                CONTESTANTS["copy"].name,
                figures["copy"].stall,
                None,
                plan,
            )
        )
    return rows


def _durable_rows(group: Group, figures: Mapping[str, Figures], plan: Plan) -> list[Row]:
    ours = _ours(group)
    rows = [
        _row(
            f"durable, {CONTESTANTS[ours].name}",
            figures[ours].durable,
            CONTESTANTS[contestant].name + ("" if CONTESTANTS[contestant].fsyncs else " + fsync"),
            figures[contestant].durable,
            _WRITES_OVER_DURABLE if contestant == "writes" else None,
            plan,
        )
        for contestant in group.contestants
        if contestant not in (ours, "hf lazy")
    ]
    writes, stall = figures["writes"].durable, figures[ours].stall
    name = CONTESTANTS["writes"].name
    rows.append(_row("durable, the stall and the writes", stall + writes, name, writes, None, plan))
    return rows


def _sums_row(group: Group, turns: ChecksumTimes, plan: Plan) -> Row:
    summed, unsummed = statistics.median(turns.summed), statistics.median(turns.unsummed)
    share = (summed - unsummed) / summed
    return Row(
        case=f"checksums, of the durable time, the medians of {len(turns.summed)} in turn",
        ours=duration(summed),
        peer=CONTESTANTS["hf unsummed"].name,
        peers=duration(unsummed),
        figure=f"{share:.1%}",
    )


def _memory_rows(group: Group, figures: Mapping[str, Figures]) -> list[Row]:
    staged = WORKLOADS[group.workload].size
    rows = []
    for contestant in group.contestants:
        if contestant == "writes":
            continue
        memory = figures[contestant].memory
        rows.append(
            Row(
                case=f"extra memory, {CONTESTANTS[contestant].name}",
                ours=size(memory),
                peer="what is saved",
                peers=size(staged),
                figure=f"{memory / staged:.3g}×",
            )
        )
    return rows


def _training_rows(group: Group, figures: Mapping[str, Figures], plan: Plan) -> list[Row]:
    ours, lazy, *peers = group.looping
    rows = []
    for loop in LOOPS:
        lost = {contestant: _median(figures[contestant].lost[loop], "lost") for contestant in group.looping}
        best = min(peers, key=lost.__getitem__)
        rows += [
            _row(
                f"time lost, {loop}",
                # The clock is not more precise.
                max(lost[ours], 1e-3),
                f"{CONTESTANTS[contestant].name}{', the best of them' if contestant == best else ''}",
                lost[contestant],
                _LOST_OVER if contestant == best else None,
                plan,
            )
            for contestant in peers
        ]
        stall, said = figures[ours].stall, f"{CONTESTANTS[best].name}, the best of them"
        rows += [
            _row(f"time lost, {loop}, the stall alone", stall, said, lost[best], None, plan),
            _row(f"time lost, {loop}, lazy", max(lost[lazy], 1e-3), said, lost[best], _LOST_OVER, plan),
        ]
        worst = min(each["worst"] / each["base"] for each in figures[ours].lost[loop])
        rows.append(
            Row(
                case=f"worst step, {loop}",
                ours=duration(min(each["worst"] for each in figures[ours].lost[loop])),
                peer="a step without a save",
                peers=duration(_median(figures[ours].lost[loop], "base")),
                figure=f"{worst:.3g}×",
            )
        )
    return rows


def _median(found: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.median(each[name] for each in found)
