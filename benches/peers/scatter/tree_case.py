"""Flattening a batch, compared with a recursive walk.

Both return the tensors and the pickled schema, from which another process can rebuild the batch. One process times
both in turn.
"""

from __future__ import annotations

from pathlib import Path

from report import Row, Section, duration
from shm.processes import run_program

from scatter.cases import Plan

__all__ = ["tree"]


def tree(plan: Plan) -> Section:
    """Time a batch of each kind."""
    section = Section(
        title="Flattening a batch",
        note="td.tree.flatten and pickle.dumps of the schema, against a recursive walk, which puts dtype and "
        "shape in the place of each tensor, and pickle.dumps of its result. deep: 500 tensors of 1 KB, five in each of "
        "100 dicts of dicts and lists; many: 500 tensors in one list.",
    )
    request = {"rounds": plan.rounds, "repeats": plan.repeats}
    [reply] = run_program(Path(__file__).parent / "tree_child.py", request, [{"OMP_NUM_THREADS": "1"}])
    for kind, seconds in reply.items():
        section.rows.append(
            Row(
                case=kind,
                ours=duration(seconds["ours"]),
                peer="recursive walk and pickle",
                peers=duration(seconds["walk"]),
                figure=f"{seconds['walk'] / seconds['ours']:.3g}×",
            )
        )
    return section
