"""What a vote ended with, as every rank reads it from the store, and the error it means for a rank.

A verdict travels as JSON and is bounded in size, however many ranks fail and whatever they say.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tundish.errors import PeerFailedError, TundishError, VoteTimeoutError, ranks_named

__all__ = ["GoneError", "Outcome", "RankFailure", "Verdict"]

_TEXT_CHARACTERS = 2000
_DETAILED = 8
_NAMED = 256


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """A rank that cannot go on: `text` is its error, or says how it was lost."""

    rank: int
    text: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> RankFailure:
        """The failure of `rank` with `error`, its text cut to a bounded length; of a `GoneError` the other one's."""
        if isinstance(error, GoneError):
            return error.failure
        try:
            text = str(error)
        except Exception:  # noqa: BLE001 (an error that cannot even be printed is still a failure)
            text = "(its message cannot be printed)"
        text = f"failed with {type(error).__name__}" + (f": {text}" if text else "")
        if len(text) > _TEXT_CHARACTERS:
            text = text[:_TEXT_CHARACTERS] + f" … ({len(text) - _TEXT_CHARACTERS} characters more)"
        return cls(rank=rank, text=text)

    def to_json(self) -> str:
        """The JSON form."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankFailure:
        """From the JSON form."""
        return cls(**json.loads(text))


class GoneError(PeerFailedError):
    """What a rank that works for others ends with when it sees that another one is gone.

    Brought to a vote it stands for the `failure`, the other one's: `RankFailure.of` makes that of it, the verdict names
    that rank, and this one raises what all do.
    """

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(f"rank {failure.rank} {failure.text}", failure.rank)
        self.failure = failure


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The one end of a vote.

    `complete`: every rank brought its status. `failures`: of the lowest ranks that failed or died, ascending, with what
    they said; `also_failed`: of further ones the numbers alone; `failed_count`: of all, those included that are not
    named. `silent`: ranks that had not voted when the time was up; `silent_count`: of all of these. `present_count`: of
    the ranks, still alive, that had voted. `is_noted`: whether one of them noted something. `seconds`: how long they
    were waited for. No more than the lowest 256 ranks are named.
    """

    complete: bool
    failures: tuple[RankFailure, ...] = ()
    also_failed: tuple[int, ...] = ()
    failed_count: int = 0
    silent: tuple[int, ...] = ()
    silent_count: int = 0
    present_count: int = 0
    is_noted: bool = False
    seconds: float = 0.0

    @classmethod
    def bounded(
        cls,
        *,
        complete: bool,
        failures: Sequence[RankFailure],
        failed_count: int,
        silent: Sequence[int],
        present_count: int,
        is_noted: bool,
        seconds: float,
    ) -> Verdict:
        """A verdict of bounded size: only the lowest ranks keep their texts. `failed_count`: at least so many did."""
        ordered = sorted(failures, key=lambda failure: failure.rank)[:_NAMED]
        return cls(
            complete=complete,
            failures=tuple(ordered[:_DETAILED]),
            also_failed=tuple(failure.rank for failure in ordered[_DETAILED:]),
            failed_count=max(failed_count, len(failures)),
            silent=tuple(sorted(silent)[:_NAMED]),
            silent_count=len(silent),
            present_count=present_count,
            is_noted=is_noted,
            seconds=seconds,
        )

    def to_json(self) -> str:
        """The JSON form."""
        return json.dumps({**vars(self), "failures": [vars(failure) for failure in self.failures]})

    @classmethod
    def from_json(cls, text: str) -> Verdict:
        """From the JSON form."""
        fields = json.loads(text)
        fields["failures"] = tuple(RankFailure(**failure) for failure in fields["failures"])
        fields["also_failed"] = tuple(fields["also_failed"])
        fields["silent"] = tuple(fields["silent"])
        return cls(**fields)

    def error(self, what: str, rank: int, *, late: bool) -> TundishError | None:
        """What `rank` has to raise after the vote on `what`; None where all went well.

        `late`: the vote was over when `rank` came to it.
        """
        if self.failures:
            told = "; ".join(f"rank {failure.rank} {failure.text}" for failure in self.failures)
            others = self.failed_count - len(self.failures)
            if others > 0:
                told += f"; {ranks_named(self.also_failed, others)} failed too"
            return PeerFailedError(f"{what}: {told}", self.failures[0].rank)
        if self.complete:
            return None
        if late or rank in self.silent:
            return VoteTimeoutError(
                f"{what}: rank {rank} came to this vote after the others had given up waiting for it: it was "
                "slower than their timeout, or stopped. They raised too, so all can go on with the next vote",
                (rank,),
            )
        if not self.silent:
            return VoteTimeoutError(f"{what}: the job's store did not answer another rank in time", ())
        names = ranks_named(self.silent, self.silent_count)
        return VoteTimeoutError(
            f"{what}: {names} did not vote within {self.seconds:.4g} s: hung, stopped or elsewhere in the "
            "program. Look where their stacks are, or give a longer timeout",
            self.silent,
        )


class Outcome(NamedTuple):
    """What a round came to on one rank.

    `problem`: what it has to raise. `gathered`: what all brought, on the first member. `heard`: what this rank's source
    told. `is_noted`: whether some rank noted something.
    """

    problem: TundishError | None
    gathered: Sequence[str] = ()
    heard: str | None = None
    is_noted: bool = False
