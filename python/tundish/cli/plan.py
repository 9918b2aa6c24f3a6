"""The commands `tundish pack` and `tundish plan`. torch is never imported."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tundish.cli.arguments import add_command, path_of, progress_of
from tundish.cli.output import readable, rows
from tundish.cli.plan_export import add_plan_export
from tundish.errors import InvalidInputError, PlanMismatchError, format_count

if TYPE_CHECKING:
    import numpy as np

    from tundish.packing import PackPlan

__all__ = ["add_plan_commands"]


def add_plan_commands(commands: Any) -> None:
    """Add `pack` and `plan` to the `commands` of the whole parser."""
    pack = add_command(
        commands,
        "pack",
        summary="plan how samples are packed",
        description="Plan how samples of the given token counts are packed, and write the plan to a folder.",
    )
    _add_sources(pack, "several sources are several datasets")
    pack.add_argument(
        "--max-length", type=int, required=True, metavar="L", help="tokens a pack (for example 8192)"
    )
    pack.add_argument("--out", type=path_of, required=True, metavar="FOLDER", help="the plan folder to make")
    pack.add_argument(
        "--mode",
        choices=["hard", "best_fit", "ordered", "sequential"],
        action="append",
        help="cut samples where a pack is full (hard, the default), or pack whole samples; give it once, or once for "
        "each SOURCE",
    )
    _add_whole_options(pack, "error", "; not with --mode hard")
    _add_costs(
        pack, "each file holds an integer a sample, for one SOURCE after the other; not with --mode hard"
    )
    pack.add_argument("--max-cost", type=int, metavar="N", help="what the samples of a pack cost at most")
    pack.add_argument(
        "--multiple-of",
        type=int,
        metavar="N",
        help="make the number of packs a multiple, as of a global batch",
    )
    pack.add_argument(
        "--remainder",
        choices=["drop", "repeat"],
        help="with --multiple-of: leave out the emptiest packs (drop, the default), or repeat the first",
    )
    order = pack.add_mutually_exclusive_group()
    order.add_argument(
        "--seed", type=int, metavar="S", help="shuffle the samples as numpy's RandomState(S) does"
    )
    order.add_argument(
        "--order", type=path_of, metavar="FILE.npy", help="take the samples in this order (one dataset only)"
    )
    pack.add_argument(
        "--keep-last",
        action="store_true",
        help="keep the tail that fills no pack, as a shorter last pack; only with --mode hard",
    )
    pack.add_argument("--global-pack", action="store_true", help="let packs span datasets")
    _add_threads(pack)
    pack.set_defaults(run=run_pack, needs="tundish.packing.build.pack")

    plan = commands.add_parser("plan", help="show, verify, compare or export plans")
    verbs = plan.add_subparsers(title="commands", metavar="COMMAND", required=True)

    compare = add_command(
        verbs,
        "compare",
        summary="compare the packing modes",
        description="Pack token counts in every mode, in memory, and print what each costs.",
    )
    compare.add_argument(
        "lengths",
        type=path_of,
        metavar="SOURCE",
        help="token counts or samples, as `tundish pack` takes them",
    )
    _add_column(compare)
    compare.add_argument("--max-length", type=int, required=True, metavar="L", help="tokens a pack")
    compare.add_argument("--seed", type=int, metavar="S", help="shuffle as in `tundish pack`")
    _add_whole_options(compare, "split", "; the mode hard does not use it")
    compare.add_argument(
        "--plot",
        type=path_of,
        metavar="PICTURE",
        help="draw the table: .png, .svg or .pdf (needs tundish[plot])",
    )
    _add_threads(compare)
    compare.set_defaults(run=run_compare, needs="tundish.packing.mode_comparison")

    show = add_command(
        verbs,
        "show",
        summary="print what a plan holds",
        description="Print what a plan holds, and draw it with --plot.",
    )
    show.add_argument("plan", type=path_of, metavar="PLAN", help="the plan folder")
    show.add_argument(
        "--plot",
        type=path_of,
        metavar="PICTURE",
        help="draw the plan: .png, .svg or .pdf (needs tundish[plot])",
    )
    show.add_argument(
        "--lengths",
        type=path_of,
        nargs="+",
        metavar="SOURCE",
        help="the sources that were packed: --plot then draws samples, not only packs",
    )
    _add_column(show)
    show.set_defaults(run=run_show, needs="tundish.packing.plan.pack_plan")

    verify = add_command(
        verbs,
        "verify",
        summary="check a plan against the lengths",
        description="Check every pack of a plan against the lengths it was made from.",
    )
    verify.add_argument("plan", type=path_of, metavar="PLAN", help="the plan folder")
    _add_sources(verify, "the same sources, in the same order, as were packed")
    verify.add_argument(
        "--order", type=path_of, metavar="FILE.npy", help="the order that was packed with --order, if one was"
    )
    _add_costs(verify, "the costs that were packed with --costs, if there were any")
    _add_threads(verify)
    verify.set_defaults(run=run_verify, needs="tundish.packing.plan.pack_plan")

    add_plan_export(verbs)


def run_pack(options: argparse.Namespace) -> dict[str, Any]:
    """`tundish pack`: plan straight into the folder `--out`."""
    several = len(options.lengths) > 1 or options.global_pack
    if options.order is not None and several:
        raise InvalidInputError("--order is for one dataset: give one SOURCE, and no --global-pack")
    modes = options.mode or ["hard"]
    if options.keep_last and "hard" not in modes:
        raise InvalidInputError(
            f"--mode {modes[0]} packs whole samples, and has no tail: leave out --keep-last, or use --mode hard"
        )
    if len(modes) > 1 and len(modes) != len(options.lengths):
        raise InvalidInputError(
            f"{len(modes)} modes were given for {format_count(len(options.lengths), 'SOURCE')}: give --mode once, or "
            "once for each"
        )
    from tundish.packing import lengths as read_lengths
    from tundish.packing import pack, pack_datasets

    lengths = [read_lengths(path, options.column) for path in options.lengths]
    shared: dict[str, Any] = {
        "mode": modes[0] if len(modes) == 1 else modes,
        "seed": options.seed,
        "drop_last": False if options.keep_last else None,
        "overlong": options.overlong,
        "window": options.window,
        "max_samples": options.max_samples,
        "align": options.align,
        "max_cost": options.max_cost,
        "multiple_of": options.multiple_of,
        "remainder": options.remainder,
        "threads": options.threads,
        "out": options.out,
        "progress": progress_of(options),
    }
    costs = None if options.costs is None else [_map_order(path) for path in options.costs]
    was_there = os.path.exists(options.out / "plan.json")  # noqa: PTH110 (false where the system refuses to tell)
    start = time.perf_counter()
    if several:
        shared |= {"costs": costs, "global_pack": options.global_pack}
        plan = pack_datasets(lengths, options.max_length, **shared)
    else:
        order = None if options.order is None else _map_order(options.order)
        plan = pack(lengths[0], options.max_length, order=order, costs=costs, **shared)
    seconds = time.perf_counter() - start
    facts = describe(plan, options.out)
    done = "found the plan there already, of" if was_there else "packed"
    head = f"{done} {facts['samples']:,} samples in {seconds:.2f} s"
    return {"json": {**facts, "seconds": round(seconds, 6)}, "text": f"{head}\n{rows(facts)}"}


def run_compare(options: argparse.Namespace) -> dict[str, Any]:
    """`tundish plan compare`: one row for each mode."""
    from tundish.packing import compare, lengths

    table = compare(
        lengths(options.lengths, options.column),
        options.max_length,
        overlong=options.overlong,
        window=options.window,
        max_samples=options.max_samples,
        align=options.align,
        seed=options.seed,
        threads=options.threads,
        progress=progress_of(options),
        plot=options.plot,
    )
    names = list(table["hard"])
    lines = [["mode", *(name.replace("_", " ") for name in names)]]
    for mode, row in table.items():
        shown = [f"{row[name]:.4f}" if name == "fill" else readable(name, row[name]) for name in names]
        lines.append([mode, *shown])
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
    from tundish.packing import PackPlan

    plan = PackPlan.load(options.plan, progress=progress_of(options))
    if options.lengths is not None:
        plan = plan.with_lengths(_read_lengths(options, plan))
    facts = describe(plan, options.plan)
    text = rows(facts)
    if options.plot is not None:
        plan.plot(options.plot)
        facts["plot"] = str(options.plot)
        text += f"\n{'plot':<20}{options.plot}"
    return {"json": facts, "text": text}


def run_verify(options: argparse.Namespace) -> dict[str, Any]:
    """`tundish plan verify`: the whole plan against the lengths."""
    from tundish.packing import PackPlan

    plan = PackPlan.load(options.plan, progress=progress_of(options))
    order = None if options.order is None else _map_order(options.order)
    plan.verify(
        _read_lengths(options, plan),
        order=order,
        costs=None if options.costs is None else [_map_order(path) for path in options.costs],
        threads=options.threads,
        progress=progress_of(options),
    )
    facts = {"verified": True, **describe(plan, options.plan)}
    text = f"{options.plan}: all {facts['packs']:,} packs match the lengths (fingerprint {plan.fingerprint})"
    return {"json": facts, "text": text}


def describe(plan: PackPlan, path: Path) -> dict[str, Any]:
    """Describe a plan in plain values for JSON; `bytes` is the size of its columns in memory or on disk."""
    options: tuple[str, ...] = ("drop_last",) if "hard" in plan.modes else ()
    if plan.mode != "hard":
        options += ("overlong", "window", "max_samples", "align", "max_cost")
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


def _add_sources(parser: argparse.ArgumentParser, several: str) -> None:
    parser.add_argument(
        "lengths",
        type=path_of,
        nargs="+",
        metavar="SOURCE",
        help="token counts or samples: a .npy, .npz, .parquet, .arrow, .idx or .jsonl file, a folder of such files "
        f"or of Dataset.save_to_disk, or a quoted glob; {several}",
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
    parser.add_argument(
        "--window", type=int, metavar="W", help="open packs of the mode ordered (default: 64)"
    )
    parser.add_argument("--max-samples", type=int, metavar="N", help=f"pieces a pack at most{where}")
    parser.add_argument(
        "--align",
        type=int,
        default=1,
        metavar="A",
        help=f"each piece takes a multiple of so many tokens of its pack{where}",
    )


def _add_costs(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument(
        "--costs", type=path_of, nargs="+", metavar="FILE.npy", help=f"a second limit of packs: {text}"
    )


def _add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, metavar="N", help="threads to use (default: all cores)")


def _read_lengths(options: argparse.Namespace, plan: PackPlan) -> np.ndarray | list[np.ndarray]:
    from tundish.packing import lengths

    paths = options.lengths
    datasets = len(plan.num_samples)
    if len(paths) != datasets:
        raise PlanMismatchError(
            f"the plan was made for {format_count(datasets, 'dataset')}, and "
            f"{format_count(len(paths), 'SOURCE')} {'was' if len(paths) == 1 else 'were'} given"
        )
    columns = [lengths(path, options.column) for path in paths]
    return columns[0] if datasets == 1 else columns


def _map_order(path: Path) -> np.ndarray:
    from tundish.packing import lengths

    # A file of indices is read as one of lengths is.
    return lengths(path)
