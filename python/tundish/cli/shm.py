"""The command `tundish shm`: lists named segments of shared memory, and removes those that no process uses.

torch is never imported.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from tundish.cli.arguments import add_command
from tundish.cli.output import readable

if TYPE_CHECKING:
    from tundish.shm import NamedSegment


def add_shm_commands(commands: Any) -> None:
    """Add `shm` to the `commands` of the whole parser."""
    shm = commands.add_parser("shm", help="list or sweep named shared memory")
    verbs = shm.add_subparsers(title="commands", metavar="COMMAND", required=True)

    listing = add_command(
        verbs,
        "ls",
        summary="list named segments",
        description="List the named segments of shared memory of this user, and whether a process uses them.",
    )
    listing.set_defaults(run=run_ls, needs="tundish.shm.memory")

    sweep = add_command(
        verbs,
        "sweep",
        summary="remove what killed processes left",
        description="Remove the named segments of this user that no process uses. Segments that a process holds, "
        "segments of other users and other files are left alone.",
    )
    sweep.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    sweep.set_defaults(run=run_sweep, needs="tundish.shm.memory")


def run_ls(_: argparse.Namespace) -> dict[str, Any]:
    """`tundish shm ls`."""
    from tundish.shm import sweep

    report = sweep(dry_run=True)
    segments = [_described(segment, "dead") for segment in report.removed]
    segments += [_described(segment, "held") for segment in report.live]
    segments.sort(key=lambda segment: segment["name"])
    lines = [
        f"{segment['name']:<20} {readable('bytes', segment['bytes']):<32}"
        f"made by {segment['made_by']:<12}{segment['state']}"
        for segment in segments
    ]
    return {
        "json": {"segments": segments, "failed": list(report.failed)},
        "text": "\n".join(lines) or "no named segments",
        "problems": [f"could not be examined: {reason}" for reason in report.failed],
    }


def run_sweep(options: argparse.Namespace) -> dict[str, Any]:
    """`tundish shm sweep`."""
    from tundish.shm import sweep

    report = sweep(dry_run=options.dry_run)
    verb = "would remove" if options.dry_run else "removed"
    lines = [f"{verb} {segment.name}: {readable('bytes', segment.size)}" for segment in report.removed]
    return {
        "json": {
            "dry_run": options.dry_run,
            "removed": [_described(segment, "dead") for segment in report.removed],
            "live": [_described(segment, "held") for segment in report.live],
            "failed": list(report.failed),
        },
        "text": "\n".join(lines) or "nothing to remove",
        "problems": [f"not swept: {reason}" for reason in report.failed],
    }


def _described(segment: NamedSegment, state: str) -> dict[str, Any]:
    return {
        "name": segment.name,
        "path": str(segment.path),
        "bytes": segment.size,
        "state": state,
        "made_by": segment.made_by,
    }
