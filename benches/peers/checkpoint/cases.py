"""The measures of saving: contestants, workloads, numbers of ranks, and the floors.

In each round each contestant saves in new processes, one after the other. So all meet the same drift of the machine.
A row takes the least of all rounds on both sides. The first round reads a save back and compares it bit for bit.
"""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure import OutputsDiffer, Seconds
from report import Row, Section, compared, duration, size

from checkpoint.contestants import CONTESTANTS
from checkpoint.processes import run_ranks
from checkpoint.state import WORKLOADS
from checkpoint.training import LOOPS


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is run: the full bench, or a smoke test of it."""

    folder: Path
    processors: int
    large: str = "large"
    small: str = "small"
    rounds: int = 1
    saves: int = 5


@dataclass(kw_only=True)
class Figures:
    """Seconds and bytes of one contestant, over all rounds."""

    stalls: list[float] = field(default_factory=list)
    durables: list[float] = field(default_factory=list)
    loads: list[dict[str, float]] = field(default_factory=list)
    memory: int = 0
    lost: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    @property
    def stall(self) -> Seconds:
        return Seconds.least(self.stalls)

    @property
    def durable(self) -> Seconds:
        return Seconds.least(self.durables)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Contestants that save the same tensors on the same ranks.

    Attributes:
        beside: copies, timed between our saves in the same process: their speed depends on where its memory lies.
        looping: contestants that also save beside training.
        loading: contestants that also load what they saved.
    """

    title: str
    workload: str
    world: int
    sharded: bool
    contestants: tuple[str, ...]
    beside: tuple[str, ...] = ("copy", "bytes")
    looping: tuple[str, ...] = ()
    loading: tuple[str, ...] = ()


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
_LOADING = ("dcp", "torch save")
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
            loading=_LOADING,
        )
        for workload in workloads
    }
    together = [
        Group(
            title="two ranks that hold the same",
            workload=plan.large,
            world=2,
            sharded=False,
            contestants=_REPLICATED,
            # Each rank copies all tensors; tundish copies a half.
            beside=("copy",),
        ),
        Group(
            title="two ranks that hold a half each",
            workload=plan.large,
            world=2,
            sharded=True,
            contestants=_SHARDED,
            loading=_LOADING,
        ),
    ]
    return {"large": [alone[plan.large]], "small": [alone[plan.small]], "worlds": together}


def measure(name: str, plan: Plan) -> list[Section]:
    """Run the groups of one measure."""
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
                loads=contestant in group.loading,
            )
            _add(figures[contestant], reply)
            for floor, stalls in reply["beside"].items():
                figures[floor].stalls += stalls
    return figures


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
    figures.stalls += reply["stall"]
    figures.durables += reply["durable"]
    figures.loads += reply["loads"]
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
            *_stall_rows(group, figures),
            *_durable_rows(group, figures),
            *_load_rows(group, figures),
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
                rows=_training_rows(group, figures),
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
        "ready in memory. tundish begins to write when the stall is over. "
        "Loads go into tensors that have their memory; those of tundish check every byte by its checksum."
    )


def _ours(group: Group) -> str:
    return "dcp" if group.sharded else "hf"


def _stall_rows(group: Group, figures: Mapping[str, Figures]) -> list[Row]:
    ours = _ours(group)
    rows = [
        compared(
            f"stall, {CONTESTANTS[ours].name}",
            figures[ours].stall,
            CONTESTANTS[contestant].name,
            figures[contestant].stall,
        )
        for contestant in ("copy", *group.contestants)
        if not contestant.startswith("hf") and contestant not in (ours, "writes")
    ]
    if "bytes" in figures:
        copy = figures["copy"].stall
        rows.append(compared("stall, the floor", figures["bytes"].stall, CONTESTANTS["copy"].name, copy))
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
            )
        )
        if "torch process" in figures:
            peer = figures["torch process"].stall
            rows.append(compared(case, lazy, CONTESTANTS["torch process"].name, peer))
    if group.sharded:
        # This contestant gathers; the others save their own parts.
        rows.append(
            compared(
                f"stall, {CONTESTANTS['hf'].name}, gathered",
                figures["hf"].stall,
                CONTESTANTS["copy"].name,
                figures["copy"].stall,
            )
        )
    return rows


def _durable_rows(group: Group, figures: Mapping[str, Figures]) -> list[Row]:
    ours = _ours(group)
    rows = [
        compared(
            f"durable, {CONTESTANTS[ours].name}",
            figures[ours].durable,
            CONTESTANTS[contestant].name + ("" if CONTESTANTS[contestant].fsyncs else " + fsync"),
            figures[contestant].durable,
        )
        for contestant in group.contestants
        if contestant not in (ours, "hf lazy")
    ]
    writes, stall = figures["writes"].durable, figures[ours].stall
    name = CONTESTANTS["writes"].name
    rows.append(compared("durable, the stall and the writes", stall + writes, name, writes))
    return rows


def _load_rows(group: Group, figures: Mapping[str, Figures]) -> list[Row]:
    if not group.loading:
        return []
    ours, theirs = (
        {case: Seconds.least([each[case] for each in figures[contestant].loads]) for case in ("cold", "warm")}
        for contestant in group.loading
    )
    return [
        compared("load_dcp, from the disk", ours["cold"], "dcp.load of DCP's save", theirs["cold"]),
        compared("load_dcp, from the page cache", ours["warm"], "dcp.load of DCP's save", theirs["warm"]),
    ]


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


def _training_rows(group: Group, figures: Mapping[str, Figures]) -> list[Row]:
    ours, lazy, *peers = group.looping
    rows = []
    for loop in LOOPS:
        lost = {contestant: _median(figures[contestant].lost[loop], "lost") for contestant in group.looping}
        best = min(peers, key=lost.__getitem__)
        rows += [
            compared(
                f"time lost, {loop}",
                # The clock is not more precise.
                max(lost[ours], 1e-3),
                f"{CONTESTANTS[contestant].name}{', the best of them' if contestant == best else ''}",
                lost[contestant],
            )
            for contestant in peers
        ]
        stall, said = figures[ours].stall, f"{CONTESTANTS[best].name}, the best of them"
        rows += [
            compared(f"time lost, {loop}, the stall alone", stall, said, lost[best]),
            compared(f"time lost, {loop}, lazy", max(lost[lazy], 1e-3), said, lost[best]),
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
