"""The rows of packing whole samples: best fit beside other packers, and modes that keep the order beside hard packing.

Invariant: lengths are cut to a pack, so that all packers pack the same tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from measure import Contestant, OutputsDiffer, race
from report import Row, Section, compared, count, duration

import tundish as td
from packing.cases import MAX_LENGTH, SEED, Scale
from packing.distributions import DISTRIBUTIONS, Distribution, draw_lengths, draw_order
from packing.whole.peers import PEERS, Lengths

BEST_FIT_SAMPLES = 10**6
BEST_FIT_NOTE = f"""\
`td.pack(lengths, {MAX_LENGTH}, mode="best_fit", seed={SEED}, threads=1)`: lengths int32, all arrays of the plan. \
Nanoseconds are per sample.

- TRL, Axolotl and ms-swift pack 10⁵ samples, and their time is multiplied. TRL packs tokens of one byte each, in \
batches of 1000 samples; ms-swift packs batches of 1000 samples. Axolotl takes as many processes as its sampler does.
- seqpacker gives two flat arrays, its fastest result; lightbinpack and the others give lists.
- No peer may need fewer packs than tundish for the same samples; else the bench fails."""
ORDERED_NOTE = f"""\
`td.pack(lengths, {MAX_LENGTH}, mode=…, order=order, threads=1)` against hard packing with the same arguments. The \
figure is hard packing's time over this one's, so that 0.4× is 2.5 times its time. Nanoseconds are per sample."""


def best_fit(scale: Scale) -> Section:
    """Best fit over all samples, beside other packers."""
    section = Section(title="Best fit, whole plan", note=BEST_FIT_NOTE)
    samples = min(BEST_FIT_SAMPLES, scale.samples[-1])
    for distribution in DISTRIBUTIONS:
        section.rows += _best_fit_rows(scale, samples, distribution)
    return section


def _whole_lengths(samples: int, distribution: Distribution) -> Lengths:
    return np.minimum(draw_lengths(samples, distribution), MAX_LENGTH)


def _pack(lengths: Lengths, mode: str, **options: Any) -> td.PackPlan:
    return td.pack(lengths, MAX_LENGTH, mode=mode, threads=1, progress=False, **options)


def _best_fit_rows(scale: Scale, samples: int, distribution: Distribution) -> list[Row]:
    lengths = _whole_lengths(samples, distribution)
    calls = {peer: peer.prepare(lengths[: peer.most_samples], MAX_LENGTH) for peer in PEERS}
    contestants = {
        "tundish": Contestant(lambda: _pack(lengths, "best_fit", seed=SEED), len),
        **{peer.name: Contestant(call, int) for peer, call in calls.items()},
    }
    seconds = race(contestants, scale.least_rounds)
    rows = []
    for peer, call in calls.items():
        packed = lengths[: peer.most_samples]
        packs, ours = call(), len(_pack(packed, "best_fit"))
        if packs < ours:
            raise OutputsDiffer(f"{peer.name} needs {packs} packs for {distribution.name}, tundish {ours}")
        fill = int(packed.sum(dtype=np.int64)) / MAX_LENGTH
        row = compared(
            f"{distribution.name}, {count(samples)}, {fill / ours:.2%} full",
            seconds["tundish"],
            f"{peer.name}, {fill / packs:.2%} full",
            seconds[peer.name] * samples / len(packed),
            samples=samples,
        )
        rows.append(row)
    return rows


def ordered(scale: Scale) -> Section:
    """The modes that keep the order, beside hard packing."""
    section = Section(title="Ordered and sequential", note=ORDERED_NOTE)
    samples = scale.samples[-1]
    order = draw_order(samples)
    for distribution in DISTRIBUTIONS:
        section.rows += _ordered_rows(scale, _whole_lengths(samples, distribution), order, distribution)
    return section


def _ordered_rows(
    scale: Scale, lengths: Lengths, order: npt.NDArray[np.int64], distribution: Distribution
) -> list[Row]:
    samples = len(lengths)
    contestants = {
        mode: Contestant(lambda mode=mode: _pack(lengths, mode, order=order), len)
        for mode in ("hard", "ordered", "sequential")
    }
    seconds = race(contestants, scale.least_rounds)
    rows = []
    for mode in ("ordered", "sequential"):
        fill = int(lengths.sum(dtype=np.int64)) / MAX_LENGTH / len(_pack(lengths, mode, order=order))
        case = f"{distribution.name}, {count(samples)}, {mode}"
        rows.append(compared(case, seconds[mode], "hard", seconds["hard"], samples=samples))
        rows.append(
            Row(
                case=f"{case}, fill",
                ours=duration(seconds[mode]),
                peer="tokens over the packs' room",
                peers="–",
                figure=f"{fill:.2%}",
            )
        )
    return rows
