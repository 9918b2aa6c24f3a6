"""Scatters between two nodes with a slow link, compared with the time that the link needs.

Each node has half of the ranks, so half of the batches go over the link. If this machine cannot make such nodes, the
section says why.
"""

from __future__ import annotations

import sys

from report import Row, Section, duration

from scatter.batches import KINDS, size
from scatter.cases import Plan, compare, measure_contestants
from scatter.network import NoNodes, environments_of, least_seconds, prefix_of, two_nodes

__all__ = ["nodes"]

_CONTESTANTS = ("ours", "seed", "objects")


def nodes(plan: Plan) -> Section:
    """Two nodes with half of each world."""
    section = Section(
        title="Two nodes, with a link of 1 Gbit/s",
        note="Each node is a network namespace with half of the ranks. A veth pair joins them, which tbf holds to "
        "1 Gbit/s both ways. Rank 0 has the data. The link's limit is the time that the second node's batches take at "
        "125 MB/s, without the first 72 KiB. Its figure is the share of that speed that is reached; headers of TCP and "
        "IP take a twentieth.",
    )
    try:
        with two_nodes() as names:
            for world in plan.worlds:
                section.rows += _rows(plan, world, names)
    except NoNodes as error:
        print(f"bench: nodes: left out: {error}", file=sys.stderr, flush=True)
        section.note = f"Left out: {error}."
    return section


def _rows(plan: Plan, world: int, names: tuple[str, str]) -> list[Row]:
    half = world // 2
    prefixes = [prefix_of(name) for name in names for _ in range(half)]
    rows = []
    for kind, seconds in measure_contestants(_CONTESTANTS, plan, environments_of(half), prefixes).items():
        case, ours = f"{kind}, 2 × {half} ranks", seconds["ours"]
        rows += compare(case, "ours", seconds, {})
        least = least_seconds(half * size(KINDS[kind](0)))
        rows.append(
            Row(
                case=case,
                ours=duration(ours),
                peer="the link's limit",
                peers=duration(least),
                figure=f"{least / ours:.0%}",
            )
        )
    return rows
