"""Prints results to standard output and detects a closed pipe."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

from tundish.errors import StorageError, format_share


class OutputClosedError(Exception):
    """The pipe behind standard output was closed."""


def write(text: str) -> None:
    """Print `text` to standard output and flush it, so that errors are raised here."""
    if sys.stdout is None:
        raise StorageError(errno.EBADF, "is closed", "standard output")
    try:
        print(text, flush=True)
    except OSError as error:
        # Python flushes again at exit and would print a second error.
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, sys.stdout.fileno())
        os.close(quiet)
        if isinstance(error, BrokenPipeError):
            raise OutputClosedError from error
        raise StorageError(error.errno, error.strerror, "standard output") from error


def printable(text: str) -> str:
    """Escape the unprintable characters of `text`, so that it cannot control the terminal."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def rows(values: dict[str, Any]) -> str:
    """Format a dict as lines of a name and a value."""
    shown = [(name.replace("_", " "), readable(name, value)) for name, value in values.items()]
    return "\n".join(f"{name:<20}{value}" for name, value in shown)


def readable(name: str, value: Any) -> str:
    """Format a value for people."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "bytes" or name.endswith("_bytes"):
        return f"{value:,} ({value / 2**20:,.1f} MiB)"
    if name == "fill":
        return format_share(value)
    if isinstance(value, str):
        return printable(value)
    # A seed is printed without thousands separators.
    if name == "seed":
        return str(value)
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
