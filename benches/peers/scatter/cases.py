"""The measures of scatter: worlds, kinds of batches, and which ratio is asked for.

Owns the targets. What always holds: in each round every way scatters a few times, one after the other, in the same
processes; a row takes the least of all rounds on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from report import Row, Section, duration
from shm.processes import rank_environments, run_program

__all__ = ["Plan", "measure"]

# Over the method of the seed work, by measure and kind.
_OVER_SEED = {
    "local": {"text": 8.0, "VLM": 8.0, "many": 10.0, "nested": 6.0},
    "gloo": {"text": 1.5, "VLM": 1.8, "many": 8.0, "nested": 4.0},
}
# What the method of the seed has to be over scatter_object_list, to be worth a comparison.
_SEED_OVER_OBJECTS = {"text": 1.2, "VLM": 5.0}
_TITLES = {
    "local": "Ranks of one node, through shared memory",
    "gloo": "Over the network: gloo on loopback, shared memory switched off",
}
_SEED, _OBJECTS = "the seed's method", "scatter_object_list"
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
    """

    worlds: tuple[int, ...] = (2, 4)
    rounds: dict[str, int] = field(default_factory=lambda: {"text": 10, "VLM": 3, "many": 10, "nested": 10})
    repeats: int = 5
    judges: bool = True


def measure(name: str, plan: Plan) -> Sequence[Section]:
    """One measure in all worlds."""
    ours = {"local": "ours", "gloo": "network"}[name]
    section = Section(title=_TITLES[name], note=_NOTE)
    for world in plan.worlds:
        # The last of them takes up to a hundred times as long as the first.
        repeats = {ours: plan.repeats, "seed": plan.repeats, "objects": 1}
        request = {"ways": list(repeats), "rounds": plan.rounds, "repeats": repeats}
        replies = run_program(Path(__file__).parent / "child.py", request, rank_environments(world))
        for kind, seconds in replies[0].items():
            section.rows += _rows(name, f"{kind}, {world} ranks", kind, ours, seconds, judges=plan.judges)
    return [section]


def _rows(
    name: str, case: str, kind: str, ours: str, seconds: dict[str, float], *, judges: bool
) -> list[Row]:
    seed = seconds["seed"] / seconds[ours]
    least = _OVER_SEED[name][kind] if judges else None
    rows = [
        Row(
            case=case,
            ours=duration(seconds[ours]),
            peer=_SEED,
            peers=duration(seconds["seed"]),
            figure=f"{seed:.3g}×",
            target="–" if least is None else f"≥ {least:g}×",
            met=None if least is None else seed >= least,
        ),
        Row(
            case=case,
            ours=duration(seconds[ours]),
            peer=_OBJECTS,
            peers=duration(seconds["objects"]),
            figure=f"{seconds['objects'] / seconds[ours]:.3g}×",
        ),
    ]
    if kind in _SEED_OVER_OBJECTS and name == "gloo":
        worth, ratio = _SEED_OVER_OBJECTS[kind], seconds["objects"] / seconds["seed"]
        rows.append(
            Row(
                case=f"{case}: the seed's method itself",
                ours=duration(seconds["seed"]),
                peer=_OBJECTS,
                peers=duration(seconds["objects"]),
                figure=f"{ratio:.3g}×",
                target=f"≥ {worth:g}×" if judges else "–",
                met=ratio >= worth if judges else None,
            )
        )
    return rows
