"""What goes to standard output, and how a reader who went away is noticed."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

from tundish.errors import StorageError

__all__ = ["OutputClosedError", "printable", "readable", "rows", "write"]


class OutputClosedError(Exception):
    """The reader of standard output went away."""


def write(text: str) -> None:
    """Print `text` to standard output and flush it, so that what goes wrong does so here."""
    if sys.stdout is None:
        raise StorageError(errno.EBADF, "is closed, so nothing can be printed there", "standard output")
    try:
        print(text, flush=True)
    except OSError as error:
        # Python flushes once more on its way out and would complain again.
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, sys.stdout.fileno())
        os.close(quiet)
        if isinstance(error, BrokenPipeError):
            raise OutputClosedError from error
        raise StorageError(error.errno, error.strerror, "standard output") from error


def printable(text: str) -> str:
    """`text`, which somebody else wrote, without anything that a terminal would obey."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def rows(facts: dict[str, Any]) -> str:
    """Facts as lines of a name and a value."""
    shown = [(name.replace("_", " "), readable(name, value)) for name, value in facts.items()]
    return "\n".join(f"{name:<20}{value}" for name, value in shown)


def readable(name: str, value: Any) -> str:
    """A value as a person reads it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "bytes" or name.endswith("_bytes"):
        return f"{value:,} ({value / 2**20:,.1f} MiB)"
    # A seed is a name, not an amount.
    if name == "seed" or isinstance(value, str):
        return str(value)
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
