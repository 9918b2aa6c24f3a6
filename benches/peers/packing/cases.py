"""The rows of the packing section: the contestants, and the comparison of their outputs.

Invariants: contestants of one row take the same inputs. Their outputs are compared in full before a row is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measure import Contestant, race
from report import Row, Section, compared, count, duration

import tundish as td
from packing import numpy_forms
from packing.distributions import DISTRIBUTIONS, Distribution, draw_lengths, draw_order
from packing.equal_outputs import assert_all_equal, assert_equal, sums
from packing.floor import read_and_write
from packing.megatron_peer import sample_index
from tundish.packing import shuffled_indices

MAX_LENGTH = 4096
SEED = 0
LOOP = "chunked numpy + Python loop"
VECTORISED = "vectorised numpy"
MEGATRON = "megatron-core build_sample_idx"
FLOOR = "lengths read in the order and six arrays written, nothing more"
FLOOR_OF_TWO = f"{FLOOR}, two threads"
HARD_PLAN_NOTE = f"""\
`td.pack(lengths, {MAX_LENGTH}, order=order, threads=1)`: lengths int32, order int64 (a random permutation, checked), \
default checks. Nanoseconds are per sample.

What is timed beside it:

- The numpy forms give int64 arrays, which are compared in full.
- megatron-core's helper is called in its compiled form, with one epoch, the partial last sequence dropped and one \
extra token. It gives the starting pairs alone, which are compared with `plan.sample_index(order)`.
- The least that any plan in a given order does is a compiled loop (numba), on one thread, and on two, each with its \
part of the order. The lengths are copied to two bytes each, of which caches hold more. Each is read in that order; \
where caches do not hold them all, the memory is asked for it 128 samples before. Each entry of the six arrays is \
written once as int32, into fresh memory, as the plan's are; what is written need not be the plan. Nothing is cut or \
hashed. Of the order only that no sample is out of range is checked.

What two threads gain in that loop is what this machine's memory lets two threads gain where nothing waits."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is run: the full bench or a smoke test of it, and the folder on a real disk that it may fill."""

    samples: tuple[int, ...]
    curve_samples: tuple[int, ...]
    least_rounds: int
    folder: Path

    def rounds(self, samples: int) -> int:
        """More rounds where one takes little, so that the least of them is the machine's own."""
        return self.least_rounds * (10 if samples <= 10**5 else 4 if samples <= 10**6 else 1)


def hard_plan(scale: Scale) -> Section:
    """All six arrays in memory, the order given and checked."""
    section = Section(title="Hard plan in memory, order given", note=HARD_PLAN_NOTE)
    for samples in scale.samples:
        for distribution in DISTRIBUTIONS:
            section.rows += _hard_plan_rows(scale, samples, distribution)
    return section


def _hard_plan_rows(scale: Scale, samples: int, distribution: Distribution) -> list[Row]:
    lengths, order = draw_lengths(samples, distribution), draw_order(samples)
    narrow_order = order.astype(np.int32)
    num_tokens = int(lengths.sum(dtype=np.int64))
    case = f"{distribution.name}, {count(samples)}"

    def pack(threads: int) -> td.PackPlan:
        return td.pack(lengths, MAX_LENGTH, order=order, threads=threads, progress=False)

    def digest(plan: td.PackPlan) -> tuple[int, ...]:
        return sums(plan.arrays())

    plan = pack(1)
    pieces, packs = plan.indices.size, len(plan)

    def floor(threads: int) -> tuple[int, Any, Any]:
        return read_and_write(lengths, order, pieces, packs, threads)

    def floor_digest(floor: tuple[int, Any, Any]) -> int:
        tokens, written, columns = floor
        return tokens + sum(int(column.sum(dtype=np.int64)) for column in (written, *columns))

    contestants = {
        "one": Contestant(lambda: pack(1), digest),
        "two": Contestant(lambda: pack(2), digest),
        LOOP: Contestant(lambda: numpy_forms.chunked(lengths, order, MAX_LENGTH), sums),
        VECTORISED: Contestant(lambda: numpy_forms.vectorised(lengths, order, MAX_LENGTH), sums),
        MEGATRON: Contestant(
            lambda: sample_index(lengths, narrow_order, MAX_LENGTH, num_tokens),
            lambda pairs: int(pairs.sum(dtype=np.int64)),
        ),
        FLOOR: Contestant(lambda: floor(1), floor_digest),
        FLOOR_OF_TWO: Contestant(lambda: floor(2), floor_digest),
    }
    seconds = race(contestants, scale.rounds(samples))

    expected = numpy_forms.vectorised(lengths, order, MAX_LENGTH)
    assert_all_equal(case, plan.arrays(), expected)
    assert_all_equal(f"{case}, two threads", pack(2).arrays(), expected)
    assert_all_equal(f"{case}, {LOOP}", numpy_forms.chunked(lengths, order, MAX_LENGTH), expected)
    pairs = sample_index(lengths, narrow_order, MAX_LENGTH, num_tokens)
    assert_equal(f"{case}, pairs", plan.sample_index(order), pairs)

    rows = [
        compared(case, seconds["one"], peer, seconds[peer], samples=samples)
        for peer in (LOOP, VECTORISED, MEGATRON, FLOOR)
    ]
    rows += [
        compared(f"{case}, two threads", seconds["two"], peer, peers, samples=samples)
        for peer, peers in (("one thread", seconds["one"]), (FLOOR_OF_TWO, seconds[FLOOR_OF_TWO]))
    ]
    gain = seconds[FLOOR] / seconds[FLOOR_OF_TWO]
    rows.append(
        Row(
            case=f"{case}, two threads in the loop alone",
            ours="–",
            peer=f"over one thread, {duration(seconds[FLOOR])}",
            peers=duration(seconds[FLOOR_OF_TWO]),
            figure=f"{gain:.3g}×",
        )
    )
    return rows


def shuffle(scale: Scale) -> Section:
    """numpy's legacy shuffle, bit for bit."""
    section = Section(
        title="The shuffle",
        note="`tundish.packing.shuffled_indices(n, seed)` against "
        "`numpy.random.RandomState(seed).shuffle` on `numpy.arange(n)` of int64; compared in full. "
        "Nanoseconds are per sample.",
    )
    for samples in scale.samples:

        def digest(indices: Any) -> int:
            return int(np.dot(indices[:1000].astype(np.int64), np.arange(1, min(len(indices), 1000) + 1)))

        contestants = {
            "tundish": Contestant(lambda samples=samples: shuffled_indices(samples, SEED), digest),
            "numpy": Contestant(lambda samples=samples: numpy_forms.shuffled(samples, SEED), digest),
        }
        seconds = race(contestants, scale.rounds(samples))
        assert_equal(
            f"shuffle, {count(samples)}", shuffled_indices(samples, SEED), numpy_forms.shuffled(samples, SEED)
        )
        section.rows.append(
            compared(count(samples), seconds["tundish"], "numpy", seconds["numpy"], samples=samples)
        )
    return section
