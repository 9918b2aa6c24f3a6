"""What a run starts from: one policy for all adapters of trainers.

- A run resumes from the newest whole DCP checkpoint, or from a step that is named. Damaged ones are passed over, with
  an error in the log. If all are damaged, resuming fails: training must not start anew by itself.
- What is newer than the step that a run goes on from is set aside before the first save, and never deleted.
- A new run starts only where no earlier run left a checkpoint to resume from. What a killed run left beside is set
  aside.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tundish.checkpoint.root import Kind, name_of
from tundish.distributed import agreed
from tundish.errors import StepExistsError

if TYPE_CHECKING:
    from tundish.checkpoint.checkpointer import Checkpointer

_logger = logging.getLogger("tundish.checkpoint")


@dataclass(frozen=True, kw_only=True)
class ResumedRun:
    """The checkpoint that a run goes on from, without its tensors.

    Attributes:
        step: of the checkpoint.
        extra: as it was saved.
        rank_extras: of each rank that saved, by rank.
    """

    step: int
    extra: Mapping[str, Any]
    rank_extras: Mapping[int, Any]


def start_new_run(
    checkpointer: Checkpointer, *, kind: Kind | None = "dcp", how: str = "resume from it"
) -> None:
    """Collective: refuse to start where an earlier run left checkpoints; set aside what cannot be resumed from.

    Args:
        checkpointer: of the new run.
        kind: which checkpoints count as those of a run; None counts both. Damaged ones count too: resuming reports
            what is wrong with them.
        how: how the user resumes, for the message.

    Raises:
        StepExistsError: there are some; on all ranks.
    """
    with agreed("starting without an earlier checkpoint"):
        found = checkpointer.survey(kind)
        earlier = [one for ones in found for one in ones]
        if earlier:
            # A run cannot resume from exports alone.
            can_resume = any(checkpoint.kind == "dcp" for checkpoint in earlier)
            advice = (
                f"{how}, or give another folder"
                if can_resume
                else "give another folder, or move it away; a run cannot be resumed from exports"
            )
            raise StepExistsError(
                errno.EEXIST, f"exists from an earlier run: {advice}", str(earlier[-1].path)
            )
    checkpointer.discard_after(0)


def choose_checkpoint(checkpointer: Checkpointer, step: int | None = None) -> ResumedRun:
    """Collective: choose the checkpoint to go on from, verify it, and read all but its tensors.

    Args:
        checkpointer: of the run.
        step: the checkpoint; None takes the newest whole one.

    Raises:
        NotFoundError: there is none; on all ranks, as all errors here.
        CorruptCheckpointError: the checkpoint, or every checkpoint, is damaged.
    """
    chosen, (extra, rank_extras) = checkpointer._load({}, step)
    return ResumedRun(step=chosen, extra=extra, rank_extras=rank_extras)


def load_chosen(checkpointer: Checkpointer, state_dict: dict[str, Any], run: ResumedRun) -> None:
    """Collective: load the tensors of a chosen checkpoint in place, and set aside all that is newer.

    A killed run may have published one kind of a step alone, and newer checkpoints may be damaged.
    """
    # Its checksums were verified when it was chosen.
    checkpointer.load_dcp(state_dict, run.step, verify=False)
    if checkpointer._session.voter.is_first:
        _logger.info("resumed from %s", checkpointer.path / name_of("dcp", run.step))
    checkpointer.discard_after(run.step)
