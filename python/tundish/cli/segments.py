"""The command `tundish shm`: lists named segments of shared memory, and removes those that no process has any more.

torch is never imported.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from tundish.cli.arguments import add_command
from tundish.cli.output import printable, readable

if TYPE_CHECKING:
    from tundish.shm import NamedSegment

__all__ = ["add_shm_commands"]


def add_shm_commands(commands: Any) -> None:
    """Add `shm` to the `commands` of the whole parser."""
    shm = commands.add_parser("shm", help="list or sweep named shared memory")
    verbs = shm.add_subparsers(title="commands", metavar="COMMAND", required=True)

    listing = add_command(
        verbs,
        "ls",
        summary="list named segments",
        description="List the named segments of shared memory that are this user's, and who has them.",
    )
    listing.set_defaults(run=run_ls, needs="tundish.shm.named_segments")

    sweep = add_command(
        verbs,
        "sweep",
        summary="remove what killed processes left",
        description="Remove the named segments of this user that no process has any more, and the marks of checkpoint "
        "writers that were killed. What a process holds or "
        "maps, what another user made and what is no segment of tundish is left alone.",
    )
    sweep.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    sweep.set_defaults(run=run_sweep, needs="tundish.shm.named_segments")


def run_ls(_: argparse.Namespace) -> dict[str, Any]:
    """`tundish shm ls`."""
    from tundish.shm import sweep

    report = sweep(dry_run=True)
    segments = sorted((*report.removed, *report.live), key=lambda segment: segment.name)
    lines = [
        f"{one.name:<20} {readable('bytes', one.size):<32}{_made_by(one):<24}{_had_by(one)}"
        for one in segments
    ]
    lines += [f"could not be looked at: {printable(reason)}" for reason in report.failed]
    return {
        "json": {"segments": [_described(one) for one in segments], "failed": list(report.failed)},
        "text": "\n".join(lines) or "no named segments",
    }


def run_sweep(options: argparse.Namespace) -> dict[str, Any]:
    """`tundish shm sweep`."""
    from tundish.shm import sweep

    report = sweep(dry_run=options.dry_run)
    verb = "would remove" if options.dry_run else "removed"
    lines = [f"{verb} {one.name}: {readable('bytes', one.size)}" for one in report.removed]
    lines += [f"{verb} {path}: the mark of a killed checkpoint writer" for path in report.writer_slots]
    lines += [f"not swept: {printable(reason)}" for reason in report.failed]
    return {
        "json": {
            "dry_run": options.dry_run,
            "removed": [_described(one) for one in report.removed],
            "live": [_described(one) for one in report.live],
            "failed": list(report.failed),
            "writer_slots": [str(path) for path in report.writer_slots],
        },
        "text": "\n".join(lines) or "nothing to remove",
    }


def _made_by(segment: NamedSegment) -> str:
    return f"made by {segment.made_by}{'' if segment.maker_lives else ' (ended)'}"


def _had_by(segment: NamedSegment) -> str:
    if segment.state == "mapped":
        return f"mapped by {', '.join(map(str, segment.mapped_by))}"
    return segment.state


def _described(segment: NamedSegment) -> dict[str, Any]:
    return {
        "name": segment.name,
        "path": str(segment.path),
        "bytes": segment.size,
        "state": segment.state,
        "mapped_by": list(segment.mapped_by),
        "made_by": segment.made_by,
        "maker_lives": segment.maker_lives,
    }
