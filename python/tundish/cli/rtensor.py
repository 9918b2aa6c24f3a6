"""The command `tundish rtensor`: shows what the processes of a job store and have fetched. Does not import torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tundish.cli.arguments import add_command, path_of
from tundish.cli.output import printable
from tundish.errors import InvalidInputError, NotAuthorizedError, TransferError

_HEADINGS = (
    "address",
    "shards",
    "MiB",
    "unclaimed",
    "oldest s",
    "fetched",
    "MiB",
    "peak MiB",
    "late",
    "escaped MiB",
    "step",
)


# A token has at most 1024 characters.
_TOKEN_FILE_BYTES = 1 << 16


def add_rtensor_commands(commands: Any) -> None:
    """Add `rtensor` to the `commands` of the whole parser."""
    rtensor = commands.add_parser("rtensor", help="look at remote tensors")
    verbs = rtensor.add_subparsers(title="commands", metavar="COMMAND", required=True)
    stats = add_command(
        verbs,
        "stats",
        summary="what processes store and have fetched",
        description="Ask processes that serve what they store, what they have fetched and not drained yet, and what "
        "escaped: tensors in use whose shards are gone. One row a process. Exits with 1 if one does not answer.",
    )
    stats.add_argument("addresses", nargs="+", metavar="ADDR", help="host:port that a process serves at")
    stats.add_argument(
        "--token-file",
        type=path_of,
        metavar="FILE",
        help="file whose first line is the token they were served with",
    )
    stats.add_argument(
        "--certificate",
        type=path_of,
        metavar="FILE",
        help="PEM file of the certificates to trust, if they serve over TLS",
    )
    stats.set_defaults(run=run_stats, needs="tundish.rtensor.monitoring")


def run_stats(options: argparse.Namespace) -> dict[str, Any]:
    """`tundish rtensor stats`."""
    from tundish.rtensor import process_stats, trust

    token = None if options.token_file is None else _read_token(options.token_file)
    trust(*options.addresses, token=token, tls=options.certificate)
    answers = process_stats(options.addresses)
    failed: dict[str, str] = {}
    for addr, answer in answers.items():
        if isinstance(answer, NotAuthorizedError) and "wants the token" in str(answer):
            failed[addr] = f"{addr} wants the token of its server: {_token_hint(options.token_file)}"
        elif isinstance(answer, (NotAuthorizedError, TransferError)):
            failed[addr] = str(answer)
        elif isinstance(answer, Exception):
            raise answer
    found: dict[str, Any] = {}
    rows: list[tuple[str, ...]] = [_HEADINGS]
    for addr, stats in answers.items():
        if isinstance(stats, Exception):
            continue
        try:
            rows.append(_row(addr, stats))
            found[addr] = stats
        except (KeyError, TypeError, ValueError, OverflowError):
            failed[addr] = f"{addr} is not a process of tundish: its answer to /stats has another form"
    if len(found) > 1:
        rows.append(_total(rows[1:]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    text = [
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
        if found
    ]
    return {
        "json": {"processes": found, "failed": failed},
        "text": "\n".join(line.rstrip() for line in text),
        "problems": [f"no answer: {reason}" for reason in failed.values()],
        "exit_code": 1 if failed else 0,
    }


def _read_token(path: Path) -> str:
    """The first line of a file. Errors name the file."""
    from tundish.regular_files import read_regular_file
    from tundish.rtensor import trust

    content = read_regular_file(path, "a file with a token", _TOKEN_FILE_BYTES)
    try:
        token = content.partition(b"\n")[0].decode().strip()
        # For no address: it checks the token.
        trust(token=token)
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path}: its first line is not text: write the token there") from error
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from error
    return token


def _token_hint(path: Path | None) -> str:
    """The advice for a process that wants another token, or one at all."""
    if path is None:
        return "pass --token-file FILE, a file whose first line is the token"
    return f"the one in {path} (--token-file) is another"


def _row(addr: str, stats: dict[str, Any]) -> tuple[str, ...]:
    storage, buffer = stats["storage"], stats["buffer"]
    escaped = storage["memory"]["escaped_bytes"] + buffer["memory"]["escaped_bytes"]
    step = stats["current_step"]
    return (
        printable(addr),
        _number(storage["num_entries"]),
        _mebibytes(storage["total_bytes"]),
        _number(storage["unclaimed_entries"]),
        _number(round(storage["oldest_unclaimed_seconds"])),
        _number(buffer["num_entries"]),
        _mebibytes(buffer["total_bytes"]),
        _mebibytes(buffer["high_water_bytes"]),
        _number(buffer["late_inserts_refused"]),
        _mebibytes(escaped),
        "" if step is None else _number(step),
    )


def _total(rows: list[tuple[str, ...]]) -> tuple[str, ...]:
    """The sums of all rows; of ages the largest, of steps none."""
    columns = list(zip(*rows, strict=True))[1:-1]
    sums = [
        str(max(map(int, column)))
        if heading == "oldest s"
        else (f"{sum(map(float, column)):.1f}" if "MiB" in heading else str(sum(map(int, column))))
        for heading, column in zip(_HEADINGS[1:-1], columns, strict=True)
    ]
    return ("all", *sums, "")


def _number(count: Any) -> str:
    """Raise `TypeError` for anything but a number: it is not shown."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{count!r} is no number")
    return str(count)


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f}"
