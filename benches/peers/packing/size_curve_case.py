"""Time and memory from 10⁵ to 10⁸ samples, and the bound on working memory.

Invariants: one process packs one configuration, so that its peak belongs to that configuration. Input files are removed
when a size is done.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measure import Contestant, race, run_child
from report import Row, Section, count, duration, size

from packing.cases import MAX_LENGTH, SEED, Scale
from packing.distributions import DISTRIBUTIONS, Distribution, draw_order, write_lengths
from packing.floor import read_and_write

INDEX_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """How a plan is made. Without an order that is given it has a seed."""

    name: str
    threads: int = 1
    is_order_given: bool
    to_files: bool
    mode: str = "hard"


CONFIGURATIONS = (
    Configuration(name="in memory", threads=1, is_order_given=True, to_files=False),
    Configuration(name="in memory", threads=2, is_order_given=True, to_files=False),
    Configuration(name="to files", threads=1, is_order_given=True, to_files=True),
    Configuration(name="to files", threads=2, is_order_given=True, to_files=True),
    Configuration(name="seed, in memory", is_order_given=False, to_files=False),
    Configuration(name="seed, to files", is_order_given=False, to_files=True),
    Configuration(name="best_fit, in memory", is_order_given=False, to_files=False, mode="best_fit"),
    Configuration(name="best_fit, to files", is_order_given=False, to_files=True, mode="best_fit"),
)


def curve(scale: Scale) -> tuple[Section, Section]:
    """The curve, and the memory bound read from the same runs."""
    times = Section(
        title="Curve of time and memory",
        note="Each configuration in a process of its own. In memory, lengths and order are loaded; to files, they "
        "are mapped and the plan is published with fsync, which sets a floor that small plans feel. "
        "Working memory is the peak resident memory that no file stands behind, above what the "
        "process held before, less what the plan's arrays hold where they stand in memory. The "
        "spread is the slowest size over the fastest, in nanoseconds a sample. Beside it stands that of the "
        "compiled loop that does the least that any plan in a given order does, as in the first section, though it "
        "writes an entry a sample and not one more for each pack: its spread comes from memory alone, which is slower "
        "the larger it is.",
    )
    memory = Section(
        title="Memory beyond inputs and outputs",
        note="Lengths (int32) and order (int64) mapped, the plan written by `out=`; peak resident memory "
        "that no file stands behind, above what the process held before the call. With a seed it includes "
        "one index a sample, which best_fit is allowed for: its figure is without it.",
    )
    by_configuration: dict[tuple[str, int], list[float]] = defaultdict(list)
    loops: dict[tuple[str, int], list[float]] = defaultdict(list)
    for distribution in DISTRIBUTIONS:
        for samples in scale.curve_samples:
            replies, loop_seconds = _packed(scale, samples, distribution)
            for threads, seconds in loop_seconds.items():
                loops[distribution.name, threads].append(seconds / samples * 1e9)
            for configuration, reply in replies:
                nanoseconds = reply["seconds"] / samples * 1e9
                threads, to_files = configuration.threads, configuration.to_files
                is_best_fit = configuration.mode == "best_fit"
                # One index a sample is allowed for.
                allowed = INDEX_BYTES * samples if is_best_fit else 0
                beyond = max(0, reply["peak"] - allowed - (0 if to_files else reply["held"]))
                case = (
                    f"{distribution.name}, {configuration.name}, {threads} thread{'s' if threads > 1 else ''}"
                )
                by_configuration[case, threads].append(nanoseconds)
                times.rows.append(
                    Row(
                        case=f"{case}, {count(samples)}",
                        ours=f"{duration(reply['seconds'])} ({nanoseconds:.3g} ns)",
                        peer="–",
                        peers="–",
                        figure=f"{size(beyond)} working memory",
                    )
                )
                if to_files and samples == scale.curve_samples[-1]:
                    memory.rows.append(
                        Row(
                            case=f"{case}, {count(samples)}",
                            ours=size(beyond),
                            peer="inputs and outputs",
                            peers=size(reply["input_bytes"] + reply["output_bytes"]),
                            figure=size(beyond),
                        )
                    )
    for (case, threads), nanoseconds_each in by_configuration.items():
        spread = max(nanoseconds_each) / min(nanoseconds_each)
        loop = loops[case.partition(",")[0], threads]
        times.rows.append(
            Row(
                case=f"{case}, spread",
                ours=f"{min(nanoseconds_each):.3g}–{max(nanoseconds_each):.3g} ns",
                peer=f"the least, spread {max(loop) / min(loop):.3g}×",
                peers=f"{min(loop):.3g}–{max(loop):.3g} ns",
                figure=f"{spread:.3g}×",
            )
        )
    return times, memory


def _packed(
    scale: Scale, samples: int, distribution: Distribution
) -> tuple[list[tuple[Configuration, Any]], dict[int, float]]:
    """The replies of all configurations, and by the number of threads the seconds of the least that a plan does."""
    lengths, order = scale.folder / "lengths.npy", scale.folder / "order.npy"
    write_lengths(lengths, samples, distribution)
    np.save(order, draw_order(samples))
    replies = []
    for configuration in CONFIGURATIONS:
        given, to_files = configuration.is_order_given, configuration.to_files
        request = {
            "lengths": str(lengths),
            "order": str(order) if given else None,
            "seed": None if given else SEED,
            "max_length": MAX_LENGTH,
            "mode": configuration.mode,
            "threads": configuration.threads,
            "out": str(scale.folder / "plan") if to_files else None,
            "rounds": scale.least_rounds if to_files else scale.rounds(samples),
        }
        reply = run_child(request)
        reply["input_bytes"] = _bytes(lengths) + (_bytes(order) if given else 0)
        replies.append((configuration, reply))
    loaded = np.load(lengths), np.load(order)
    packs = int(loaded[0].sum(dtype=np.int64)) // MAX_LENGTH

    def loop(threads: int) -> tuple[int, Any, Any]:
        return read_and_write(*loaded, samples, packs, threads)

    contestants = {
        "1": Contestant(lambda: loop(1), lambda found: found[0]),
        "2": Contestant(lambda: loop(2), lambda found: found[0]),
    }
    seconds = race(contestants, scale.rounds(samples))
    lengths.unlink()
    order.unlink()
    return replies, {int(threads): each for threads, each in seconds.items()}


def _bytes(path: Path) -> int:
    return path.stat().st_size
