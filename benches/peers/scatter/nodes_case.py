"""Scatters between two nodes with a slow link, compared with the time that the link needs.

Each node has half of the ranks, so half of the batches go over the link. If this machine cannot make such nodes, the
section says why.
"""

from __future__ import annotations

import sys

from report import Row, Section, duration

from scatter.batches import KINDS, size
from scatter.cases import Plan, compare, measure_contestants
from scatter.network_namespaces import (
    NamespacesUnavailable,
    command_prefix,
    min_link_seconds,
    two_node_environments,
    two_nodes,
)

_CONTESTANTS = ("ours", "isend", "objects")


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
    except NamespacesUnavailable as error:
        print(f"bench: nodes: left out: {error}", file=sys.stderr, flush=True)
        section.note = f"Left out: {error}."
    return section


def _rows(plan: Plan, world: int, names: tuple[str, str]) -> list[Row]:
    half = world // 2
    prefixes = [command_prefix(name) for name in names for _ in range(half)]
    rows = []
    environments = two_node_environments(half)
    for kind, seconds in measure_contestants(_CONTESTANTS, plan, environments, prefixes).items():
        case, ours = f"{kind}, 2 × {half} ranks", seconds["ours"]
        rows += compare(case, seconds)
        limit = min_link_seconds(half * size(KINDS[kind](0)))
        rows.append(
            Row(
                case=case,
                ours=duration(ours),
                peer="the link's limit",
                peers=duration(limit),
                figure=f"{limit / ours:.0%}",
            )
        )
    return rows
