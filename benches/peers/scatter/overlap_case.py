"""How long a training loop waits for its batches while they are read and sent beside its computation.

A step is matrix products that take as long as ten scatters of the same batches in the same processes. The share is that
of the rank that waits longest.
"""

from __future__ import annotations

from pathlib import Path

from processes import rank_environments, run_programs
from report import Row, Section, duration

from scatter.cases import Plan


def overlap(plan: Plan) -> Section:
    """The waits of each kind and world."""
    section = Section(
        title="Beside a step of computing",
        note="A step is matrix products that take as long as ten scatters, and then a barrier, as for gradients. The "
        "wait is the mean time that the slowest rank waits for its next batch. td.DispatchLoader has prefetch=1; one "
        "isend per tensor runs when the loop needs a batch. The rows of the products compare their time beside the "
        "loader with their time alone.",
    )
    for world in plan.worlds:
        request = {"rounds": plan.rounds, "steps": plan.repeats}
        replies = run_programs(Path(__file__).parent / "overlap_child.py", request, rank_environments(world))
        for kind, of_first in replies[0].items():
            step = of_first["step"]
            ranks = [reply[kind] for reply in replies]
            wait = {
                name: min(max(waits) for waits in zip(*(rank[name]["wait"] for rank in ranks), strict=True))
                for name in ("loader", "isend")
            }
            products = min(
                max(times) for times in zip(*(rank["loader"]["products"] for rank in ranks), strict=True)
            )
            case, share = f"{kind}, {world} ranks, steps of {duration(step)}", wait["loader"] / step
            section.rows += [
                Row(
                    case=f"{case}: the wait",
                    ours=duration(wait["loader"]),
                    peer="one isend per tensor",
                    peers=duration(wait["isend"]),
                    figure=f"{share:.2%} of the step",
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
