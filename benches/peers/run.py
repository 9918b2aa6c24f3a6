"""Side-by-side bench: tundish against what people use today.

    python benches/peers/run.py                 everything; writes benches/RESULTS.md
    python benches/peers/run.py --part NAME     one part; writes its section of benches/RESULTS.md
    python benches/peers/run.py --only NAME     one measure, printed
    python benches/peers/run.py --quick         a smoke test on small inputs, printed

Owns the command line and the scratch folder on the checkout's disk, which is removed at the end. Always
holds: a missing peer, or two outputs that differ, ends the run with a status other than 0 and leaves what RESULTS.md
says of that part as it was; only a full run of a part writes it, so that every figure of a part is from one run. An
unmet target is written down, not hidden and not an error.
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
    "packing": ("plan", "published", "shuffle", "lookup", "curve"),
    "checkpoint": ("large", "small", "worlds"),
    "shm": ("tasks", "results", "binding", "readers", "node"),
    "scatter": ("local", "gloo", "peers", "tree", "overlap", "worlds", "nodes"),
    "rtensor": ("sockets", "transports", "ray", "stores", "memory", "beside", "drains", "handles"),
}
PACKAGES = {
    "packing": ("tundish", "numpy", "torch", "numba", "megatron-core"),
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
    """The measures of packing, and what is said of their rounds."""
    from packing.cases import Scale, hard_plan, published, shuffle
    from packing.curve_case import curve
    from packing.lookup_case import lookup

    scale = Scale(
        samples=(10**4, 10**5) if quick else (10**5, 10**6, 10**7),
        curve_samples=(10**4, 10**5) if quick else (10**5, 10**6, 10**7, 10**8),
        least_rounds=2 if quick else 5,
        batches=4 if quick else 50,
        folder=folder,
    )
    said = f"Each time is the least of at least {scale.least_rounds} rounds; in a round every contestant runs once."
    return {
        "plan": lambda: [hard_plan(scale)],
        "published": lambda: [published(scale)],
        "shuffle": lambda: [shuffle(scale)],
        "lookup": lambda: [lookup(scale)],
        "curve": lambda: curve(scale),
    }, said


def checkpoint_measures(
    folder: Path, *, quick: bool
) -> tuple[dict[str, Callable[[], Sequence[object]]], str]:
    """The measures of saving, and what is said of their rounds."""
    import nvidia_resiliency_ext  # noqa: F401 (imported in other processes, where a missing one would cost minutes)
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
            turns=1,
            judges=False,
        )
    said = (
        f"Each time is the least of {plan.rounds * plan.saves}: in each of {plan.rounds} rounds every way saves "
        f"{plan.saves} times, in a fresh process for each rank, after a save that has everything warm."
    )
    return {name: lambda name=name: measure(name, plan) for name in MEASURES["checkpoint"]}, said


def shm_measures(folder: Path, *, quick: bool) -> tuple[dict[str, Callable[[], Sequence[object]]], str]:
    """The measures of pools and of arrays that ranks share, and what is said of their rounds."""
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
            judges=False,
        )
    said = (
        f"Each time is the least of at least {min(plan.rounds * plan.repeats, plan.binding_rounds, plan.node_rounds)}; "
        "in a round every pool runs once, in a process of its own."
    )
    measures = {name: lambda name=name: measure(name, plan) for name in MEASURES["shm"] if name != "node"}
    return measures | {"node": lambda: [node(plan)]}, said


def scatter_measures(folder: Path, *, quick: bool) -> tuple[dict[str, Callable[[], Sequence[object]]], str]:
    """The measures of scatter, and what is said of their rounds."""
    import accelerate  # noqa: F401 (imported in other processes, as above)
    import tensordict  # noqa: F401
    from scatter.cases import Plan, measure
    from scatter.nodes_case import nodes
    from scatter.overlap_case import overlap
    from scatter.tree_case import tree

    plans = {
        "local": Plan(),
        "gloo": Plan(),
        "peers": Plan(worlds=(4,), rounds={"VLM": 3}),
        "tree": Plan(rounds={"deep": 10, "many": 10}, repeats=20),
        "overlap": Plan(worlds=(2,), rounds={"text": 5, "VLM": 3, "nested": 5}, repeats=20),
        "worlds": Plan(worlds=(2, 4, 8, 16), rounds={"text": 5, "small VLM": 3}),
        "nodes": Plan(worlds=(4,), rounds={"text": 5, "VLM": 2, "many": 5, "nested": 5}, repeats=3),
    }
    if quick:
        plan = Plan(worlds=(2,), rounds={"text": 2, "many": 2, "nested": 2}, repeats=2, judges=False)
        plans = dict.fromkeys(plans, plan) | {
            "peers": dataclasses.replace(plan, rounds={"text": 2}),
            "tree": dataclasses.replace(plan, rounds={"deep": 2}),
        }
    repeats = min(plan.repeats for plan in plans.values())
    rounds = min(min(plan.rounds.values()) for plan in plans.values())
    said = (
        "In a round every way is timed a few times in a row, in the same processes, after a time that does not count. "
        f"Each time is the least of {rounds} rounds or more with {repeats} or more in each (of objects and of the "
        "packages with one in each); a wait is the mean of a round, and the least of all rounds."
    )
    measures: dict[str, Callable[[], Sequence[object]]] = {
        name: lambda name=name: measure(name, plans[name]) for name in ("local", "gloo", "peers", "worlds")
    }
    measures |= {
        name: lambda name=name, take=take: [take(plans[name])]
        for name, take in {"tree": tree, "overlap": overlap, "nodes": nodes}.items()
    }
    return {name: measures[name] for name in MEASURES["scatter"]}, said


def rtensor_measures(folder: Path, *, quick: bool) -> tuple[dict[str, Callable[[], Sequence[object]]], str]:
    """The measures of remote tensors, and what is said of their rounds."""
    # Imported in other processes, as above.
    for package in ("aiohttp", "flask", "grpc", "orjson", "pyarrow.flight", "ray", "zmq"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"no {package}")
    from rtensor import alone_cases, cases

    plan = cases.Plan()
    if quick:
        plan = cases.Plan(
            rounds=1,
            repeats=1,
            cases=("64 KB", "4 MB", "256 × 64 KB"),
            ways=("AReaL", "pyzmq"),
            fetches=10,
            seconds=5.0,
            judges=False,
        )
    said = (
        f"Each time is the least of {plan.rounds} rounds; in a round every way fetches or stores what is small (16 MB "
        f"in all, at most) {plan.repeats} times in a row, and does everything else once, each in processes of its own."
    )
    fetches = ("sockets", "transports", "ray")
    measures: dict[str, Callable[[], Sequence[object]]] = {
        name: lambda name=name: [cases.fetches(name, plan)] for name in fetches
    }
    measures |= {
        name: lambda take=take: [take(plan)]
        for name, take in {
            "stores": cases.stores,
            "memory": cases.memory,
            "beside": cases.beside,
            "drains": alone_cases.drains,
            "handles": alone_cases.handles,
        }.items()
    }
    return measures, said


PARTS = {
    "packing": packing_measures,
    "checkpoint": checkpoint_measures,
    "shm": shm_measures,
    "scatter": scatter_measures,
    "rtensor": rtensor_measures,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Bench tundish against its peers.")
    parser.add_argument("--quick", action="store_true", help="small inputs, few rounds, no targets")
    parser.add_argument(
        "--part", choices=tuple(PARTS), help="one part; the other sections of RESULTS.md stay"
    )
    parser.add_argument(
        "--only",
        choices=[name for names in MEASURES.values() for name in names],
        help="one measure; prints and leaves RESULTS.md alone",
    )
    options = parser.parse_args()
    parts = [part for part in PARTS if options.part in (None, part)]
    if options.only is not None:
        parts = [part for part in parts if options.only in MEASURES[part]]
        if not parts:
            parser.error(f"{options.only} is not of this part")

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
    """Run and print one part; a full run is written down.

    Raises ImportError without a peer, RuntimeError where outputs differ or nothing can be measured.
    """
    from measure import describe_machine, file_system
    from report import Section, render, write

    if file_system(scratch) in NOT_A_DISK:
        raise RuntimeError(f"{scratch} is on {file_system(scratch)}; publishing is measured on a real disk")
    with tempfile.TemporaryDirectory(dir=scratch, prefix="bench-") as folder:
        measures, said = PARTS[part](Path(folder), quick=quick)
        machine = describe_machine(Path(folder), PACKAGES[part])
        sections: list[Section] = []
        for name, measure in measures.items():
            if only in (None, name):
                print(f"bench: {part}, {name} …", file=sys.stderr, flush=True)
                sections += measure()
    rendered = render(part, sections, machine, said)
    print(rendered)
    if not quick and only is None:
        write(RESULTS, part, rendered)
        print(f"bench: wrote {RESULTS}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
