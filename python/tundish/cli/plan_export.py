"""The command `tundish plan export`."""

from __future__ import annotations

import argparse
from typing import Any

from tundish.cli.arguments import add_command, path_of, progress_of
from tundish.errors import PlanMismatchError, format_count

__all__ = ["add_plan_export"]

# Named here, so that `--help` imports no part of the package.
_FORMATS = ("xtuner-preset", "trl", "nemo-parquet", "megatron")


def add_plan_export(verbs: Any) -> None:
    """Add `export` to the commands of `tundish plan`."""
    export = add_command(
        verbs,
        "export",
        summary="write a plan in the format of another trainer",
        description="Write a plan as a folder in the format of another trainer.",
    )
    export.add_argument("plan", type=path_of, metavar="PLAN", help="the plan folder")
    export.add_argument("--format", choices=_FORMATS, required=True, help="the format of the folder")
    export.add_argument("--out", type=path_of, required=True, metavar="FOLDER", help="the folder to make")
    export.add_argument(
        "--samples",
        type=path_of,
        nargs="+",
        metavar="SOURCE",
        help="the sources that were packed, with their tokens; for trl and nemo-parquet",
    )
    export.add_argument(
        "--lengths",
        type=path_of,
        nargs="+",
        metavar="SOURCE",
        help="the sources that were packed, to count their tokens; for xtuner-preset",
    )
    export.add_argument(
        "--column", metavar="NAME", help="the column with the tokens, or with the token counts"
    )
    export.add_argument(
        "--paths",
        nargs="+",
        metavar="PATH",
        help="the path of each data set as XTuner is given it; for xtuner-preset",
    )
    export.add_argument(
        "--order",
        type=path_of,
        metavar="FILE.npy",
        help="the order that was packed with --order, if one was; for megatron",
    )
    export.add_argument(
        "--pack-order",
        type=path_of,
        metavar="FILE.npy",
        help="numbers of packs in the order in which they are taken; for xtuner-preset and megatron",
    )
    export.add_argument(
        "--prefix",
        metavar="TEXT",
        help="the beginning of the names by which Megatron finds its index files; for megatron",
    )
    export.set_defaults(run=run_export, needs="tundish.packing.exchange.export")


def run_export(options: argparse.Namespace) -> dict[str, Any]:
    """`tundish plan export`: write the folder `--out`."""
    from tundish.packing import PackPlan, export, lengths, open_samples

    plan = PackPlan.load(options.plan, progress=progress_of(options))
    counted = options.lengths or options.samples
    if counted is not None:
        _check_sources(counted, len(plan.num_samples))
        columns = [lengths(path, options.column) for path in counted]
        plan = plan.with_lengths(columns[0] if len(plan.num_samples) == 1 else columns)
    samples: Any = None
    if options.samples is not None:
        _check_sources(options.samples, len(plan.num_samples))
        opened = [open_samples(path, options.column) for path in options.samples]
        samples = opened[0] if len(plan.num_samples) == 1 else opened
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


def _check_sources(sources: list[Any], datasets: int) -> None:
    if len(sources) != datasets:
        raise PlanMismatchError(
            f"the plan was made for {format_count(datasets, 'dataset')}, and "
            f"{format_count(len(sources), 'SOURCE')} {'was' if len(sources) == 1 else 'were'} given"
        )
