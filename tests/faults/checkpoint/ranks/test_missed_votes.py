"""One rank misses the result of a vote: that call fails, and all ranks are in step at the next.

So it ends where the job's store stands still for longer than the timeout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.checkpoint.rank_commands import _Rank, assert_fine, assert_saved, each, end, save
from support.distributed.rank_processes import Job, Line, outcome

TIMEOUT = 3.0


class _Seeing(_Rank):
    def lose_sight(self) -> None:
        """In the next vote of its calls, this rank brings its status and does not hear what it came to."""
        from tundish.errors import VoteTimeoutError

        voter = self._checkpointer._session.voter
        real = voter._hold

        def hold(*arguments: Any, **named: Any) -> Any:
            del voter._hold
            real(*arguments, **named)
            raise VoteTimeoutError("the job's store did not answer", ())

        voter._hold = hold

    def discard_after(self, step: int) -> Any:
        return outcome(lambda: self._checkpointer.discard_after(step))


def obey_and_see(rank: int, line: Line) -> None:
    this = _Seeing()
    while (order := line.hear()) is not None:
        name, arguments, named = order
        line.say(getattr(this, name)(*arguments, **named))


@pytest.mark.parametrize("blind", [0, 1])
def test_a_rank_that_lost_sight_of_a_vote_is_in_step_again_at_the_next_call(
    blind: int, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    with Job(obey_and_see, 2, tmp_path) as job:
        assert_fine(each(job, "open", root, timeout=TIMEOUT))
        for kind in ("hf", "dcp"):
            save(job, kind, 1)
            job.tell(blind, ("lose_sight", (), {}))
            job.hear(blind)
            each(job, "save", kind, 2)
            # Where it was taken it comes to nothing.
            job.tell(1 - blind, ("result", (kind, 2), {}))
            ((error, _, _),) = job.hear(1 - blind)
            assert error
            each(job, "failed")
            for step in (3, 4):
                save(job, kind, step)
        job.tell(blind, ("lose_sight", (), {}))
        job.hear(blind)
        assert {error for error, _, _ in each(job, "discard_after", 4)} == {"VoteTimeoutError"}
        for kind in ("hf", "dcp"):
            save(job, kind, 5)
        assert_fine(each(job, "close"))
        end(job)
    assert_saved(root, {"dcp": [1, 3, 4, 5], "hf": [1, 3, 4, 5]})
