"""The command `tundish checkpoint`: look at a root, verify, prune and repair it. torch is never imported."""

from __future__ import annotations

import argparse
import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tundish.cli.arguments import add_command, path_of, progress_of
from tundish.cli.output import printable, readable
from tundish.errors import CorruptCheckpointError, InvalidInputError, NotFoundError, format_count

if TYPE_CHECKING:
    from tundish.checkpoint import Checkpoint, Checkpoints, Damaged

_NO_ENTRY = 2
_SET_ASIDE = re.compile(r"discarded-(hf|dcp)-[0-9]+(-[0-9]+)?")


def add_checkpoint_commands(commands: Any) -> None:
    """Add `checkpoint` to the `commands` of the whole parser."""
    checkpoint = commands.add_parser("checkpoint", help="list, verify, prune or repair checkpoints")
    verbs = checkpoint.add_subparsers(title="commands", metavar="COMMAND", required=True)

    listing = add_command(
        verbs,
        "list",
        summary="list what is published",
        description="List the published checkpoints of a root, folders with the name of a checkpoint that are none, "
        "and folders that rollbacks set aside.",
    )
    _add_root(listing)
    listing.set_defaults(run=run_list, needs="tundish.checkpoint.readonly")

    verify = add_command(
        verbs,
        "verify",
        summary="read every byte again",
        description="Read every byte of the published checkpoints and compare it with the recorded checksums; print a "
        "line for each. A folder with the name of a checkpoint that is none is damaged too.",
    )
    _add_root(verify)
    verify.add_argument("--step", type=int, metavar="N", help="only the checkpoints of this step")
    verify.set_defaults(run=run_verify, needs="tundish.checkpoint.readonly")

    prune = add_command(
        verbs,
        "prune",
        summary="remove old checkpoints",
        description="Remove old checkpoints of a root where nobody saves: untagged ones, never the newest of a kind. "
        "Every byte of the kept checkpoints is read first; if one is damaged, nothing is removed. Checkpoints without "
        "checksums are compared by size only.",
    )
    _add_root(prune)
    prune.add_argument(
        "--keep-last", type=int, required=True, metavar="N", help="checkpoints of each kind to keep"
    )
    prune.add_argument(
        "--keep-every", type=int, metavar="N", help="also keep steps that are a multiple of this"
    )
    prune.add_argument(
        "--keep",
        type=int,
        action="append",
        default=[],
        metavar="STEP",
        help="also keep this step; may be repeated",
    )
    prune.set_defaults(run=run_prune, needs="tundish.checkpoint.retention")

    repair = add_command(
        verbs,
        "repair",
        summary="remove leftovers, repair links",
        description="Remove the leftovers of dead writers, and make the links lead to the newest checkpoints, as "
        "every start of a Checkpointer does. No other process may save into the root meanwhile.",
    )
    _add_root(repair)
    repair.set_defaults(run=run_repair, needs="tundish.checkpoint.retention")


def run_list(options: argparse.Namespace) -> dict[str, Any]:
    """`tundish checkpoint list`."""
    whole, damaged = _survey(options.root)
    lines = [
        f"{checkpoint.path.name:<20}{readable('bytes', checkpoint.size):<32}{printable(checkpoint.tag or '')}".rstrip()
        for checkpoint in whole
    ]
    lines += [
        f"{checkpoint.path.name:<20}not a whole checkpoint: {printable(checkpoint.reason)}"
        for checkpoint in damaged
    ]
    set_aside = _set_aside_in(options.root)
    lines += [
        f"{path.name:<20}{readable('bytes', size)}, set aside by a rollback: keep or delete it yourself"
        for path, size in set_aside.items()
    ]
    return {
        "json": {
            "root": str(options.root),
            "checkpoints": [_described(checkpoint) for checkpoint in whole],
            "damaged": [
                {
                    "kind": checkpoint.kind,
                    "step": checkpoint.step,
                    "path": str(checkpoint.path),
                    "reason": checkpoint.reason,
                }
                for checkpoint in damaged
            ],
            "set_aside": [{"path": str(path), "size": size} for path, size in set_aside.items()],
        },
        "text": "\n".join(lines) or f"{options.root}: no checkpoints",
    }


def _set_aside_in(root: Path) -> dict[Path, int]:
    """The folders that rollbacks set aside, and their bytes."""
    sizes = {}
    for folder in sorted(path for path in root.iterdir() if _SET_ASIDE.fullmatch(path.name)):
        sizes[folder] = 0
        for path in folder.rglob("*"):
            # It may be removed meanwhile.
            with contextlib.suppress(OSError):
                sizes[folder] += path.lstat().st_size if path.is_file() else 0
    return sizes


def run_verify(options: argparse.Namespace) -> dict[str, Any]:
    """`tundish checkpoint verify`: a line for each checkpoint, whole or damaged."""
    _check_is_ours(options.root)
    whole, broken = _survey(options.root)
    damaged: list[tuple[Checkpoint | Damaged, CorruptCheckpointError]] = [
        (one, CorruptCheckpointError(f"{one.path} is not a whole checkpoint: {one.reason}"))
        for one in broken
        if options.step in (None, one.step)
    ]
    verified: list[tuple[Checkpoint, list[str]]] = []
    for checkpoint in whole:
        if options.step not in (None, checkpoint.step):
            continue
        try:
            verified.append((checkpoint, _verify(checkpoint, options)))
        except NotFoundError:
            # It was removed meanwhile.
            continue
        except CorruptCheckpointError as error:
            damaged.append((checkpoint, error))
    if not verified and not damaged:
        step = "" if options.step is None else f" of step {options.step}"
        raise NotFoundError(_NO_ENTRY, f"there is no checkpoint{step} to verify", str(options.root))
    lines: list[tuple[Checkpoint | Damaged, str]] = [
        (one, f"✓ {one.path.name:<18}{_said(unsummed)}") for one, unsummed in verified
    ]
    lines += [(one, f"✗ {one.path.name:<18}{printable(str(error))}") for one, error in damaged]
    lines.sort(key=lambda line: (line[0].kind, line[0].step))
    result: dict[str, Any] = {
        "json": {
            "verified": [{**_described(one), "without_checksum": unsummed} for one, unsummed in verified]
        },
        "text": "\n".join(text for _, text in lines),
    }
    if damaged:
        newest = max((one.step for one, _ in verified if one.kind == "dcp"), default=None)
        remedy = (
            "none of these can be resumed from" if newest is None else f"step {newest} can be resumed from"
        )
        result["problems"] = [
            f"damaged: {len(damaged)} of {format_count(len(lines), 'checkpoint')}; move or delete them; {remedy}"
        ]
        message = str(_all_of([error for _, error in damaged]))
        result["json"]["error"] = {"kind": "CorruptCheckpointError", "message": message, "exit_code": 1}
        result["exit_code"] = 1
    return result


def _said(unsummed: list[str]) -> str:
    if not unsummed:
        return "all bytes match their checksums"
    count = format_count(len(unsummed), "file")
    return f"all checksums match; only the sizes were compared of {count} without a checksum"


def run_prune(options: argparse.Namespace) -> dict[str, Any]:
    """`tundish checkpoint prune`: removes old checkpoints, once every byte of those that stay holds."""
    from tundish.checkpoint import KINDS, DiskRoot, Retention, WritableRoot

    retention = Retention(keep_last=options.keep_last, keep_every=options.keep_every)
    _check_is_ours(options.root)
    with contextlib.closing(DiskRoot(options.root, owns=True, wait_seconds=0.0)) as root:
        writable = WritableRoot(root, retention)
        writable.protect(options.keep)
        before, _ = _survey(options.root)
        for step in options.keep:
            if all(checkpoint.step != step for checkpoint in before):
                raise NotFoundError(
                    _NO_ENTRY, f"there is no checkpoint of step {step} to keep", str(options.root)
                )
        damaged = []
        for checkpoint in [checkpoint for kind in KINDS for checkpoint in writable.kept_from_prune(kind)]:
            try:
                _verify(checkpoint, options)
            except CorruptCheckpointError as error:
                damaged.append(error)
        if damaged:
            together = _all_of(damaged)
            raise CorruptCheckpointError(
                f"nothing was removed: the checkpoints to keep have problems: {together}. Move these elsewhere first",
                together.paths,
            )
        refused = [error for kind in KINDS for error in writable.remove_surplus(kind)]
        if refused:
            raise refused[0]
        left = {checkpoint.path for checkpoint in _survey(options.root)[0]}
    removed = [checkpoint for checkpoint in before if checkpoint.path not in left]
    return {
        "json": {"removed": [_described(checkpoint) for checkpoint in removed]},
        "text": "\n".join(f"removed {checkpoint.path.name}" for checkpoint in removed) or "nothing to remove",
    }


def run_repair(options: argparse.Namespace) -> dict[str, Any]:
    """`tundish checkpoint repair`."""
    from tundish.checkpoint import DiskRoot

    _check_is_ours(options.root)
    with contextlib.closing(DiskRoot(options.root, owns=True, wait_seconds=0.0)) as root:
        report = root.recovered
    lines = []
    for name, entries in report.items():
        for entry in entries:
            reason = f": {entries[entry]}" if isinstance(entries, dict) else ""
            lines.append(printable(f"{name.replace('_', ' ')}: {entry}{reason}"))
    return {"json": report, "text": "\n".join(lines) or "nothing to repair"}


def _add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", type=path_of, metavar="ROOT", help="the folder of all checkpoints")


def _survey(root: Path) -> tuple[Checkpoints, list[Damaged]]:
    from tundish.checkpoint import open_readonly

    if not root.exists():
        raise NotFoundError(_NO_ENTRY, "no such folder: give the root of a Checkpointer", str(root))
    if not root.is_dir():
        raise InvalidInputError(f"{root} is a file: give the folder of the checkpoints")
    found = open_readonly(root).survey()
    if not any(found) and (root / "plan.json").is_file():
        raise InvalidInputError(
            f"{root} is the folder of a packing plan: `tundish plan show {root}` shows it"
        )
    return found


def _check_is_ours(root: Path) -> None:
    """Refuse a folder where no checkpoint was ever saved: another one was meant, and nothing is to be left in it."""
    from tundish.checkpoint import DiskRoot

    if not any(_survey(root)) and not DiskRoot(root).was_owned():
        raise InvalidInputError(f"{root}: no checkpoint was ever saved here: give the root of a Checkpointer")


def _verify(one: Checkpoint, options: argparse.Namespace) -> list[str]:
    """Verify; returns the files without a checksum."""
    from tundish.checkpoint import verify
    from tundish.progress import ProgressLine

    with ProgressLine(one.path.name, progress_of(options)) as line:
        return verify(one.path, progress=line.callback, warns=False)


def _all_of(damaged: list[CorruptCheckpointError]) -> CorruptCheckpointError:
    paths = tuple(path for error in damaged for path in error.paths)
    return CorruptCheckpointError("; ".join(str(error) for error in damaged), paths)


def _described(one: Checkpoint) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "step": one.step,
        "path": str(one.path),
        "tag": one.tag,
        "bytes": one.size,
        "extra": dict(one.extra),
    }
