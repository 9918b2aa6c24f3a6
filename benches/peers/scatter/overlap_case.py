"""What a training loop waits for its batches, where they are read and sent while it computes.

Owns the target. What always holds: a step is matrix products as long as ten scatters of the same batches in the same
processes; the share is that of the rank that waits longest.
"""

from __future__ import annotations

from pathlib import Path

from report import Row, Section, duration
from shm.processes import rank_environments, run_program

from scatter.cases import Plan

__all__ = ["overlap"]

# Of a step.
_SHARE = 0.05


def overlap(plan: Plan) -> Section:
    """The waits of each kind and world."""
    section = Section(
        title="Beside a step of computing",
        note="A step is matrix products that take as long as ten scatters, alone on all ranks at once; then a barrier, "
        "as for gradients. The wait is that for the next batch, of the rank that waits longest, by step; all batches "
        "are read. td.DispatchLoader has prefetch=1; the seed's method is called where the loop wants its batch. The "
        "products beside the loader: how long they take while it reads and sends, against alone.",
    )
    for world in plan.worlds:
        request = {"rounds": plan.rounds, "steps": plan.repeats}
        replies = run_program(Path(__file__).parent / "overlap_child.py", request, rank_environments(world))
        for kind, of_first in replies[0].items():
            step = of_first["step"]
            ranks = [reply[kind] for reply in replies]
            wait = {
                way: min(max(waits) for waits in zip(*(rank[way]["wait"] for rank in ranks), strict=True))
                for way in ("loader", "seed")
            }
            products = min(
                max(times) for times in zip(*(rank["loader"]["products"] for rank in ranks), strict=True)
            )
            case, share = f"{kind}, {world} ranks, steps of {duration(step)}", wait["loader"] / step
            section.rows += [
                Row(
                    case=f"{case}: the wait",
                    ours=duration(wait["loader"]),
                    peer="the seed's method",
                    peers=duration(wait["seed"]),
                    figure=f"{share:.2%} of the step",
                    target=f"≤ {_SHARE:.0%}" if plan.judges else "–",
                    met=share <= _SHARE if plan.judges else None,
                ),
                Row(
                    case=f"{case}: the products",
                    ours=duration(products),
                    peer="alone",
                    peers=duration(step),
                    figure=f"{products / step:.3g}×",
                ),
            ]
    return section
