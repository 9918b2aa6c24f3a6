"""A batch taken apart and described, beside the seed's recursive walk.

Owns the target. What always holds: both sides end with the tensors and with the schema in bytes, of which the batch
could be put together elsewhere; one process, which does each in turn.
"""

from __future__ import annotations

from pathlib import Path

from report import Row, Section, duration
from shm.processes import run_program

from scatter.cases import Plan

__all__ = ["tree"]

# Of the walk and pickle.
_TIMES = 4.0
_STATES = {"known": "as batches before", "new": "of a form never seen"}


def tree(plan: Plan) -> Section:
    """One batch of each kind, of which others like it came before, or not."""
    section = Section(
        title="A batch taken apart",
        note="td.tree.flatten and pickle.dumps of the schema, against a recursive walk that puts dtype and shape in "
        "the place of each tensor, and pickle.dumps of what that makes, as the seed's method has it. deep: 500 tensors "
        "of 1 KB, five in each of 100 dicts of dicts and lists; many: as many in one list. Of a form never seen: with "
        "a key and a shape that no batch before had.",
    )
    request = {"rounds": plan.rounds, "repeats": plan.repeats}
    [reply] = run_program(Path(__file__).parent / "tree_child.py", request, [{"OMP_NUM_THREADS": "1"}])
    for kind, states in reply.items():
        for state, seconds in states.items():
            ratio, judged = seconds["seed"] / seconds["ours"], plan.judges and state == "known"
            section.rows.append(
                Row(
                    case=f"{kind}, {_STATES[state]}",
                    ours=duration(seconds["ours"]),
                    peer="recursive walk and pickle",
                    peers=duration(seconds["seed"]),
                    figure=f"{ratio:.3g}×",
                    target=f"≥ {_TIMES:g}×" if judged else "–",
                    met=ratio >= _TIMES if judged else None,
                )
            )
    return section
