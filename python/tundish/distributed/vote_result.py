"""The result of a vote, which all ranks read from the store, and the error that each rank raises for it.

A result is JSON of bounded size, for any number of failed ranks and any length of their errors.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from tundish.errors import PeerFailedError, TundishError, VoteTimeoutError, format_ranks

_MAX_CHARACTERS = 2000
_MAX_DETAILED = 8
_MAX_NAMED = 256
# Characters that are shown of a compared text, and of one argument in it.
_MAX_COMPARED = 1000
_MAX_ARGUMENT = 250


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """The failure of one rank.

    Attributes:
        rank: its global rank.
        text: its error, or how it was lost: "failed with OSError: …", "was killed or vanished".
    """

    rank: int
    text: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> RankFailure:
        """The failure of `rank` with `error`, its text shortened; of a `LostPeerError` the lost peer's failure."""
        if isinstance(error, LostPeerError):
            return error.failure
        try:
            text = str(error)
        except Exception:  # noqa: BLE001 (an error that cannot be printed is still a failure)
            text = "(its message cannot be printed)"
        text = f"failed with {type(error).__name__}" + (f": {text}" if text else "")
        if len(text) > _MAX_CHARACTERS:
            text = text[:_MAX_CHARACTERS] + f" … ({len(text) - _MAX_CHARACTERS} characters more)"
        return cls(rank=rank, text=text)

    def to_json(self) -> str:
        """The JSON form."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankFailure:
        """The failure with this JSON form."""
        return cls(**json.loads(text))


class LostPeerError(PeerFailedError):
    """Another rank was lost. Brought to a vote, it counts as the failure of that rank."""

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(f"rank {failure.rank} {failure.text}", failure.rank)
        self.failure = failure


@dataclass(frozen=True, kw_only=True)
class VoteResult:
    """The one result of a vote. At most the lowest 256 ranks are named.

    Attributes:
        complete: whether every rank reported its status.
        failures: the lowest ranks that failed or died, ascending, with their errors.
        also_failed: the ranks of further failures, without their errors.
        failed_count: the number of all failures, including those that are not named.
        silent: ranks that had not voted by the deadline.
        silent_count: the number of all silent ranks.
        present_count: ranks, still alive, that had voted.
        flagged: whether a rank set its flag.
        seconds: how long the silent ranks were waited for.
    """

    complete: bool
    failures: tuple[RankFailure, ...] = ()
    also_failed: tuple[int, ...] = ()
    failed_count: int = 0
    silent: tuple[int, ...] = ()
    silent_count: int = 0
    present_count: int = 0
    flagged: bool = False
    seconds: float = 0.0

    @classmethod
    def bounded(
        cls, *, failures: Sequence[RankFailure], failed_count: int, silent: Sequence[int], **fields: object
    ) -> VoteResult:
        """A result of bounded size: only the lowest ranks keep their errors. `failed_count` is a lower bound."""
        ordered = sorted(failures, key=lambda failure: failure.rank)[:_MAX_NAMED]
        return cls(
            failures=tuple(ordered[:_MAX_DETAILED]),
            also_failed=tuple(failure.rank for failure in ordered[_MAX_DETAILED:]),
            failed_count=max(failed_count, len(failures)),
            silent=tuple(sorted(silent)[:_MAX_NAMED]),
            silent_count=len(silent),
            **fields,  # type: ignore[arg-type]
        )

    @property
    def succeeded(self) -> bool:
        """Whether every rank brought a good status."""
        return self.complete and not self.failures

    def to_json(self) -> str:
        """The JSON form."""
        return json.dumps({**vars(self), "failures": [vars(failure) for failure in self.failures]})

    @classmethod
    def from_json(cls, text: str) -> VoteResult:
        """The result with this JSON form."""
        fields = json.loads(text)
        fields["failures"] = tuple(RankFailure(**failure) for failure in fields["failures"])
        fields["also_failed"] = tuple(fields["also_failed"])
        fields["silent"] = tuple(fields["silent"])
        return cls(**fields)

    def error(self, what: str, rank: int, *, late: bool) -> TundishError | None:
        """The error that `rank` raises after the vote on `what`; None where all ranks are well.

        `late`: the vote had ended when `rank` came to it.
        """
        if self.failures:
            text = "; ".join(f"rank {failure.rank} {failure.text}" for failure in self.failures)
            others = self.failed_count - len(self.failures)
            if others > 0:
                text += f"; {format_ranks(self.also_failed, others)} failed too"
            return PeerFailedError(f"{what}: {text}", self.failures[0].rank)
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
        names = format_ranks(self.silent, self.silent_count)
        return VoteTimeoutError(
            f"{what}: {names} did not vote within {self.seconds:.4g} s. They hang, were stopped, or are elsewhere in "
            "the program: look at their stacks, or give a longer timeout",
            self.silent,
        )


def same_arguments(**arguments: object) -> str:
    """Return a text for the `same` of a vote. The vote then names the arguments that differ between ranks."""
    return json.dumps({name: shortened(str(value), _MAX_ARGUMENT) for name, value in arguments.items()})


def difference(mine: str, theirs: str, other: str) -> str:
    """Return the text of a `RankFailure`: this rank's `same` differs from that of rank `other`."""
    here, there = _arguments(mine), _arguments(theirs)
    differing = [
        f"{name} is {value} instead of {there[name]}"
        for name, value in here.items()
        if there.get(name, value) != value
    ]
    if not differing or here.keys() != there.keys():
        differing = [f"{_shown(mine)} instead of {_shown(theirs)}"]
    return f"differs from rank {other}: {', '.join(differing)}; give all ranks the same"


def shortened(text: str, most: int = _MAX_COMPARED) -> str:
    """Return `text`, or its beginning and hash if it has more than `most` characters or is no Unicode."""
    shown = text[: most if len(text) <= most else most // 4].encode(errors="backslashreplace").decode()
    if shown == text:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return f"{shown} … ({len(text)} characters, sha256 {digest})"


def _arguments(same: str) -> dict[str, str]:
    """The arguments of a text of `same_arguments`; empty for another text."""
    try:
        found = json.loads(same)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _shown(same: str) -> str:
    named = _arguments(same)
    return ", ".join(f"{name} {value}" for name, value in named.items()) if named else repr(same)
