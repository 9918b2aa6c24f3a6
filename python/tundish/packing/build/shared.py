"""Builds a plan once a node for all ranks of a job: in files that they map, or in memory that they share.

Invariants: everything that may fail on one rank runs within a vote, so that no rank waits for one that failed.
"""

from __future__ import annotations

from contextlib import ExitStack

from tundish import _native
from tundish.errors import PlanMismatchError
from tundish.packing.build.destination import PlanDestination
from tundish.packing.build.pack_arguments import PackArguments
from tundish.packing.build.plan_folders import Tick, map_plan, path_exists, publish_plan
from tundish.packing.plan import PackPlan
from tundish.packing.shared_block import as_block
from tundish.progress import ProgressLine

__all__ = ["build_shared_plan"]

# Seconds that ranks wait for one another to hash or map: far more than 10^9 samples take.
TIMEOUT = 3600.0


def build_shared_plan(arguments: PackArguments, destination: PlanDestination) -> PackPlan:
    """Build the plan of `arguments`, which are checked here, within a vote. Collective."""
    from tundish.distributed import Voter, same_arguments, voter_of

    # This voter stays for the next call, which then notices a rank that is gone.
    group_voter = voter_of(destination.group)
    group_voter.vote(what="starting to share a plan")
    # From here on ranks notice when another one is lost, so this comes before work in which a rank may be killed.
    with ExitStack() as progress_lines, Voter(destination.group) as voter:
        with voter.agreed("checking what to pack", timeout=TIMEOUT):
            line = progress_lines.enter_context(ProgressLine("pack", destination.progress))
            destination.check()
            request = arguments.checked()
            expected = _native.plan_fingerprint(request, line.callback)
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
                return _build_in_memory(request, expected, destination, tick)
            except Exception:
                raise
            except BaseException:
                # The other ranks wait in votes of node_shared, which the group's voter holds.
                group_voter.close("was interrupted and is closed: make the process group anew")
                raise
        target = destination.folder(expected)

        def build() -> None:
            if destination.cache_dir is None:
                publish_plan(request, target, tick, expected)
            else:
                map_plan(request, destination, expected, tick)

        voter.build_once_per_node(build, what="building the plan")
        with voter.agreed("mapping the plan", timeout=TIMEOUT):
            if not path_exists(target):
                raise PlanMismatchError(
                    f"{target} is missing after one rank of this node built its plan: with share=True all ranks "
                    "must pass the same arguments and share one file system on a node, and no process may remove the "
                    "plan meanwhile"
                )
            return map_plan(request, destination, expected, line.callback)


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
    return PackPlan.in_block(block, list(request["lengths"]))
