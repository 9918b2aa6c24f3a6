"""Votes that carry something: what has to be the same on all ranks, and what the first rank is to get."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tundish.distributed import Voter

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from rank_processes import FILE, LAUNCHER, RANK0, Job, Line, outcome


def exchange(rank: int, line: Line) -> None:
    with Voter() as voter:
        line.say(*outcome(lambda: voter.vote(what="equal", same="all alike")))
        line.say(*outcome(lambda: voter.vote(what="unequal", same="odd" if rank == 1 else "even")))
        line.say(voter.gather(f"from {rank}", what="gathering"))
        own = KeyError("lost") if rank == 2 else None
        line.say(*outcome(lambda: voter.gather(f"again from {rank}", own, what="bad gathering")))
        line.say(voter.gather("é" * (rank * 10_000), what="once more"))
        line.say(*outcome(lambda: voter.vote(what="a plain vote")))


@pytest.mark.parametrize("host", [LAUNCHER, RANK0, FILE])
def test_what_votes_carry(host: str, tmp_path: Path) -> None:
    with Job(exchange, 3, tmp_path, host=host) as job:
        assert job.hear_all() == [("", "", None)] * 3
        heard = job.hear_all()
        assert {kind for kind, _, _ in heard} == {"PeerFailedError"}
        assert len({text for _, text, _ in heard}) == 1
        assert "odd" in heard[0][1]
        assert "even" in heard[0][1]
        assert job.hear_all() == [(["from 0", "from 1", "from 2"],), ([],), ([],)]
        heard = job.hear_all()
        assert [kind for kind, _, _ in heard] == ["PeerFailedError", "PeerFailedError", "KeyError"]
        assert job.hear_all() == [(["", "é" * 10_000, "é" * 20_000],), ([],), ([],)]
        assert job.hear_all() == [("", "", None)] * 3
        job.expect_end()


def test_a_world_of_one_gathers_its_own_value() -> None:
    with Voter() as voter:
        assert voter.gather("mine", what="gathering") == ["mine"]
        voter.vote(what="equal", same="alone")
        with pytest.raises(KeyError, match="lost"):
            voter.gather("mine", KeyError("lost"), what="gathering")
