"""What the command line's parsers have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tundish.cli.output import write
from tundish.errors import InvalidInputError

__all__ = ["EXIT_CODES", "Parser", "PrintVersion", "add_command", "path_of", "progress_of"]

EXIT_CODES = """\
exit codes:
    0  done; for `plan verify` and `checkpoint verify`: all holds
    1  a plan is damaged or does not belong to the lengths, or a checkpoint is damaged; a process does not answer
    2  wrong usage, or input that cannot be used
    3  a file or folder is missing, taken, read-only or full, or memory ran out
    4  an optional package is missing
   70  a bug in tundish; the traceback is printed
  130  interrupted (Ctrl-C)
  141  the reader of the output went away
"""


class Parser(argparse.ArgumentParser):
    """argparse, with its errors raised as this library's own so that `--json` covers them."""

    def __init__(self, **settings: Any) -> None:
        # An abbreviated `--json` would not be seen before the arguments are understood.
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        raise InvalidInputError(f"{message} (see `{self.prog} --help`)")

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stderr:
            super()._print_message(message, file)
        elif message:
            # Flushed here, so that a reader who goes away is noticed here.
            write(message.rstrip())


class PrintVersion(argparse.Action):
    """`--version`, which looks the version up only when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **settings)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from tundish import __version__

        # argparse would print it to standard error.
        write(f"tundish {__version__}")
        parser.exit()


def add_command(verbs: Any, name: str, *, summary: str, description: str) -> Parser:
    """A command under `verbs`, with the options that all commands have."""
    parser: Parser = verbs.add_parser(
        name,
        help=summary,
        description=description,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, also for an error")
    parser.add_argument("--no-progress", action="store_true", help="no progress line, also on a terminal")
    return parser


def progress_of(options: argparse.Namespace) -> bool | None:
    """What `progress=` is to be: on a terminal by itself, unless it was turned off."""
    return False if options.no_progress else None


def path_of(word: str) -> Path:
    """The type of an argument that names a file or folder. An empty one is a variable that was not set."""
    if not word:
        raise argparse.ArgumentTypeError("it is empty: '.' is the current folder")
    return Path(word)
