"""The command `tundish`: plan a packing, look at a plan, verify one.

Owns the command line's words, its exit codes and what it prints. What always holds: results go to standard
output and everything else to standard error; with `--json` standard output is exactly one JSON object, also
when the command fails; an error that the user can mend is one line without a traceback, and a bug keeps its
traceback. torch is never imported.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tundish.errors import (
    InvalidInputError,
    MissingExtraError,
    PlanFormatError,
    PlanMismatchError,
    StorageError,
    TundishError,
    names_its_path,
)

if TYPE_CHECKING:
    import numpy as np

    from tundish.packing.plan import PackPlan

__all__ = ["main"]

EXIT_OK = 0
EXIT_PLAN_WRONG = 1
EXIT_USAGE = 2
EXIT_STORAGE = 3
EXIT_MISSING_EXTRA = 4
EXIT_BUG = 70
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

EXIT_CODES = """\
exit codes:
    0  done; for `plan verify`: the plan holds
    1  the plan is damaged, or does not belong to the lengths
    2  wrong usage, or input that cannot be used
    3  a file or folder is missing, taken, read-only or full, or memory ran out
    4  an optional package is missing
   70  a bug in tundish; the traceback is printed
  130  interrupted (Ctrl-C)
  141  the reader of the output went away
"""


def main(arguments: Sequence[str] | None = None, begin: Callable[[], object] | None = None) -> int:
    """Run the command line `arguments` (default: the process's own) and return the exit code.

    `begin` is called when everything that the command needs is imported, just before its work.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    as_json = "--json" in words
    for stream in (sys.stdout, sys.stderr):
        # A path need not be text in the terminal's encoding.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        options = build_parser().parse_args(words)
        import_module(options.needs)
        if begin is not None:
            begin()
        result = options.run(options)
        _write(json.dumps(result["json"]) if as_json else result["text"])
        return EXIT_OK
    except SystemExit as stop:
        # argparse's own way out of --help and --version, after printing.
        return stop.code if isinstance(stop.code, int) else EXIT_OK
    except OutputClosedError:
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        return _fail("interrupted", "KeyboardInterrupt", EXIT_INTERRUPTED, as_json)
    except (TundishError, OSError, MemoryError) as error:
        return _fail(_one_line(error), type(error).__name__, _exit_code(error), as_json)
    except Exception as error:  # noqa: BLE001 (a script gets its JSON object and its exit code also for a bug)
        traceback.print_exc()
        return _fail(_one_line(error), type(error).__name__, EXIT_BUG, as_json)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command; each command's options carry the function to `run` and the module it `needs`."""
    common = Parser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON object, also for an error")
    common.add_argument("--no-progress", action="store_true", help="no progress line, also on a terminal")

    parser = Parser(
        prog="tundish",
        description="Pack token sequences for training, and look at the plans.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=PrintVersion, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    pack = commands.add_parser(
        "pack",
        parents=[common],
        help="plan how samples are packed",
        description="Plan how samples of the given token counts are packed, and write the plan to a folder.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_lengths(pack, "several files are several datasets")
    pack.add_argument(
        "--max-length", type=int, required=True, metavar="L", help="tokens a pack (for example 8192)"
    )
    pack.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the plan folder to make")
    pack.add_argument("--mode", choices=["hard"], default="hard", help="how to pack (default: hard)")
    order = pack.add_mutually_exclusive_group()
    order.add_argument(
        "--seed", type=int, metavar="S", help="shuffle the samples as numpy's RandomState(S) does"
    )
    order.add_argument(
        "--order", type=Path, metavar="FILE.npy", help="take the samples in this order (one dataset only)"
    )
    pack.add_argument(
        "--keep-last", action="store_true", help="keep the tail that fills no pack, as a shorter last pack"
    )
    pack.add_argument("--global-pack", action="store_true", help="let packs span datasets")
    _add_threads(pack)
    pack.set_defaults(run=run_pack, needs="tundish.packing.build")

    plan = commands.add_parser("plan", help="show or verify a plan")
    verbs = plan.add_subparsers(title="commands", metavar="COMMAND", required=True)

    show = verbs.add_parser(
        "show",
        parents=[common],
        help="print what a plan holds",
        description="Print what a plan holds, and draw it with --plot.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    show.add_argument("plan", type=Path, metavar="PLAN", help="the plan folder")
    show.add_argument(
        "--plot", type=Path, metavar="PICTURE", help="draw the plan: .png, .svg or .pdf (needs tundish[plot])"
    )
    show.add_argument(
        "--lengths",
        type=Path,
        nargs="+",
        metavar="FILE.npy",
        help="the lengths that were packed: --plot then draws samples, not only packs",
    )
    show.set_defaults(run=run_show, needs="tundish.packing.plan")

    verify = verbs.add_parser(
        "verify",
        parents=[common],
        help="check a plan against the lengths",
        description="Check every pack of a plan against the lengths it was made from.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verify.add_argument("plan", type=Path, metavar="PLAN", help="the plan folder")
    _add_lengths(verify, "the same files, in the same order, as were packed")
    verify.add_argument(
        "--order", type=Path, metavar="FILE.npy", help="the order that was packed with --order, if one was"
    )
    _add_threads(verify)
    verify.set_defaults(run=run_verify, needs="tundish.packing.plan")
    return parser


def run_pack(options: argparse.Namespace) -> dict[str, Any]:
    """`tundish pack`: plan straight into the folder `--out`."""
    several = len(options.lengths) > 1 or options.global_pack
    if options.order is not None and several:
        raise InvalidInputError("--order is for one dataset: give one LENGTHS file, and no --global-pack")
    from tundish.packing.build import pack, pack_datasets

    lengths = [_map_array(path) for path in options.lengths]
    shared: dict[str, Any] = {
        "mode": options.mode,
        "seed": options.seed,
        "drop_last": not options.keep_last,
        "threads": options.threads,
        "out": options.out,
        "progress": _progress(options),
    }
    start = time.perf_counter()
    if several:
        plan = pack_datasets(lengths, options.max_length, global_pack=options.global_pack, **shared)
    else:
        order = None if options.order is None else _map_array(options.order)
        plan = pack(lengths[0], options.max_length, order=order, **shared)
    seconds = time.perf_counter() - start
    facts = describe(plan, options.out)
    head = f"packed {facts['samples']:,} samples in {seconds:.2f} s"
    return {"json": {**facts, "seconds": round(seconds, 6)}, "text": f"{head}\n{table(facts)}"}


def run_show(options: argparse.Namespace) -> dict[str, Any]:
    """`tundish plan show`: the table, and the picture if asked for."""
    from tundish.packing.plan import PackPlan

    plan = PackPlan.load(options.plan, progress=_progress(options))
    if options.lengths is not None:
        plan = plan.with_lengths(_map_lengths(options.lengths, plan))
    facts = describe(plan, options.plan)
    text = table(facts)
    if options.plot is not None:
        plan.plot(options.plot)
        facts["plot"] = str(options.plot)
        text += f"\n{'plot':<20}{options.plot}"
    return {"json": facts, "text": text}


def run_verify(options: argparse.Namespace) -> dict[str, Any]:
    """`tundish plan verify`: the whole plan against the lengths."""
    from tundish.packing.plan import PackPlan

    plan = PackPlan.load(options.plan, progress=_progress(options))
    order = None if options.order is None else _map_array(options.order)
    plan.verify(
        _map_lengths(options.lengths, plan), order=order, threads=options.threads, progress=_progress(options)
    )
    facts = {"verified": True, **describe(plan, options.plan)}
    text = f"{options.plan}: all {facts['packs']:,} packs hold (fingerprint {plan.fingerprint})"
    return {"json": facts, "text": text}


def describe(plan: PackPlan, path: Path) -> dict[str, Any]:
    """What a plan holds, as plain values for JSON; `bytes` is what its columns take in memory or on disk."""
    from tundish.packing.plan import FIELDS

    return {
        "plan": str(path),
        "mode": plan.mode,
        "max_length": plan.max_length,
        "seed": plan.seed,
        "drop_last": plan.drop_last,
        "global_pack": plan.global_pack,
        "datasets": len(plan.num_samples),
        "fingerprint": plan.fingerprint,
        "format_version": plan.facts["format_version"],
        "bytes": sum(getattr(plan, field).nbytes for field in FIELDS),
        **plan.stats(),
    }


def table(facts: dict[str, Any]) -> str:
    """`describe`'s facts as lines of a name and a value."""
    rows = [(name.replace("_", " "), _readable(name, value)) for name, value in facts.items()]
    return "\n".join(f"{name:<20}{value}" for name, value in rows)


class OutputClosedError(Exception):
    """The reader of standard output went away."""


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
            _write(message.rstrip())


class PrintVersion(argparse.Action):
    """`--version`, which looks the version up only when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **settings)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from tundish import __version__

        # argparse would print it to standard error.
        _write(f"tundish {__version__}")
        parser.exit()


def _add_lengths(parser: argparse.ArgumentParser, several: str) -> None:
    parser.add_argument(
        "lengths",
        type=Path,
        nargs="+",
        metavar="LENGTHS",
        help=f".npy file of the samples' token counts, a 1-D integer array; {several}",
    )


def _add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, metavar="N", help="threads to use (default: all cores)")


def _progress(options: argparse.Namespace) -> bool | None:
    return False if options.no_progress else None


def _map_lengths(paths: list[Path], plan: PackPlan) -> np.ndarray | list[np.ndarray]:
    datasets = len(plan.num_samples)
    if len(paths) != datasets:
        raise PlanMismatchError(
            f"the plan was made for {datasets} dataset(s), and {len(paths)} LENGTHS file(s) were given"
        )
    columns = [_map_array(path) for path in paths]
    return columns[0] if datasets == 1 else columns


def _map_array(path: Path) -> np.ndarray:
    import numpy as np

    from tundish.packing.columns import as_integer_column, as_path

    # numpy takes what is no .npy file for a pickle and says so; a user should hear which file is wrong.
    with as_path(path, "a file of an array").open("rb") as file:
        magic = file.read(6)
    if magic != b"\x93NUMPY":
        raise InvalidInputError(f"{path}: not a .npy file; write the array with numpy.save")
    try:
        with warnings.catch_warnings():
            # What numpy says of a strange header, it says in its error too.
            warnings.simplefilter("ignore")
            array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, TypeError, OverflowError, SyntaxError) as error:
        raise InvalidInputError(f"{path}: cannot be mapped: {error}") from error
    # Here, where the file can be named.
    return as_integer_column(array, str(path))


def _readable(name: str, value: Any) -> str:
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


def _exit_code(error: BaseException) -> int:
    if isinstance(error, (PlanFormatError, PlanMismatchError)):
        return EXIT_PLAN_WRONG
    if isinstance(error, MissingExtraError):
        return EXIT_MISSING_EXTRA
    return EXIT_STORAGE if isinstance(error, (OSError, MemoryError)) else EXIT_USAGE


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        named = error.filename is None or names_its_path(error)
        return error.strerror if named else f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _fail(message: str, kind: str, code: int, as_json: bool) -> int:
    if sys.stderr is not None:
        # Where nobody can be told, the exit code still tells.
        with contextlib.suppress(OSError):
            print(f"tundish: {message}", file=sys.stderr, flush=True)
    if as_json:
        # Where this cannot be written either, the failure to report is still the first one.
        with contextlib.suppress(OSError, OutputClosedError):
            _write(json.dumps({"error": {"kind": kind, "message": message, "exit_code": code}}))
    return code


def _write(text: str) -> None:
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
