"""Time and memory of a plan as it grows.

Invariants: one process packs one configuration, so that its peak belongs to that configuration. Input files are removed
when a size is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measure import run_child
from report import Row, Section, count, duration, size

from packing.cases import MAX_LENGTH, SEED, Scale
from packing.distributions import DISTRIBUTIONS, Distribution, draw_order, write_lengths

INDEX_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """How a plan is made: hard packing in an order that is given, or best fit with a seed."""

    mode: str
    to_files: bool

    @property
    def name(self) -> str:
        return f"{self.mode}, {'to files' if self.to_files else 'in memory'}"


CONFIGURATIONS = tuple(
    Configuration(mode=mode, to_files=to_files) for mode in ("hard", "best_fit") for to_files in (False, True)
)


def curve(scale: Scale) -> Section:
    """Time and working memory of each size."""
    section = Section(
        title="Time and memory by size",
        note="Each configuration in a process of its own, on one thread. In memory, lengths (int32) and order (int64) "
        "are loaded; to files, they are mapped and the plan is published with fsync, which sets a floor that small "
        "plans feel. Working memory is the peak resident memory that no file stands behind, above what the process "
        "held before, less what the plan's arrays hold where they stand in memory. Of best fit's one index a sample "
        "is left out.",
    )
    for distribution in DISTRIBUTIONS:
        for samples in scale.curve_samples:
            section.rows += _rows(scale, samples, distribution)
    return section


def _rows(scale: Scale, samples: int, distribution: Distribution) -> list[Row]:
    lengths, order = scale.folder / "lengths.npy", scale.folder / "order.npy"
    write_lengths(lengths, samples, distribution)
    np.save(order, draw_order(samples))
    rows = []
    for configuration in CONFIGURATIONS:
        is_hard = configuration.mode == "hard"
        reply: dict[str, Any] = run_child(
            {
                "lengths": str(lengths),
                "order": str(order) if is_hard else None,
                "seed": None if is_hard else SEED,
                "max_length": MAX_LENGTH,
                "mode": configuration.mode,
                "threads": 1,
                "out": str(scale.folder / "plan") if configuration.to_files else None,
                "rounds": scale.least_rounds,
            }
        )
        allowed = 0 if is_hard else INDEX_BYTES * samples
        held = 0 if configuration.to_files else reply["held"]
        beyond = max(0, reply["peak"] - allowed - held)
        inputs = _bytes(lengths) + (_bytes(order) if is_hard else 0)
        rows.append(
            Row(
                case=f"{distribution.name}, {configuration.name}, {count(samples)}",
                ours=f"{duration(reply['seconds'])} ({reply['seconds'] / samples * 1e9:.3g} ns)",
                peer="inputs and outputs",
                peers=size(inputs + reply["output_bytes"]),
                figure=f"{size(beyond)} working memory",
            )
        )
    lengths.unlink()
    order.unlink()
    return rows


def _bytes(path: Path) -> int:
    return path.stat().st_size
