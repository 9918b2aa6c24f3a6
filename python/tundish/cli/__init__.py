"""The command `tundish`: parses the arguments, calls the command, prints the result, returns the exit code.

Each file with the name of a part adds the commands of that part. A command returns a dict: `json` and `text`, which are
its result for programs and for people; `problems`, lines for standard error; and `exit_code`.

Invariants:
    Results go to standard output, everything else to standard error. With `--json`, standard output is exactly one
    JSON object, also after an error; `--help` and `--version` print text. An error that the user can fix is one line;
    a bug prints its traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module

from tundish.cli.arguments import EXIT_CODES, Parser, PrintVersion
from tundish.cli.checkpoint import add_checkpoint_commands
from tundish.cli.output import OutputClosedError, printable, write
from tundish.cli.plan import add_plan_commands
from tundish.cli.rtensor import add_rtensor_commands
from tundish.cli.shm import add_shm_commands
from tundish.errors import (
    CorruptCheckpointError,
    MissingExtraError,
    PlanFormatError,
    PlanMismatchError,
    TundishError,
    format_os_error,
)

__all__ = ["build_parser", "main"]

EXIT_OK = 0
EXIT_INVALID = 1
EXIT_USAGE = 2
EXIT_STORAGE = 3
EXIT_MISSING_EXTRA = 4
EXIT_BUG = 70
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(arguments: Sequence[str] | None = None, before_run: Callable[[], object] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        arguments: The words after `tundish`; None takes those of the process.
        before_run: Called after the command's imports and before its work.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    as_json = "--json" in words
    for stream in (sys.stdout, sys.stderr):
        # A path may contain characters that the terminal's encoding lacks.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        options = build_parser().parse_args(words)
        import_module(options.needs)
        if before_run is not None:
            before_run()
        result = options.run(options)
        text = json.dumps(result["json"]) if as_json else result["text"]
        if text:
            write(text)
        for problem in result.get("problems", ()):
            _complain(problem)
        exit_code: int = result.get("exit_code", EXIT_OK)
        return exit_code
    except SystemExit as stop:
        # argparse exits this way after --help and --version.
        return stop.code if isinstance(stop.code, int) else EXIT_OK
    except OutputClosedError:
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        return _report_error("interrupted", "KeyboardInterrupt", EXIT_INTERRUPTED, as_json)
    except (TundishError, OSError, MemoryError) as error:
        return _report_error(_one_line(error), type(error).__name__, _exit_code(error), as_json)
    except Exception as error:  # noqa: BLE001 (with --json, a bug also prints a JSON object)
        traceback.print_exc()
        return _report_error(_one_line(error), type(error).__name__, EXIT_BUG, as_json)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. Parsed options hold the function to `run` and the module that it `needs`."""
    parser = Parser(
        prog="tundish",
        description="Plan packed sequences for training; inspect plans, checkpoints, shared memory and remote tensors.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=PrintVersion, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_plan_commands(commands)
    add_checkpoint_commands(commands)
    add_shm_commands(commands)
    add_rtensor_commands(commands)
    return parser


def _exit_code(error: BaseException) -> int:
    if isinstance(error, (PlanFormatError, PlanMismatchError, CorruptCheckpointError)):
        return EXIT_INVALID
    if isinstance(error, MissingExtraError):
        return EXIT_MISSING_EXTRA
    return EXIT_STORAGE if isinstance(error, (OSError, MemoryError)) else EXIT_USAGE


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return format_os_error(error)
    return " ".join(str(error).split()) or type(error).__name__


def _report_error(message: str, kind: str, code: int, as_json: bool) -> int:
    _complain(message)
    if as_json:
        # The exit code reports the first error, even if the JSON object cannot be written.
        with contextlib.suppress(OSError, OutputClosedError):
            write(json.dumps({"error": {"kind": kind, "message": message, "exit_code": code}}))
    return code


def _complain(message: str) -> None:
    """Print a line to standard error, where that is possible: the exit code says it too."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"tundish: {printable(message)}", file=sys.stderr, flush=True)
