"""Builds a plan once a node for all ranks of a job: in files that they map, or in memory that they share.

Invariants: everything that may fail on one rank runs within a vote, so that no rank waits for one that failed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from tundish import _native
from tundish.errors import PlanMismatchError
from tundish.packing.build.cache import path_exists
from tundish.packing.build.destination import PlanDestination
from tundish.packing.build.local import Tick, cached_or_published, map_plan, publish_plan
from tundish.packing.plan.pack_plan import PackPlan
from tundish.packing.plan.pickling import plan_in_block
from tundish.packing.plan.shared_block import as_block
from tundish.progress import ProgressLine

__all__ = ["build_shared_plan"]

# Seconds that ranks wait for one another to hash or map: far more than 10^9 samples take.
TIMEOUT = 3600.0


def build_shared_plan(request: Callable[[], _native.PackRequest], destination: PlanDestination) -> PackPlan:
    """Build the plan of `request`, which checks the arguments when it is called. Collective."""
    from tundish.distributed import Voter, same_arguments, voter_of

    # This voter stays for the next call, which then notices a rank that is gone.
    group_voter = voter_of(destination.group)
    group_voter.vote(what="starting to share a plan")
    # From here on ranks notice when another one is lost, so this comes before work in which a rank may be killed.
    with ExitStack() as progress_lines, Voter(destination.group) as voter:
        with voter.agreed("checking what to pack", timeout=TIMEOUT):
            line = progress_lines.enter_context(ProgressLine("pack", destination.progress))
            destination.check()
            checked = request()
            expected = _native.plan_fingerprint(checked, line.callback)
        # If two plans were both in the cache, each rank would find its own.
        voter.vote(
            what="comparing the plans that the ranks ask for (share=True needs the same arguments on all ranks), by "
            "fingerprint and destination",
            same=same_arguments(plan=expected, destination="memory" if destination.is_memory else "files"),
        )

        def tick(phase: str, done: int, total: int) -> None:
            # The builder takes part in no vote meanwhile. This stops it when a waiting rank is lost.
            voter.raise_if_peer_lost()
            line.update(phase, done, total)

        if destination.is_memory:
            try:
                return _build_in_memory(checked, expected, destination, tick)
            except Exception:
                raise
            except BaseException:
                # The other ranks wait in votes of node_shared, which the group's voter holds.
                group_voter.close("was interrupted and is closed: make the process group anew")
                raise
        target = destination.folder(expected)

        def build() -> None:
            if destination.cache_dir is None:
                publish_plan(checked, target, tick, expected)
            else:
                cached_or_published(checked, target, tick, expected)

        voter.build_once_per_node(build, what="building the plan")
        with voter.agreed("mapping the plan", timeout=TIMEOUT):
            if not path_exists(target):
                raise PlanMismatchError(
                    f"{target} is missing after one rank of this node built its plan: with share=True all ranks "
                    "must pass the same arguments and share one file system on a node, and no process may remove the "
                    "plan meanwhile"
                )
            return map_plan(checked, destination, expected, line.callback)


def _build_in_memory(
    request: _native.PackRequest, expected: str, destination: PlanDestination, tick: Tick
) -> PackPlan:
    from tundish.shm import SharedArray, node_shared

    def build() -> SharedArray:
        metadata, columns = _native.pack(request, tick, expected)
        remaining = list(columns)
        del columns
        return as_block(metadata, remaining, tick)

    block = node_shared(build, key=f"plan {expected}", group=destination.group)
    return plan_in_block(PackPlan, block, list(request["lengths"]))
