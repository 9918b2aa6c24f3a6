"""Argument parsing shared by all commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tundish.cli.output import write
from tundish.errors import InvalidInputError

EXIT_CODES = """\
exit codes:
    0  success
    1  a plan or checkpoint is damaged, a plan does not match the lengths, or a server does not answer
    2  invalid usage or input
    3  a file or folder is missing, exists already, is read-only or full; or memory ran out
    4  an optional package is missing
   70  a bug in tundish; the traceback is printed
  130  interrupted (Ctrl-C)
  141  the output pipe was closed
"""


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises `InvalidInputError`, so that `--json` covers usage errors."""

    def __init__(self, **settings: Any) -> None:
        # `main` looks for `--json` before parsing, so it must not be abbreviated.
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        raise InvalidInputError(f"{message} (see `{self.prog} --help`)")

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stderr:
            super()._print_message(message, file)
        elif message:
            # `write` flushes, so a closed pipe raises its error here.
            write(message.rstrip())


class PrintVersion(argparse.Action):
    """The option `--version`. It reads the version only when used, because that is slow."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **settings)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from tundish import __version__

        # `argparse` may print it to standard error.
        write(f"tundish {__version__}")
        parser.exit()


def add_command(verbs: Any, name: str, *, summary: str, description: str) -> Parser:
    """Add a command with the options that all commands have, and return its parser."""
    parser: Parser = verbs.add_parser(
        name,
        help=summary,
        description=description,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, also after an error")
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar on a terminal")
    return parser


def add_number(parser: Any, name: str, metavar: str, text: str, **settings: Any) -> None:
    """Add an option that is an integer; `text` is its help."""
    parser.add_argument(name, type=int, metavar=metavar, help=text, **settings)


def add_path(parser: Any, name: str, metavar: str, text: str, **settings: Any) -> None:
    """Add an argument that is a path; `text` is its help."""
    parser.add_argument(name, type=path_of, metavar=metavar, help=text, **settings)


def progress_of(options: argparse.Namespace) -> bool | None:
    """Return the value for `progress=`: None, which shows a bar on a terminal, unless `--no-progress` is given."""
    return False if options.no_progress else None


def path_of(word: str) -> Path:
    """Convert an argument to a path.

    An empty argument is refused: it is most often an unset shell variable. So is one with a line break, which is most
    often the output of a command.
    """
    if not word:
        raise argparse.ArgumentTypeError("the path is empty: use '.' for the current folder")
    if len(word.splitlines()) > 1 or word.splitlines()[0] != word:
        raise argparse.ArgumentTypeError(f"the path {word!r} has a line break: choose a name without one")
    return Path(word)
