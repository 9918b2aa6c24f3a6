"""Votes of hundreds of ranks, which are threads here: the number of requests to the store, and the results."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tundish.distributed import GroupInfo, RankFailure, Voter, vote_protocol
from tundish.distributed import voter as voter_module
from tundish.distributed.job_store import JobStore
from tundish.distributed.vote_protocol import RankVote, VoteResult
from tundish.errors import VoteTimeoutError, format_ranks

# The error that a rank raises, or its vote.
Result = tuple[Exception | None, RankVote | None]

SIZE = 200
# More than a rank asks in any round that lasts no longer than a second or two, however many ranks there are.
MODEST = 100


class Crowd:
    """`SIZE` ranks of a job on nodes of eight; `requests` counts their requests to the store, by kind.

    `service`: seconds that the store takes for a request; it serves one after the other. `pause`: a key that it takes
    so many seconds for.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch.distributed import HashStore

        self.requests: Counter[str] = Counter()
        self.longest = 0
        self.service = 0.0
        self.pause = ("", 0.0)
        serving = threading.Lock()
        crowd = self

        class Counted(JobStore):
            def connect(self) -> None:
                is_new = self._connection is None
                super().connect()
                if is_new:
                    self._connection = Counting(self._connection)

        class Counting:
            def __init__(self, store: Any) -> None:
                self._store = store

            def __getattr__(self, name: str) -> Any:
                def ask(*arguments: Any) -> Any:
                    crowd.requests[name] += 1
                    texts = [len(one) for one in arguments if isinstance(one, str)]
                    crowd.longest = max(crowd.longest, *texts, 0)
                    if crowd.service:
                        with serving:
                            time.sleep(crowd.service)
                    place, seconds = crowd.pause
                    if place and arguments[0] == place:
                        time.sleep(seconds)
                    return getattr(self._store, name)(*arguments)

                return ask

        monkeypatch.setattr(vote_protocol, "JobStore", Counted)
        monkeypatch.setattr(voter_module, "unique_name", lambda *_: "crowd")
        monkeypatch.setattr(voter_module, "_known_losses", lambda _: dict)
        self.store = HashStore()
        ranks = tuple(range(SIZE))
        self._voters: list[Voter] = []
        for rank in ranks:
            member = GroupInfo(ranks=ranks, rank=rank, name="crowd", store=self.store)
            monkeypatch.setattr(voter_module, "group_info", lambda _, member=member: member)
            monkeypatch.setattr(voter_module, "node_identity", lambda rank=rank: f"node {rank // 8}")
            self._voters.append(Voter(first_vote=False))

    def hold(self, *ranks: int, seconds: float = 30.0, **brought: Any) -> list[Result]:
        """A round of these ranks, or of all; `brought` are functions of the rank."""
        outcomes: dict[int, Result] = {}

        def vote(rank: int) -> None:
            told = {name: function(rank) for name, function in brought.items()}
            own = told.pop("own", None)
            try:
                outcomes[rank] = None, self._voters[rank]._hold(own, "a step", seconds, **told)
            except Exception as error:
                outcomes[rank] = error, None

        taking_part = ranks or tuple(range(SIZE))
        self.requests.clear()
        self.longest = 0
        threads = [threading.Thread(target=vote, args=(rank,)) for rank in taking_part]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [outcomes[rank] for rank in taking_part]

    def close(self) -> None:
        for voter in self._voters:
            voter.close()


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> Iterator[Crowd]:
    made = Crowd(monkeypatch)
    assert not any(problem for problem, _ in made.hold())
    yield made
    made.close()


def test_requests_stay_few_if_every_rank_fails(crowd: Crowd) -> None:
    crowd.service = 0.0002
    outcomes = crowd.hold(own=lambda rank: OSError(28, f"no room on {rank}"))
    assert crowd.requests.total() < MODEST * SIZE
    assert [str(problem) for problem, _ in outcomes] == [
        f"[Errno 28] no room on {rank}" for rank in range(SIZE)
    ]
    crowd.service = 0.0
    assert not any(problem for problem, _ in crowd.hold())


def test_requests_stay_few_if_all_but_a_silent_rank_fail(crowd: Crowd) -> None:
    crowd.service = 0.0002
    outcomes = crowd.hold(*range(1, SIZE), own=lambda rank: OSError(28, f"no room on {rank}"))
    assert crowd.requests.total() < MODEST * SIZE
    assert all(isinstance(problem, OSError) for problem, _ in outcomes)


def test_the_next_rank_writes_the_result_if_one_is_lost(crowd: Crowd) -> None:
    from torch.distributed import PrefixStore

    # As a rank does that is killed right after.
    PrefixStore("votes/crowd/start-0", crowd.store).add("1/turns", 1)
    outcomes = crowd.hold(*range(1, SIZE), seconds=1.0)
    for problem, _ in outcomes:
        assert isinstance(problem, VoteTimeoutError)
        assert problem.ranks == (0,)


def test_a_vote_ends_if_the_last_two_ranks_are_lost(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import PrefixStore

    store = PrefixStore("votes/crowd/start-0", crowd.store)
    # The last one, and the one whose turn it would have been.
    store.set("1/vote/0", "")
    store.add("1/turns", 1)
    lost = threading.Timer(0.5, store.add, ("1/arrived", 1))
    monkeypatch.setattr(vote_protocol, "_CHECK_SECONDS", 3.0)
    lost.start()
    assert not any(problem for problem, _ in crowd.hold(*range(1, SIZE)))
    lost.join()


def test_gathered_values_take_few_requests(crowd: Crowd) -> None:
    first, *others = crowd.hold(value=lambda rank: f"of {rank}", gathers=lambda _: True)
    assert first[1] is not None and first[1].values == [f"of {rank}" for rank in range(SIZE)]
    assert not any(vote.values for _, vote in others if vote is not None)
    assert crowd.requests["multi_get"] == 1
    # Each takes its own back when all are in a later round, which the first rank is not before it has read them.
    assert crowd.requests["delete_key"] < 3 * SIZE
    assert not any(problem for problem, _ in crowd.hold())
    assert crowd.store.num_keys() < SIZE


def test_a_long_text_that_is_the_same_on_all_ranks_is_not_sent_by_each(crowd: Crowd) -> None:
    text = "all that ten thousand ranks were given " * 1000
    assert not any(problem for problem, _ in crowd.hold(same=lambda _: text))
    assert crowd.longest < 1000
    outcomes = crowd.hold(same=lambda rank: text + ("" if rank else "!"))
    assert all(problem for problem, _ in outcomes)
    assert "39001 characters" in str(outcomes[1][0])


def test_a_result_about_ten_thousand_ranks_is_short() -> None:
    failures = [RankFailure(rank=rank, text="failed with OSError: no room") for rank in range(10_000)]
    about = {"present_count": 10_000, "flagged": False, "seconds": 1.0}
    failed = VoteResult.bounded(complete=True, failures=failures, failed_count=10_000, silent=[], **about)
    told = str(VoteResult.from_json(failed.to_json()).error("a step", 9_999, late=False))
    assert told.count("no room") == 8
    assert told.endswith("; ranks 8-255 and 9744 more failed too")
    assert len(told) < 500
    silent = VoteResult.bounded(complete=False, failures=[], failed_count=0, silent=range(1, 10_000), **about)
    problem = VoteResult.from_json(silent.to_json()).error("a step", 0, late=False)
    assert isinstance(problem, VoteTimeoutError)
    assert problem.ranks == tuple(range(1, 257))
    assert "a step: ranks 1-256 and 9743 more did not vote within 1 s" in str(problem)


@pytest.mark.parametrize(
    ("ranks", "count", "named"),
    [
        ([3], None, "rank 3"),
        ([3, 4], None, "ranks 3, 4"),
        ([3, 4, 5, 9], None, "ranks 3-5, 9"),
        (range(9_999), None, "ranks 0-9998"),
        ([1, 3], 12, "ranks 1, 3 and 10 more"),
        (range(0, 20_000, 2), None, f"ranks {', '.join(map(str, range(0, 32, 2)))} and 9984 more"),
    ],
)
def test_ranks_are_named_in_few_words(ranks: Any, count: int | None, named: str) -> None:
    assert format_ranks(ranks, count) == named
