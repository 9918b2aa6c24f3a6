"""The commands `tundish pack` and `tundish plan`. torch is never imported, but for an export of samples."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tundish.cli.arguments import add_command, add_number, add_path, progress_of
from tundish.cli.output import readable, rows
from tundish.errors import InvalidInputError, PlanMismatchError, format_count

if TYPE_CHECKING:
    from tundish.packing import PackPlan

# Named here, so that `--help` imports no part of the package.
_MODES = ("hard", "best_fit", "ordered", "sequential")
_FORMATS = ("xtuner-preset", "trl", "nemo-parquet", "megatron")
_COMPARE = """\
Pack token counts in every mode, in memory, and print what each costs.

columns:
  fill              share of the packs that tokens take
  samples cut       samples in more than one pack, or without their end
  samples overlong  samples longer than max_length (see --overlong)
  tokens dropped    tokens in no pack
  padding           tokens that the packs lack to max_length
"""
# Printed beside the statistics of a plan.
_MEANINGS = {
    "samples": "in a pack",
    "samples_cut": "in more than one pack, or without their end",
    "samples_empty": "of length 0",
    "samples_overlong": "longer than max_length",
    "tokens": "of all samples in the order",
    "tokens_dropped": "in no pack",
    "packs_dropped": "left out by multiple_of",
    "packs_repeated": "added by multiple_of",
    "tokens_repeated": "in these packs",
    "padding": "tokens that the packs lack to max_length",
    "padding_align": "part of the padding that rounds pieces up to align",
    "fill": "share of the packs that tokens take",
    "pieces_per_pack": "on average",
    "longest": "tokens of the longest piece",
}


def add_plan_commands(commands: Any) -> None:
    """Add `pack` and `plan` to the `commands` of the whole parser."""
    _add_pack(commands)
    plan = commands.add_parser("plan", help="show, verify, compare or export plans")
    verbs = plan.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_compare(verbs)
    _add_show(verbs)
    _add_verify(verbs)
    _add_export(verbs)


def _add_pack(commands: Any) -> None:
    pack = add_command(
        commands,
        "pack",
        summary="plan how samples are packed",
        description="Plan how samples of the given token counts are packed, and write the plan to a folder.",
    )
    _add_sources(pack, "several sources are several datasets")
    add_number(pack, "--max-length", "L", "tokens of a pack at most (for example 8192)", required=True)
    add_path(pack, "--out", "FOLDER", "the plan folder to make", required=True)
    pack.add_argument(
        "--mode",
        choices=_MODES,
        default="hard",
        help="cut samples where a pack is full (hard, the default), or pack whole samples",
    )
    _add_whole_options(pack, "error", "; not with --mode hard")
    add_path(
        pack,
        "--costs",
        "FILE.npy",
        "a second limit of packs: each file holds an integer for each sample of one SOURCE; not with --mode hard",
        nargs="+",
    )
    add_number(pack, "--max-cost", "N", "what the samples of a pack cost together at most")
    add_number(
        pack, "--multiple-of", "N", "make the number of packs a multiple, for example of a global batch"
    )
    pack.add_argument(
        "--remainder",
        choices=["drop", "repeat"],
        help="with --multiple-of: leave out the last packs of the largest SOURCE (drop, the default), or repeat "
        "the first",
    )
    order = pack.add_mutually_exclusive_group()
    add_number(order, "--seed", "S", "shuffle the samples as numpy's RandomState(S) does")
    add_path(order, "--order", "FILE.npy", "take the samples in this order (one dataset only)")
    pack.add_argument(
        "--keep-last",
        action="store_true",
        help="keep the tail that fills no pack, as a shorter last pack; only with --mode hard",
    )
    pack.add_argument("--global-pack", action="store_true", help="let packs span datasets")
    _add_threads(pack)
    pack.set_defaults(run=run_pack, needs="tundish.packing.planning")


def _add_compare(verbs: Any) -> None:
    compare = add_command(
        verbs,
        "compare",
        summary="compare the packing modes",
        description=_COMPARE,
    )
    add_path(compare, "lengths", "SOURCE", "token counts or samples, as `tundish pack` takes them")
    _add_column(compare)
    add_number(compare, "--max-length", "L", "tokens of a pack at most", required=True)
    add_number(compare, "--seed", "S", "shuffle as in `tundish pack`")
    _add_whole_options(compare, "split", "; the mode hard does not use it")
    add_path(compare, "--plot", "PICTURE", "draw the table: .png, .svg or .pdf (needs tundish[plot])")
    _add_threads(compare)
    compare.set_defaults(run=run_compare, needs="tundish.packing.comparing")


def _add_show(verbs: Any) -> None:
    show = add_command(
        verbs,
        "show",
        summary="print the statistics of a plan",
        description="Print the statistics of a plan, and draw them with --plot.",
    )
    add_path(show, "plan", "PLAN", "the plan folder")
    add_path(show, "--plot", "PICTURE", "draw the plan: .png, .svg or .pdf (needs tundish[plot])")
    add_path(
        show,
        "--lengths",
        "SOURCE",
        "the sources that were packed: --plot then draws samples, not only packs",
        nargs="+",
    )
    _add_column(show)
    show.set_defaults(run=run_show, needs="tundish.packing.plan")


def _add_verify(verbs: Any) -> None:
    verify = add_command(
        verbs,
        "verify",
        summary="check a plan against the lengths",
        description="Check every pack of a plan against the lengths it was made from.",
    )
    add_path(verify, "plan", "PLAN", "the plan folder")
    _add_sources(verify, "the same sources, in the same order, as were packed")
    add_path(verify, "--order", "FILE.npy", "the order that was packed with --order, if one was")
    add_path(verify, "--costs", "FILE.npy", "the costs that were packed with --costs, if any were", nargs="+")
    _add_threads(verify)
    verify.set_defaults(run=run_verify, needs="tundish.packing.plan")


def _add_export(verbs: Any) -> None:
    export = add_command(
        verbs,
        "export",
        summary="write a plan in the format of another trainer",
        description="Write a plan as a folder in the format of another trainer.",
    )
    add_path(export, "plan", "PLAN", "the plan folder")
    export.add_argument("--format", choices=_FORMATS, required=True, help="the format of the folder")
    add_path(export, "--out", "FOLDER", "the folder to make", required=True)
    packed = "the sources that were packed"
    add_path(
        export, "--samples", "SOURCE", f"{packed}, with their tokens; for trl and nemo-parquet", nargs="+"
    )
    add_path(
        export,
        "--lengths",
        "SOURCE",
        f"{packed}, to count their tokens; for xtuner-preset and megatron",
        nargs="+",
    )
    _add_column(export)
    export.add_argument(
        "--paths",
        nargs="+",
        metavar="PATH",
        help="the path of each dataset as XTuner is given it; for xtuner-preset",
    )
    add_path(
        export, "--order", "FILE.npy", "the order that was packed with --order, if one was; for megatron"
    )
    add_path(
        export,
        "--pack-order",
        "FILE.npy",
        "numbers of packs in the order in which they are taken; for xtuner-preset and megatron",
    )
    export.add_argument(
        "--prefix",
        metavar="TEXT",
        help="the beginning of the names by which Megatron finds its index files; for megatron",
    )
    export.set_defaults(run=run_export, needs="tundish.packing.exporting")


def _add_sources(parser: argparse.ArgumentParser, several: str) -> None:
    add_path(
        parser,
        "lengths",
        "SOURCE",
        "token counts or samples: a .npy, .npz, .parquet, .arrow, .idx or .jsonl file, a folder of such files "
        f"or of Dataset.save_to_disk, or a quoted glob; {several}",
        nargs="+",
    )
    _add_column(parser)


def _add_column(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--column",
        metavar="NAME",
        help="the column with the token counts or the tokens (default: length, else input_ids)",
    )


def _add_whole_options(parser: argparse.ArgumentParser, overlong: str, where: str) -> None:
    """Add the options of whole samples; `overlong` is the default of one of them."""
    parser.add_argument(
        "--overlong",
        choices=["error", "split", "truncate", "drop"],
        default=None if overlong == "error" else overlong,
        help=f"what happens to samples longer than a pack (default: {overlong}){where}",
    )
    add_number(parser, "--window", "W", "open packs of the mode ordered (default: 64)")
    add_number(parser, "--max-samples", "N", f"pieces of a pack at most{where}")
    add_number(
        parser, "--align", "A", f"round the tokens of each piece up to a multiple of A{where}", default=1
    )


def _add_threads(parser: argparse.ArgumentParser) -> None:
    add_number(parser, "--threads", "N", "threads to use (default: all cores)")


def run_pack(options: argparse.Namespace) -> dict[str, Any]:
    """`tundish pack`: plan straight into the folder `--out`."""
    several = len(options.lengths) > 1 or options.global_pack
    if options.order is not None and several:
        raise InvalidInputError("--order is for one dataset: give one SOURCE, and no --global-pack")
    if options.keep_last and options.mode != "hard":
        raise InvalidInputError(
            f"--mode {options.mode} packs whole samples, and has no tail: leave out --keep-last, or use --mode hard"
        )
    from tundish.packing import lengths as read_lengths
    from tundish.packing import pack, pack_datasets

    lengths = [read_lengths(path, options.column) for path in options.lengths]
    names = (
        "mode",
        "seed",
        "overlong",
        "window",
        "max_samples",
        "align",
        "max_cost",
        "multiple_of",
        "remainder",
    )
    shared: dict[str, Any] = {name: getattr(options, name) for name in (*names, "threads", "out")}
    shared |= {
        "drop_last": False if options.keep_last else None,
        "costs": None if options.costs is None else list(map(read_lengths, options.costs)),
        "progress": progress_of(options),
    }
    was_there = os.path.exists(options.out / "plan.json")  # noqa: PTH110 (false where the system refuses to tell)
    start = time.perf_counter()
    if several:
        plan = pack_datasets(lengths, options.max_length, global_pack=options.global_pack, **shared)
    else:
        order = None if options.order is None else read_lengths(options.order)
        plan = pack(lengths[0], options.max_length, order=order, **shared)
    seconds = time.perf_counter() - start
    facts = describe(plan, options.out)
    done = "found the plan there already, of" if was_there else "packed"
    head = f"{done} {facts['samples']:,} samples in {seconds:.2f} s"
    return {"json": {**facts, "seconds": round(seconds, 6)}, "text": f"{head}\n{_table(facts)}"}


def run_compare(options: argparse.Namespace) -> dict[str, Any]:
    """`tundish plan compare`: one row for each mode."""
    from tundish.packing import compare, lengths

    given = ("overlong", "window", "max_samples", "align", "seed", "threads", "plot")
    table = compare(
        lengths(options.lengths, options.column),
        options.max_length,
        progress=progress_of(options),
        **{name: getattr(options, name) for name in given},
    )
    names = list(table["hard"])
    lines = [["mode", *(name.replace("_", " ") for name in names)]]
    for mode, row in table.items():
        lines.append([mode, *(readable(name, row[name]) for name in names)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines
    )
    facts: dict[str, Any] = {"max_length": options.max_length, "modes": table}
    if options.plot is not None:
        facts["plot"] = str(options.plot)
        text += f"\nplot: {options.plot}"
    return {"json": facts, "text": text}


def run_show(options: argparse.Namespace) -> dict[str, Any]:
    """`tundish plan show`: the table, and the picture if asked for."""
    from tundish.packing import PackPlan, lengths

    plan = PackPlan.load(options.plan, progress=progress_of(options))
    if options.lengths is not None:
        plan = plan.with_lengths(_read_each(lengths, options.lengths, options.column, plan))
    facts = describe(plan, options.plan)
    text = _table(facts)
    if options.plot is not None:
        plan.plot(options.plot)
        facts["plot"] = str(options.plot)
        text += f"\n{'plot':<20}{options.plot}"
    return {"json": facts, "text": text}


def run_verify(options: argparse.Namespace) -> dict[str, Any]:
    """`tundish plan verify`: the whole plan against the lengths."""
    from tundish.packing import PackPlan, lengths

    plan = PackPlan.load(options.plan, progress=progress_of(options))
    plan.verify(
        _read_each(lengths, options.lengths, options.column, plan),
        order=None if options.order is None else lengths(options.order),
        costs=None if options.costs is None else list(map(lengths, options.costs)),
        threads=options.threads,
        progress=progress_of(options),
    )
    facts = {"verified": True, **describe(plan, options.plan)}
    text = f"{options.plan}: all {facts['packs']:,} packs match the lengths (fingerprint {plan.fingerprint})"
    return {"json": facts, "text": text}


def run_export(options: argparse.Namespace) -> dict[str, Any]:
    """`tundish plan export`: write the folder `--out`."""
    from tundish.packing import PackPlan, export, lengths, open_samples

    plan = PackPlan.load(options.plan, progress=progress_of(options))
    if counted := options.lengths or options.samples:
        plan = plan.with_lengths(_read_each(lengths, counted, options.column, plan))
    samples: Any = None
    if options.samples is not None:
        samples = _read_each(open_samples, options.samples, options.column, plan)
    export(
        plan,
        options.out,
        options.format,
        samples=samples,
        paths=options.paths,
        # Files of indices are read as files of lengths are.
        order=None if options.order is None else lengths(options.order),
        pack_order=None if options.pack_order is None else lengths(options.pack_order),
        prefix=options.prefix,
    )
    facts = {"plan": str(options.plan), "format": options.format, "out": str(options.out), "packs": len(plan)}
    text = f"{options.out}: {len(plan):,} packs as {options.format} (fingerprint {plan.fingerprint})"
    return {"json": {**facts, "fingerprint": plan.fingerprint}, "text": text}


def describe(plan: PackPlan, path: Path) -> dict[str, Any]:
    """Describe a plan in plain values for JSON; `bytes` is the size of its columns in memory or on disk."""
    whole = ("overlong", "window", "max_samples", "align", "max_cost")
    options: tuple[str, ...] = ("drop_last",) if plan.mode == "hard" else whole
    return {
        "plan": str(path),
        "mode": plan.mode,
        "max_length": plan.max_length,
        "order": plan.metadata["order"],
        "seed": plan.seed,
        **{name: getattr(plan, name) for name in (*options, "multiple_of", "remainder")},
        "global_pack": plan.global_pack,
        "datasets": len(plan.num_samples),
        "fingerprint": plan.fingerprint,
        "format_version": plan.metadata["format_version"],
        "bytes": plan.nbytes,
        **plan.stats(),
    }


def _table(facts: dict[str, Any]) -> str:
    """The facts as lines of a name, a value and its meaning."""
    lines = zip(facts, rows(facts).splitlines(), strict=True)
    return "\n".join(f"{line:<34}  {_MEANINGS.get(name, '')}".rstrip() for name, line in lines)


def _read_each(
    read: Callable[[Path, str | None], Any], sources: Sequence[Path], column: str | None, plan: PackPlan
) -> Any:
    """Read each source of a plan with `read`. Returns a list, or for one dataset the value itself."""
    datasets = len(plan.num_samples)
    if len(sources) != datasets:
        raise PlanMismatchError(
            f"the plan was made for {format_count(datasets, 'dataset')}, and "
            f"{format_count(len(sources), 'SOURCE')} {'was' if len(sources) == 1 else 'were'} given"
        )
    found = [read(source, column) for source in sources]
    return found[0] if datasets == 1 else found
