"""The command `tundish checkpoint`: look at a root, verify, prune and repair it. torch is never imported."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tundish.cli.arguments import add_command, progress_of
from tundish.cli.output import readable
from tundish.errors import CorruptCheckpointError, InvalidInputError, NotFoundError

if TYPE_CHECKING:
    from tundish.checkpoint.retention import Checkpoint

__all__ = ["add_checkpoint_commands"]

_NO_ENTRY = 2


def add_checkpoint_commands(commands: Any) -> None:
    """Add `checkpoint` to the `commands` of the whole parser."""
    checkpoint = commands.add_parser("checkpoint", help="list, verify, prune or repair checkpoints")
    verbs = checkpoint.add_subparsers(title="commands", metavar="COMMAND", required=True)

    listing = add_command(
        verbs, "ls", summary="list what is published", description="List the published checkpoints of a root."
    )
    _add_root(listing)
    listing.set_defaults(run=run_ls, needs="tundish.checkpoint.reading")

    verify = add_command(
        verbs,
        "verify",
        summary="read every byte again",
        description="Read every byte of the published checkpoints and compare it with what was recorded.",
    )
    _add_root(verify)
    verify.add_argument("--step", type=int, metavar="N", help="only the checkpoints of this step")
    verify.set_defaults(run=run_verify, needs="tundish.checkpoint.reading")

    prune = add_command(
        verbs,
        "prune",
        summary="remove old checkpoints",
        description="Remove old checkpoints of a root where nobody saves: untagged ones, never the newest of a kind.",
    )
    _add_root(prune)
    prune.add_argument(
        "--keep-last", type=int, required=True, metavar="N", help="checkpoints of each kind to keep"
    )
    prune.add_argument(
        "--keep-every", type=int, metavar="N", help="also keep steps that are a multiple of this"
    )
    prune.set_defaults(run=run_prune, needs="tundish.checkpoint.owner")

    repair = add_command(
        verbs,
        "repair",
        summary="remove leftovers, mend registry and links",
        description="Do what every start does: remove what dead writers left, and mend the registry and the links from "
        "the folders themselves. Needs that nobody saves there.",
    )
    _add_root(repair)
    repair.set_defaults(run=run_repair, needs="tundish.checkpoint.owner")


def run_ls(options: argparse.Namespace) -> dict[str, Any]:
    """`tundish checkpoint ls`."""
    found = _published(options.root)
    lines = [f"{one.path.name:<20}{readable('bytes', one.size):<32}{one.tag or ''}".rstrip() for one in found]
    return {
        "json": {"root": str(options.root), "checkpoints": [_described(one) for one in found]},
        "text": "\n".join(lines) or f"{options.root}: no checkpoints",
    }


def run_verify(options: argparse.Namespace) -> dict[str, Any]:
    """`tundish checkpoint verify`: all are looked at before a damaged one is an error."""
    from tundish.checkpoint.reading import verify
    from tundish.progress import ProgressLine

    found = [one for one in _published(options.root) if options.step in (None, one.step)]
    if not found:
        step = "" if options.step is None else f" of step {options.step}"
        raise NotFoundError(_NO_ENTRY, f"there is no checkpoint{step} to verify", str(options.root))
    damaged: list[CorruptCheckpointError] = []
    for one in found:
        try:
            with ProgressLine(one.path.name, progress_of(options)) as line:
                verify(one.path, progress=line.callback)
        except CorruptCheckpointError as error:
            damaged.append(error)
    if damaged:
        paths = tuple(path for error in damaged for path in error.paths)
        raise CorruptCheckpointError("; ".join(str(error) for error in damaged), paths)
    return {
        "json": {"verified": [_described(one) for one in found]},
        "text": "\n".join(f"{one.path}: every byte holds" for one in found),
    }


def run_prune(options: argparse.Namespace) -> dict[str, Any]:
    """`tundish checkpoint prune`."""
    from tundish.checkpoint.retention import Retention

    retention = Retention(keep_last=options.keep_last, keep_every=options.keep_every)
    before = _published(options.root)
    _as_owner(options.root, retention, lambda owner: [owner.prune(kind) for kind in ("hf", "dcp")])
    left = {one.path for one in _published(options.root)}
    removed = [one for one in before if one.path not in left]
    return {
        "json": {"removed": [_described(one) for one in removed]},
        "text": "\n".join(f"removed {one.path.name}" for one in removed) or "nothing to remove",
    }


def run_repair(options: argparse.Namespace) -> dict[str, Any]:
    """`tundish checkpoint repair`."""
    from tundish.checkpoint.retention import Retention

    _published(options.root)
    report: dict[str, Any] = {}
    _as_owner(options.root, Retention(), lambda owner: report.update(owner.recovered))
    lines = [f"{name.replace('_', ' ')}: {entry}" for name, entries in report.items() for entry in entries]
    return {"json": report, "text": "\n".join(lines) or "nothing to mend"}


def _as_owner(root: Path, retention: Any, work: Callable[[Any], object]) -> None:
    from tundish.checkpoint.owner import Owner

    owner = Owner(root, retention, wait_seconds=0.0)
    try:
        work(owner)
    finally:
        owner.close()


def _add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", type=Path, metavar="ROOT", help="the folder of all checkpoints")


def _published(root: Path) -> list[Checkpoint]:
    from tundish.checkpoint.reading import open_readonly

    if not root.is_dir():
        # Before anything could make it.
        raise InvalidInputError(f"{root}: no folder of checkpoints is there")
    return open_readonly(root).list()


def _described(one: Checkpoint) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "step": one.step,
        "path": str(one.path),
        "tag": one.tag,
        "bytes": one.size,
        "extra": dict(one.extra),
    }
