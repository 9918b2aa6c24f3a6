"""The rows of the rtensor bench: fetches, and fetches beside a large one.

Every contestant has an owner process and a consumer process. In each round each contestant fetches a few times in a
row; the first round does not count. A fetch ends when every byte has been read, and its digest is compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from measure import OutputsDiffer, Seconds
from report import Section, compared

from rtensor.processes import Process, pair
from rtensor.tensors import CASES

_SMALL, _LARGE, _MANY = "64 KB", "256 MB", "256 × 64 KB"
_SMALL_BYTES = 64 << 20
_NAMES = {
    "AReaL": "AReaL's HTTP path",
    "Ray": "Ray, tensors",
    "Ray, arrays": "Ray, numpy's arrays",
    "torch RPC": "torch RPC, tcp",
    "pyzmq": "pyzmq",
    "Arrow Flight": "Arrow Flight",
    "gRPC": "gRPC, a call a tensor",
    "gRPC, one stream": "gRPC, one stream",
    "sockets": "a plain connection",
    "ours, from the buffer": "from the buffer, nothing is sent",
    "reading": "reading only",
}
_FLOOR = (
    "As many bytes through one plain connection, from warm memory into warm memory, and read, are timed beside it: "
    "one connection cannot bring them in less."
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The size of a run.

    Attributes:
        rounds: rounds of fetches.
        repeats: repetitions of small cases in a round.
        cases: the cases to run.
        contestants: the other contestants to run.
        fetches: small fetches beside a large one.
        seconds: the longest time for these.
        drained: entries that are drained by step, and by ids.
    """

    rounds: int = 5
    repeats: int = 10
    cases: tuple[str, ...] = tuple(CASES)
    contestants: tuple[str, ...] = tuple(_NAMES)
    fetches: int = 500
    seconds: float = 20.0
    drained: tuple[int, int] = (10**6, 10**5)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A section of rows: our contestant, and the cases that each other one runs."""

    title: str
    note: str
    ours: str
    others: Mapping[str, Sequence[str]]


_FETCHES = {
    "sockets": Comparison(
        title="Fetching over sockets, beside AReaL and pyzmq",
        note=f"All over loopback. The consumer's buffer is empty before. {_FLOOR} Making tensors of the buffer's bytes "
        "and reading them is timed, too: a fetch over one connection does that as well.",
        ours="ours",
        others={
            contestant: tuple(CASES) for contestant in ("AReaL", "pyzmq", "sockets", "ours, from the buffer")
        },
    ),
    "transports": Comparison(
        title="Fetching over sockets, beside transports",
        note="All over loopback. The peers' tensors are read-only, except torch's; ours are writable, and "
        f"their checksum was verified. {_FLOOR}",
        ours="ours",
        others=dict.fromkeys(("torch RPC", "Arrow Flight", "gRPC", "gRPC, one stream", "sockets"), (_MANY,)),
    ),
    "ray": Comparison(
        title="Fetching on one node, beside Ray",
        note="Ours reads the owner's shared memory; the tensor is writable. Ray's arrays are read from shared memory, "
        "too, and are read-only; its tensors are copied. Reading as many bytes of the consumer's own memory is timed "
        "beside it, as the lower bound.",
        ours="ours, same node",
        others=dict.fromkeys(("Ray", "Ray, arrays", "reading"), (_LARGE, _MANY)),
    ),
}


def fetches(name: str, plan: Plan) -> Section:
    """One of the measures of fetching."""
    comparison = _FETCHES[name]
    section = Section(title=comparison.title, note=comparison.note)
    others = {
        contestant: asked for contestant, asked in comparison.others.items() if contestant in plan.contestants
    }
    every = [case for case in plan.cases if any(case in asked for asked in others.values())]
    with _consumers({comparison.ours: every, **dict.fromkeys(others, every)}) as consumers:
        for case in every:
            seconds = _fetched(consumers, case, plan)
            ours = seconds.pop(comparison.ours)
            section.rows += [
                compared(case, ours, _NAMES[contestant], took) for contestant, took in seconds.items()
            ]
    return section


def beside(plan: Plan) -> Section:
    """Small fetches while a large one runs."""
    section = Section(
        title=f"{_SMALL} fetches while {_LARGE} are fetched",
        note="Over sockets, by two threads of the consumer from the same owner; the time that 99 of 100 small fetches "
        f"stay under, of {plan.fetches} or of as many as there are in {plan.seconds:g} seconds.",
    )
    late = {}
    for contestant in ("ours", "AReaL"):
        with pair(contestant, (_SMALL, _LARGE)) as (_, consumer):
            for case in (_SMALL, _LARGE):
                consumer.ask("fetch", case)
            times = sorted(consumer.ask("beside", _LARGE, _SMALL, plan.fetches, plan.seconds))
            late[contestant] = times[len(times) * 99 // 100]
    section.rows.append(compared(_SMALL, late["ours"], _NAMES["AReaL"], late["AReaL"]))
    return section


@contextlib.contextmanager
def _consumers(contestants: Mapping[str, Sequence[str]]) -> Iterator[dict[str, Process]]:
    """Starts an owner and a consumer of each contestant; yields the consumers."""
    with contextlib.ExitStack() as stack:
        yield {
            contestant: stack.enter_context(pair(contestant, cases))[1]
            for contestant, cases in contestants.items()
        }


def _repeats(case: str, plan: Plan) -> int:
    """How often in a row a case is fetched."""
    count, size = CASES[case]
    return plan.repeats if count * size <= _SMALL_BYTES else 1


def _least(
    consumers: Mapping[str, Process], case: str, plan: Plan, take: Callable[[Process], float]
) -> dict[str, Seconds]:
    """The least seconds of each, after a round that warms everything up."""
    times: dict[str, list[float]] = {contestant: [] for contestant in consumers}
    for number in range(plan.rounds + 1):
        for contestant, consumer in consumers.items():
            for _ in range(_repeats(case, plan)):
                took = take(consumer)
                if number:
                    times[contestant].append(took)
    return {contestant: Seconds.least(each) for contestant, each in times.items()}


def _fetched(consumers: Mapping[str, Process], case: str, plan: Plan) -> dict[str, Seconds]:
    """The least seconds of each."""
    digests = set()

    def fetch(consumer: Process) -> float:
        took, digest = consumer.ask("fetch", case)
        digests.add(digest)
        return float(took)

    seconds = _least(consumers, case, plan, fetch)
    if len(digests) != 1:
        raise OutputsDiffer(f"not all contestants bring the same tensors of {case}")
    return seconds
