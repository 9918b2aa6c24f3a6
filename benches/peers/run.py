"""Compares tundish with other libraries, side by side in one run.

    python benches/peers/run.py                 all parts; writes benches/RESULTS.md
    python benches/peers/run.py --part NAME     one part; writes its section of benches/RESULTS.md
    python benches/peers/run.py --only NAME     one measure; prints it
    python benches/peers/run.py --quick         small inputs, as a smoke test; prints it

A missing peer, or outputs that differ, fail the run and leave RESULTS.md unchanged. Only a full run of a part writes
its section, so all figures of a part come from one run. The first table is made anew from all sections.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
RESULTS = CHECKOUT / "benches" / "RESULTS.md"
NOT_A_DISK = ("tmpfs", "ramfs")
MEASURES = {
    "packing": (
        "plan",
        "best_fit",
        "ordered",
        "first_batch",
        "stream",
        "shuffle",
        "lengths",
        "balance",
        "curve",
    ),
    "checkpoint": ("large", "small", "worlds"),
    "shm": ("tasks", "results", "binding", "readers", "node"),
    "scatter": ("local", "gloo", "peers", "overlap", "nodes"),
    "rtensor": ("sockets", "transports", "ray", "beside", "drains"),
}
PACKAGES = {
    "packing": (
        "tundish",
        "numpy",
        "torch",
        "numba",
        "megatron-core",
        "pyarrow",
        "datasets",
        "verl",
        "trl",
        "axolotl",
        "binpacking",
        "lightbinpack",
        "seqpacker",
    ),
    "checkpoint": (
        "tundish",
        "torch",
        "safetensors",
        "torch-checkpointing",
        "orbax-checkpoint",
        "nvidia-resiliency-ext",
    ),
    "shm": ("tundish", "numpy", "torch", "joblib", "loky"),
    "scatter": ("tundish", "numpy", "torch", "accelerate", "tensordict"),
    "rtensor": ("tundish", "torch", "areal", "ray", "pyzmq", "pyarrow", "grpcio"),
}


def packing_measures(folder: Path, *, quick: bool) -> tuple[dict[str, Callable[[], Sequence[object]]], str]:
    """Return the measures of packing, and a sentence about their rounds."""
    from packing.balance.cases import balance
    from packing.cases import Scale, hard_plan, shuffle
    from packing.lengths_case import lengths
    from packing.size_curve_case import curve
    from packing.whole.cases import best_fit, ordered
    from packing.whole.hugging_face import first_batch
    from packing.whole.stream import stream

    scale = Scale(
        samples=(10**4, 10**5) if quick else (10**6, 10**7),
        curve_samples=(10**4, 10**5) if quick else (10**5, 10**6, 10**7),
        least_rounds=2 if quick else 5,
        folder=folder,
    )
    summary = f"Each time is the minimum of at least {scale.least_rounds} rounds. Each round runs every library once."
    return {
        "plan": lambda: [hard_plan(scale)],
        "best_fit": lambda: [best_fit(scale)],
        "ordered": lambda: [ordered(scale)],
        "first_batch": lambda: [first_batch(scale)],
        "stream": lambda: [stream(scale)],
        "shuffle": lambda: [shuffle(scale)],
        "lengths": lambda: [lengths(scale)],
        "balance": lambda: [balance(scale)],
        "curve": lambda: [curve(scale)],
    }, summary


def checkpoint_measures(
    folder: Path, *, quick: bool
) -> tuple[dict[str, Callable[[], Sequence[object]]], str]:
    """Return the measures of checkpoints, and a sentence about their rounds."""
    import nvidia_resiliency_ext  # noqa: F401 (used in child processes; checked here because a missing one would cost minutes)
    import orbax.checkpoint  # noqa: F401
    import torch_checkpointing  # noqa: F401
    from checkpoint.cases import Plan, measure

    processors = len(os.sched_getaffinity(0))
    plan = Plan(folder=folder, processors=processors)
    if quick:
        plan = Plan(
            folder=folder,
            processors=processors,
            large="tiny",
            small="tiny",
            rounds=1,
            saves=1,
        )
    summary = (
        f"Each time is the minimum of {plan.rounds * plan.saves} saves. Each library runs in a fresh process for each "
        f"rank: one save to warm up, then {plan.saves} timed saves."
    )
    return {name: lambda name=name: measure(name, plan) for name in MEASURES["checkpoint"]}, summary


def shm_measures(folder: Path, *, quick: bool) -> tuple[dict[str, Callable[[], Sequence[object]]], str]:
    """Return the measures of pools and shared arrays, and a sentence about their rounds."""
    from shm.contestants import PACKAGES as imported_elsewhere

    for package in imported_elsewhere:
        importlib.import_module(package)
    from shm.cases import Plan, measure
    from shm.node_case import node

    plan = Plan()
    if quick:
        plan = Plan(
            array_bytes=32 << 20,
            readers=(2,),
            rounds=1,
            binding_rounds=1,
            reading_rounds=1,
            repeats=1,
            seconds=0.02,
            results={"large": 3, "small": 8},
            ranks=2,
            node_bytes=8 << 20,
            node_rounds=1,
        )
    summary = (
        "Each time is the minimum of at least "
        f"{min(plan.rounds * plan.repeats, plan.binding_rounds, plan.node_rounds)} runs. Each round runs every pool "
        "once, in its own process."
    )
    measures = {name: lambda name=name: measure(name, plan) for name in MEASURES["shm"] if name != "node"}
    return measures | {"node": lambda: [node(plan)]}, summary


def scatter_measures(folder: Path, *, quick: bool) -> tuple[dict[str, Callable[[], Sequence[object]]], str]:
    """Return the measures of scatter, and a sentence about their rounds."""
    import accelerate  # noqa: F401 (used in child processes, as above)
    import tensordict  # noqa: F401
    from scatter.cases import Plan, measure
    from scatter.nodes_case import nodes
    from scatter.overlap_case import overlap

    plans = {
        "local": Plan(),
        "gloo": Plan(),
        "peers": Plan(worlds=(4,), rounds={"VLM": 3}),
        "overlap": Plan(worlds=(2,), rounds={"text": 5, "VLM": 3, "nested": 5}, repeats=20),
        "nodes": Plan(worlds=(4,), rounds={"text": 5, "VLM": 2, "many": 5, "nested": 5}, repeats=3),
    }
    if quick:
        plan = Plan(worlds=(2,), rounds={"text": 2, "many": 2, "nested": 2}, repeats=2)
        plans = dict.fromkeys(plans, plan) | {
            "peers": dataclasses.replace(plan, rounds={"text": 2}),
        }
    repeats = min(plan.repeats for plan in plans.values())
    rounds = min(min(plan.rounds.values()) for plan in plans.values())
    summary = (
        "Each round times every library several times in a row in the same processes, after one untimed call. "
        f"Each time is the minimum of at least {rounds} rounds with at least {repeats} calls each (one call for "
        "object collectives and other packages). A wait is the mean of a round and the minimum of all rounds."
    )
    measures: dict[str, Callable[[], Sequence[object]]] = {
        name: lambda name=name: measure(name, plans[name]) for name in ("local", "gloo", "peers")
    }
    measures |= {
        name: lambda name=name, take=take: [take(plans[name])]
        for name, take in {"overlap": overlap, "nodes": nodes}.items()
    }
    return {name: measures[name] for name in MEASURES["scatter"]}, summary


def rtensor_measures(folder: Path, *, quick: bool) -> tuple[dict[str, Callable[[], Sequence[object]]], str]:
    """Return the measures of remote tensors, and a sentence about their rounds."""
    # Used in child processes, as above.
    for package in ("aiohttp", "flask", "grpc", "orjson", "pyarrow.flight", "ray", "zmq"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"no {package}")
    from rtensor import cases, drains_case

    plan = cases.Plan()
    if quick:
        plan = cases.Plan(
            rounds=1,
            repeats=1,
            cases=("64 KB", "4 MB", "256 × 64 KB"),
            contestants=("AReaL", "pyzmq"),
            fetches=10,
            seconds=5.0,
            drained=(10**4, 10**3),
        )
    summary = (
        f"Each time is the minimum of {plan.rounds} rounds. Each round runs every library in its own processes: "
        f"{plan.repeats} times in a row for up to 16 MB in total, once for more."
    )
    fetches = ("sockets", "transports", "ray")
    measures: dict[str, Callable[[], Sequence[object]]] = {
        name: lambda name=name: [cases.fetches(name, plan)] for name in fetches
    }
    measures |= {
        name: lambda take=take: [take(plan)]
        for name, take in {
            "beside": cases.beside,
            "drains": drains_case.drains,
        }.items()
    }
    return measures, summary


PARTS = {
    "packing": packing_measures,
    "checkpoint": checkpoint_measures,
    "shm": shm_measures,
    "scatter": scatter_measures,
    "rtensor": rtensor_measures,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Bench tundish against its peers.")
    parser.add_argument("--quick", action="store_true", help="small inputs, few rounds")
    parser.add_argument(
        "--part", choices=tuple(PARTS), help="one part; leaves the other sections of RESULTS.md unchanged"
    )
    parser.add_argument(
        "--only",
        choices=[name for names in MEASURES.values() for name in names],
        help="one measure; prints it and leaves RESULTS.md unchanged",
    )
    options = parser.parse_args()
    parts = [part for part in PARTS if options.part in (None, part)]
    if options.only is not None:
        parts = [part for part in parts if options.only in MEASURES[part]]
        if not parts:
            parser.error(f"{options.only} is not a measure of this part")

    scratch = CHECKOUT / "out"
    scratch.mkdir(exist_ok=True)
    for part in parts:
        try:
            run_part(part, scratch, only=options.only, quick=options.quick)
        except ImportError as error:
            print(f"bench: a peer is missing: {error}", file=sys.stderr)
            print(
                "bench: `make bench` installs the peers and tundish first",
                file=sys.stderr,
            )
            return 1
        except RuntimeError as error:
            print(f"bench: {error}", file=sys.stderr)
            return 1
    return 0


def run_part(part: str, scratch: Path, *, only: str | None, quick: bool) -> None:
    """Run and print one part. A full run also writes RESULTS.md.

    Raises:
        ImportError: A peer is not installed.
        RuntimeError: Outputs differ, or the checkout is not on a disk.
    """
    from measure import describe_machine, file_system
    from report import Section, render, write

    if file_system(scratch) in NOT_A_DISK:
        raise RuntimeError(
            f"{scratch} is on {file_system(scratch)}; run the bench in a checkout on a real disk"
        )
    with tempfile.TemporaryDirectory(dir=scratch, prefix="bench-") as folder:
        measures, summary = PARTS[part](Path(folder), quick=quick)
        machine = describe_machine(Path(folder), PACKAGES[part])
        sections: list[Section] = []
        for name, measure in measures.items():
            if only in (None, name):
                print(f"bench: {part}, {name} …", file=sys.stderr, flush=True)
                sections += measure()
    rendered = render(part, sections, machine, summary)
    print(rendered)
    if not quick and only is None:
        write(RESULTS, part, rendered)
        print(f"bench: wrote {RESULTS}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
