"""Votes that carry texts: to compare, to gather, to combine and to broadcast."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path

import pytest
from support.distributed.rank_processes import FILE, LAUNCHER, RANK0, Job, Line, outcome, run_job

from tundish.distributed import Voter, same_arguments, vote
from tundish.distributed.vote_protocol import difference
from tundish.errors import InvalidInputError, InvalidTypeError


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
def test_votes_carry_values(host: str, tmp_path: Path) -> None:
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


def work_together(rank: int, line: Line) -> None:
    undone: list[int] = []

    def fail() -> int:
        raise KeyError("lost")

    with Voter() as voter:
        line.say(voter.run(lambda: rank, what="connecting", undo=undone.append))
        work = fail if rank == 1 else lambda: rank
        line.say(*outcome(lambda: voter.run(work, what="connecting again", undo=undone.append)))
        line.say(undone)
        is_over = threading.Event()
        line.say(*outcome(lambda: voter.run(is_over.wait, what="slow work", undo=undone.append, timeout=0.3)))
        line.say(*outcome(lambda: voter.vote(what="a plain vote")))
        is_over.set()


@pytest.mark.parametrize("host", [LAUNCHER, RANK0, FILE])
def test_ranks_work_together_or_fail_together(host: str, tmp_path: Path) -> None:
    with Job(work_together, 3, tmp_path, host=host) as job:
        assert job.hear_all() == [(0,), (1,), (2,)]
        heard = job.hear_all()
        assert [kind for kind, _, _ in heard] == ["PeerFailedError", "KeyError", "PeerFailedError"]
        assert "connecting again: rank 1 failed with KeyError" in heard[0][1]
        assert job.hear_all() == [([0],), ([],), ([2],)]
        for kind, text, _ in job.hear_all():
            assert kind == "PeerFailedError"
            assert "did not finish in time" in text
        assert job.hear_all() == [("", "", None)] * 3
        job.expect_end()


def vote_with_a_text(rank: int, line: Line) -> None:
    line.say(*outcome(lambda: vote("bad" if rank == 1 else None, what="reading")))  # type: ignore[arg-type]
    line.say(*outcome(lambda: vote(what="reading again")))


def test_an_error_that_is_no_exception_is_refused_on_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(InvalidTypeError, match="reading: error is a str: give an exception"):
        vote("bad", what="reading")  # type: ignore[arg-type]
    with Job(vote_with_a_text, 2, tmp_path) as job:
        heard = job.hear_all()
        assert [kind for kind, _, _ in heard] == ["PeerFailedError", "InvalidTypeError"]
        assert "error is a str" in heard[0][1]
        assert job.hear_all() == [("", "", None)] * 2
        job.expect_end()


def compare(rank: int, line: Line) -> None:
    line.say(*outcome(lambda: vote(what="equal", same="all alike")))
    line.say(*outcome(lambda: vote(what="unequal", same="odd" if rank == 1 else "even")))
    line.say(*outcome(lambda: vote(what="nothing to compare", same="" if rank == 0 else "something")))
    line.say(*outcome(lambda: vote(what="no text", same=7 if rank == 1 else "7")))
    line.say(*outcome(lambda: vote(ValueError("mine") if rank == 2 else None, what="worse", same="x" * rank)))
    line.say(*outcome(lambda: vote(what="equal again", same="all alike")))


def test_plain_votes_compare_too(tmp_path: Path) -> None:
    with Job(compare, 3, tmp_path) as job:
        assert job.hear_all() == [("", "", None)] * 3
        heard = job.hear_all()
        assert {kind for kind, _, _ in heard} == {"PeerFailedError"}
        assert all("odd" in text and "even" in text for _, text, _ in heard)
        heard = job.hear_all()
        assert [kind for kind, _, _ in heard] == ["InvalidInputError", "PeerFailedError", "PeerFailedError"]
        assert "rank 0 failed with InvalidInputError" in heard[1][1]
        heard = job.hear_all()
        assert [kind for kind, _, _ in heard] == ["PeerFailedError", "InvalidTypeError", "PeerFailedError"]
        heard = job.hear_all()
        assert [kind for kind, _, _ in heard] == ["InvalidInputError", "PeerFailedError", "ValueError"]
        assert job.hear_all() == [("", "", None)] * 3
        job.expect_end()


def test_a_world_of_one_refuses_nothing_to_compare() -> None:
    vote(what="equal", same="alone")
    with pytest.raises(InvalidInputError, match="an empty text"):
        vote(what="nothing", same="")
    with pytest.raises(InvalidTypeError, match="bytes"):
        vote(what="no text", same=b"x")


def test_a_world_of_one_gathers_its_own_value() -> None:
    with Voter() as voter:
        assert voter.gather("mine", what="gathering") == ["mine"]
        voter.vote(what="equal", same="alone")
        with pytest.raises(KeyError, match="lost"):
            voter.gather("mine", KeyError("lost"), what="gathering")


def note(rank: int, line: Line) -> None:
    with Voter() as voter:
        line.say(voter.vote(what="nobody notes"))
        line.say(voter.vote(what="one notes", flag=rank == 1))
        own = KeyError("lost") if rank == 2 else None
        line.say(*outcome(lambda: voter.vote(own, what="one notes, one fails", same="alike", flag=rank == 0)))
        line.say(voter.vote(what="all note", same="alike", flag=True))
        line.say(voter.vote(what="nobody notes any more"))


@pytest.mark.parametrize("host", [LAUNCHER, RANK0, FILE])
def test_a_flag_of_one_rank_reaches_all(host: str, tmp_path: Path) -> None:
    with Job(note, 3, tmp_path, host=host) as job:
        assert job.hear_all() == [(False,)] * 3
        assert job.hear_all() == [(True,)] * 3
        assert [kind for kind, _, _ in job.hear_all()] == ["PeerFailedError", "PeerFailedError", "KeyError"]
        assert job.hear_all() == [(True,)] * 3
        assert job.hear_all() == [(False,)] * 3
        job.expect_end()


def test_a_world_of_one_gets_its_flag() -> None:
    with Voter() as voter:
        assert voter.vote(what="noting", flag=True)
        assert not voter.vote(what="noting nothing")


def broadcast(rank: int, line: Line) -> None:
    with Voter() as voter:
        line.say(voter.broadcast(f"from {rank}" if rank else None, source=2 - rank % 2, what="to pairs"))
        line.say(voter.broadcast("é" * 10_000 if rank == 1 else None, source=1, what="to all"))
        own = KeyError("lost") if rank == 2 else None
        line.say(*outcome(lambda: voter.broadcast(f"bad {rank}", own, source=0, what="badly")))
        line.say(*outcome(lambda: voter.broadcast(None, source=0, what="nothing")))
        voter.vote(what="a plain vote")
        voter.vote(what="another")
        # No value stays in the store.
        store = voter._protocol._store  # type: ignore[union-attr]
        line.say(store.missing([f"{number}/value/{teller}" for number in range(8) for teller in range(3)]))


@pytest.mark.parametrize("host", [LAUNCHER, RANK0, FILE])
def test_broadcasts(host: str, tmp_path: Path) -> None:
    with Job(broadcast, 3, tmp_path, host=host) as job:
        assert job.hear_all() == [("from 2",), ("from 1",), ("from 2",)]
        assert job.hear_all() == [("é" * 10_000,)] * 3
        heard = job.hear_all()
        assert [kind for kind, _, _ in heard] == ["PeerFailedError", "PeerFailedError", "KeyError"]
        heard = job.hear_all()
        assert [kind for kind, _, _ in heard] == ["InvalidInputError"] * 3
        assert "rank 0 sent nothing" in heard[0][1]
        for (missing,) in job.hear_all():
            assert len(missing) == 24
        job.expect_end()


def combine(rank: int, line: Line) -> None:
    def listed(values: list[str]) -> str:
        if "bad" in values:
            raise ValueError("a bad value")
        return json.dumps(values)

    with Voter() as voter:
        line.say(json.loads(voter.combine(f"from {rank}", listed, what="combining")))
        own = KeyError("lost") if rank == 2 else None
        line.say(*outcome(lambda: voter.combine(f"again {rank}", listed, own, what="badly")))
        line.say(*outcome(lambda: voter.combine("bad" if rank == 1 else "good", listed, what="a bad one")))
        line.say(len(voter.combine("é" * 10_000, "".join, what="much")))
        voter.vote(what="a plain vote")
        voter.vote(what="another")
        # No value stays in the store.
        store = voter._protocol._store  # type: ignore[union-attr]
        keys = [f"{number}/value/{teller}" for number in range(8) for teller in range(3)]
        line.say(len(store.missing([*keys, *(f"{number}/combined" for number in range(8))])))


@pytest.mark.parametrize("host", [LAUNCHER, RANK0, FILE])
def test_all_ranks_get_one_text_from_the_values_of_all(host: str, tmp_path: Path) -> None:
    with Job(combine, 3, tmp_path, host=host) as job:
        assert job.hear_all() == [(["from 0", "from 1", "from 2"],)] * 3
        assert [kind for kind, _, _ in job.hear_all()] == ["PeerFailedError", "PeerFailedError", "KeyError"]
        heard = job.hear_all()
        assert {kind for kind, _, _ in heard} == {"PeerFailedError"}
        assert len({text for _, text, _ in heard}) == 1 and "ValueError: a bad value" in heard[0][1]
        assert job.hear_all() == [(30_000,)] * 3
        assert job.hear_all() == [(32,)] * 3
        job.expect_end()


def votes_of_all_kinds(rank: int, line: Line) -> None:
    # Drawn alike on all ranks, so that each knows the result.
    drawn = random.Random(line.hear())
    with Voter() as voter:
        for number in range(60):
            kind = drawn.choice(["well"] * 3 + ["fails", "differs", "flags", "gathers", "combines"])
            who = drawn.randrange(3)
            time.sleep(drawn.choice([0, 0, 0, 0.002, 0.15 if number % 10 == 0 else 0]) * (rank == who))
            what = f"step {number}"
            if kind == "fails":
                error = ValueError("mine") if rank == who else None
                text = outcome(lambda error=error, what=what: voter.vote(error, what=what))
                expected = (
                    ("ValueError", "mine", None)
                    if rank == who
                    else ("PeerFailedError", f"{what}: rank {who} failed with ValueError: mine", who)
                )
                assert text == expected
            elif kind == "differs":
                same = f"{what} of one" if rank == who else what
                assert outcome(lambda same=same, what=what: voter.vote(what=what, same=same))[0]
            elif kind == "flags":
                assert voter.vote(what=what, flag=rank == who)
            elif kind == "gathers":
                found = voter.gather(f"{rank} in {number}", what=what)
                assert found == ([f"{one} in {number}" for one in range(3)] if rank == 0 else [])
            elif kind == "combines":
                assert voter.combine(f"{rank}", "".join, what=what) == "012"
            else:
                assert not voter.vote(what=what, same=what)


@pytest.mark.parametrize("host", [LAUNCHER, RANK0])
def test_each_vote_has_its_own_result_in_any_order_of_kinds(host: str, tmp_path: Path) -> None:
    run_job(votes_of_all_kinds, 3, tmp_path, host, host=host)


def test_a_world_of_one_hears_itself() -> None:
    with Voter() as voter:
        assert voter.combine("alone", "".join, what="telling") == "alone"
        with pytest.raises(KeyError, match="lost"):
            voter.combine("alone", "".join, KeyError("lost"), what="telling")
        assert voter.broadcast("alone", source=0, what="telling") == "alone"
        with pytest.raises(InvalidInputError, match="sent nothing"):
            voter.broadcast(None, source=0, what="telling")


def too_much(rank: int, line: Line) -> None:
    with Voter() as voter, Voter() as other:
        large = "é" * (5 << 20) if rank == 1 else "é"
        line.say(*outcome(lambda: voter.gather(large, what="gathering")))
        line.say(*outcome(lambda: voter.broadcast(large, source=0, what="telling")))
        # As the name of a file can be.
        odd = "\udc80" if rank == 1 else "even"
        line.say(*outcome(lambda: voter.gather(odd, what="gathering")))
        line.say(*outcome(lambda: voter.vote(what="unequal", same=odd)))
        line.say(*outcome(lambda: voter.vote(what="equal", same="\udc80")))
        line.say(*outcome(lambda: other.vote(what="of another voter")))


def test_a_text_that_the_store_cannot_take_is_refused(tmp_path: Path) -> None:
    with Job(too_much, 2, tmp_path) as job:
        for reason in ("10485760 bytes", "10485760 bytes", "is no Unicode"):
            (first, text, named), (second, own, _) = job.hear_all()
            assert (first, named, second) == ("PeerFailedError", 1, "InvalidInputError")
            assert reason in text
            assert reason in own
        heard = job.hear_all()
        assert {kind for kind, _, _ in heard} == {"PeerFailedError"}
        assert "udc80" in heard[0][1]
        assert "even" in heard[0][1]
        assert job.hear_all() == [("", "", None)] * 2
        assert job.hear_all() == [("", "", None)] * 2
        job.expect_end()


def test_a_difference_names_arguments_and_the_other_rank() -> None:
    one = same_arguments(tail="'drop'", prefetch=1)
    assert (
        difference(same_arguments(tail="'drop'", prefetch=2), one, "3")
        == "differs from rank 3: prefetch is 2 instead of 1; give all ranks the same"
    )
    assert "rank 0: call load_dcp instead of tail 'drop', prefetch 1;" in difference(
        same_arguments(call="load_dcp"), one, "0"
    )
    assert "'odd' instead of 'even'" in difference("odd", "even", "0")
    long = difference(same_arguments(tag="x" * 300), same_arguments(tag="x" * 299), "0")
    assert "tag is xxx" in long and "300 characters" in long and "299 characters" in long
