"""The measures of scatter: worlds, kinds of batches, and which ratio is asked for.

Owns the targets. What always holds: in each round every way scatters a few times, one after the other, in the same
processes; a row takes the least of all rounds on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from report import Row, Section, duration
from shm.processes import rank_environments, run_program

__all__ = ["Plan", "compare", "measure", "scatter_by"]

_NAMES = {
    "seed": "the seed's method",
    "objects": "scatter_object_list",
    "accelerate": "Accelerate's DataLoaderDispatcher",
    "accelerate split": "the same, reading one batch for all",
    "tensordict": "tensordict's init_remote",
}
# They take up to a hundred times as long as the others.
_SLOW = ("objects", "accelerate", "accelerate split", "tensordict")
# The ways that are a measure's limits, and what they are called.
_LIMITS = {
    "local": {"least": "the limit", "least, torch": "the limit and torch's part"},
    "gloo": {"least far": "the limit", "least far, torch": "the limit and torch's part"},
}
_TORCHS_PART = (
    "Torch's part: rank 0 asks torch about each tensor, before any rank is given anything, and its receiver has torch "
    "make each anew, before the bytes come."
)
# What the method of the seed has to be over scatter_object_list, to be worth a comparison.
_SEED_OVER_OBJECTS = {"text": 1.2, "VLM": 5.0}
_NOTE = (
    "Rank 0 gives every rank a batch of its own; that is over when the last receiver has read every byte of its batch. "
    "The seed's method: schemas by scatter_object_list, one isend a tensor, fresh receive buffers. text: 4 tensors of "
    "8 × 4096 int64; VLM: 106 MB of pixels and 40 small tensors; many: 500 tensors of 1 KB; nested: 194 tensors in "
    "dicts, lists and namedtuples."
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured.

    `rounds`: of each kind. `repeats`: how often a way scatters in a round. `judges`: whether targets are stated.
    `others`: the ways beside ours; None: all of the measure.
    """

    worlds: tuple[int, ...] = (2, 4)
    rounds: dict[str, int] = field(default_factory=lambda: {"text": 10, "VLM": 3, "many": 10, "nested": 10})
    repeats: int = 5
    judges: bool = True
    others: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A measure: our way, the others, and what is asked for over them, by way and kind."""

    title: str
    note: str
    ours: str
    others: tuple[str, ...]
    targets: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


_COMPARISONS = {
    "local": Comparison(
        title="Ranks of one node, through shared memory",
        note=f"{_NOTE} The limit, in our column: a plain copy of a batch's bytes into shared memory, and its "
        "receiver woken, who has tensors over them already and reads these as all do. Of VLM the copy "
        "is tundish's own, past the caches and on all processors, which takes less time than a plain one. Where "
        "processors share no cache, as a virtual machine's may from one minute to the next, a plain copy takes several "
        "times as long as one past the caches, and ours less than the limit. Where a target asks for less time than "
        f"the limit takes, and ours takes longer, a row says so. {_TORCHS_PART}",
        ours="ours",
        others=("seed", "objects"),
        targets={"seed": {"text": 8.0, "VLM": 8.0, "many": 10.0, "nested": 6.0}},
    ),
    "gloo": Comparison(
        title="Over the network: gloo on loopback, shared memory switched off",
        note=f"{_NOTE} The limit, in our column: a batch's bytes as one message, from warm memory into warm memory, "
        "and its receiver, who has tensors over that already, reads these as all do. Where a target asks for less time "
        f"than the limit takes, and ours takes longer, a row says so. {_TORCHS_PART}",
        ours="network",
        others=("seed", "objects"),
        targets={"seed": {"text": 1.5, "VLM": 1.8, "many": 8.0, "nested": 4.0}},
    ),
    "peers": Comparison(
        title="Ranks of one node, beside Accelerate and tensordict",
        note="As above. DataLoaderDispatcher is what `Accelerator(dispatch_batches=True)` makes of a loader: it reads "
        "a batch for each rank, puts them together, broadcasts the whole and has each rank keep its slice; with "
        "split_batches its loader reads one batch for all, here put together beforehand. init_remote sends the ranks "
        "their batches one after the other, and from_remote_init makes new ones of them.",
        ours="ours",
        others=("accelerate", "accelerate split", "tensordict"),
        targets={"accelerate": {"VLM": 20.0}, "tensordict": {"VLM": 10.0}},
    ),
    "worlds": Comparison(
        title="As the world grows",
        note="As above, with ranks of one node that share its processors. small VLM: 10.6 MB of pixels and 40 small "
        "tensors.",
        ours="ours",
        others=("seed",),
    ),
}


def measure(name: str, plan: Plan) -> Sequence[Section]:
    """One measure in all worlds."""
    comparison = _COMPARISONS[name]
    section = Section(title=comparison.title, note=comparison.note)
    ways = (comparison.ours, *(comparison.others if plan.others is None else plan.others))
    limits = _LIMITS.get(name, {})
    ways += tuple(limits)
    for world in plan.worlds:
        for kind, seconds in scatter_by(ways, plan, rank_environments(world)).items():
            case = f"{kind}, {world} ranks"
            targets = {
                way: asked[kind]
                for way, asked in comparison.targets.items()
                if plan.judges and kind in asked and way in seconds
            }
            leasts = {called: seconds.pop(way) for way, called in limits.items()}
            section.rows += compare(case, comparison.ours, seconds, targets)
            if "seed" in seconds:
                section.rows += [
                    _limit(f"{case}: {called}", least, seconds, comparison.ours, targets.get("seed"))
                    for called, least in leasts.items()
                ]
            if name == "gloo" and kind in _SEED_OVER_OBJECTS:
                section.rows.append(_worth(case, kind, seconds, judges=plan.judges))
    return [section]


def scatter_by(
    ways: Sequence[str],
    plan: Plan,
    environments: list[dict[str, str]],
    prefixes: Sequence[Sequence[str]] = (),
) -> dict[str, dict[str, float]]:
    """The least seconds of each kind and way, on ranks with these environments."""
    repeats = {way: 1 if way in _SLOW else plan.repeats for way in ways}
    request = {"ways": list(ways), "rounds": plan.rounds, "repeats": repeats}
    replies = run_program(Path(__file__).parent / "child.py", request, environments, prefixes)
    reply: dict[str, dict[str, float]] = replies[0]
    return reply


def compare(case: str, ours: str, seconds: Mapping[str, float], targets: Mapping[str, float]) -> list[Row]:
    """A row for each way beside ours."""
    rows = []
    for way, took in seconds.items():
        if way == ours:
            continue
        ratio, least = took / seconds[ours], targets.get(way)
        rows.append(
            Row(
                case=case,
                ours=duration(seconds[ours]),
                peer=_NAMES[way],
                peers=duration(took),
                figure=f"{ratio:.3g}×",
                target="–" if least is None else f"≥ {least:g}×",
                met=None if least is None else ratio >= least,
            )
        )
    return rows


def _limit(case: str, least: float, seconds: Mapping[str, float], ours: str, asked: float | None) -> Row:
    ratio = seconds["seed"] / least
    is_beyond = asked is not None and ratio < asked and least < seconds[ours]
    return Row(
        case=case + (": the target is out of reach" if is_beyond else ""),
        ours=duration(least),
        peer=_NAMES["seed"],
        peers=duration(seconds["seed"]),
        figure=f"{ratio:.3g}×",
        target="–",
        met=None,
    )


def _worth(case: str, kind: str, seconds: Mapping[str, float], *, judges: bool) -> Row:
    least, ratio = _SEED_OVER_OBJECTS[kind], seconds["objects"] / seconds["seed"]
    return Row(
        case=f"{case}: the seed's method itself",
        ours=duration(seconds["seed"]),
        peer=_NAMES["objects"],
        peers=duration(seconds["objects"]),
        figure=f"{ratio:.3g}×",
        target=f"≥ {least:g}×" if judges else "–",
        met=ratio >= least if judges else None,
    )
