"""The measures of scatter: numbers of ranks and kinds of batches.

In each round each contestant scatters a few times, one after the other, in the same processes. A row compares the
minimum over all rounds of both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from measure import Seconds
from processes import rank_environments, run_programs
from report import Row, Section, compared

_NAMES = {
    "isend": "one isend per tensor",
    "objects": "scatter_object_list",
    "accelerate": "Accelerate's DataLoaderDispatcher",
    "accelerate split": "the same, reading one batch for all",
    "tensordict": "tensordict's init_remote",
}
# Contestants that take up to a hundred times as long as the others.
_SLOW = ("objects", "accelerate", "accelerate split", "tensordict")
# Kinds whose rows also compare one isend per tensor with scatter_object_list.
_ISEND_OVER_OBJECTS = ("text", "VLM")
_NOTE = (
    "Rank 0 gives every rank its own batch. A scatter ends when the last receiver has read every byte of its batch. "
    "One isend per tensor: schemas by scatter_object_list, one isend for each tensor, new receive buffers. text: 4 "
    "tensors of 8 × 4096 int64; VLM: 106 MB of pixels and 40 small tensors; many: 500 tensors of 1 KB; nested: 194 "
    "tensors in dicts, lists and namedtuples."
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured.

    Attributes:
        worlds: numbers of ranks.
        rounds: how many rounds each kind of batch has.
        repeats: how often a contestant scatters in a round.
        others: the contestants beside ours; None for all of the measure.
    """

    worlds: tuple[int, ...] = (2, 4)
    rounds: dict[str, int] = field(default_factory=lambda: {"text": 10, "VLM": 3, "many": 10, "nested": 10})
    repeats: int = 5
    others: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Our contestant beside others.

    Attributes:
        others: the other contestants.
        is_one_node: whether all ranks are on one node; else each is on a node of its own.
    """

    title: str
    note: str
    others: tuple[str, ...]
    is_one_node: bool = True


_COMPARISONS = {
    "local": Comparison(
        title="Ranks of one node, through shared memory",
        note=_NOTE,
        others=("isend", "objects"),
    ),
    "gloo": Comparison(
        title="Over the network: gloo on loopback, without shared memory",
        note=_NOTE,
        others=("isend", "objects"),
        is_one_node=False,
    ),
    "peers": Comparison(
        title="Ranks of one node, beside Accelerate and tensordict",
        note="As above. `Accelerator(dispatch_batches=True)` turns a loader into a DataLoaderDispatcher: it reads a "
        "batch for each rank, joins and broadcasts them, and each rank keeps its slice. With split_batches its loader "
        "reads one batch for all ranks, which is joined beforehand here. init_remote sends the ranks their batches one "
        "after the other; from_remote_init allocates new ones.",
        others=("accelerate", "accelerate split", "tensordict"),
    ),
}


def measure(name: str, plan: Plan) -> Sequence[Section]:
    """One measure, for all numbers of ranks."""
    comparison = _COMPARISONS[name]
    section = Section(title=comparison.title, note=comparison.note)
    contestants = ("ours", *(comparison.others if plan.others is None else plan.others))
    for world in plan.worlds:
        environments = rank_environments(world)
        if not comparison.is_one_node:
            for rank, environment in enumerate(environments):
                environment.update(GROUP_RANK=str(rank), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        for kind, seconds in measure_contestants(contestants, plan, environments).items():
            case = f"{kind}, {world} ranks"
            section.rows += compare(case, seconds)
            if name == "gloo" and kind in _ISEND_OVER_OBJECTS:
                section.rows.append(_isend_over_objects(case, seconds))
    return [section]


def measure_contestants(
    contestants: Sequence[str],
    plan: Plan,
    environments: list[dict[str, str]],
    prefixes: Sequence[Sequence[str]] = (),
) -> dict[str, dict[str, float]]:
    """The minimum seconds by kind and contestant, on ranks with these environments."""
    repeats = {contestant: 1 if contestant in _SLOW else plan.repeats for contestant in contestants}
    request = {"contestants": list(contestants), "rounds": plan.rounds, "repeats": repeats}
    replies = run_programs(Path(__file__).parent / "child.py", request, environments, prefixes)
    return {
        kind: {contestant: Seconds.least(each) for contestant, each in times.items()}
        for kind, times in replies[0].items()
    }


def compare(case: str, seconds: Mapping[str, float]) -> list[Row]:
    """A row for each contestant beside ours."""
    return [
        compared(case, seconds["ours"], _NAMES[contestant], took)
        for contestant, took in seconds.items()
        if contestant != "ours"
    ]


def _isend_over_objects(case: str, seconds: Mapping[str, float]) -> Row:
    case = f"{case}: one isend per tensor itself"
    return compared(case, seconds["isend"], _NAMES["objects"], seconds["objects"])
