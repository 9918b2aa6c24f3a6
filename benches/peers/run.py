"""Side-by-side bench: tundish against what people use today.

    python benches/peers/run.py              everything; writes benches/RESULTS.md
    python benches/peers/run.py --only NAME  one measure, printed
    python benches/peers/run.py --quick      a smoke test on small inputs, printed

Owns the command line and the scratch folder on the checkout's disk, which is removed at the end. Always
holds: a missing peer, or two outputs that differ, ends the run with a status other than 0 and leaves
RESULTS.md as it was; only a full run writes it, so that every figure in it is from one run. An unmet target
is written down, not hidden and not an error.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
RESULTS = CHECKOUT / "benches" / "RESULTS.md"
NOT_A_DISK = ("tmpfs", "ramfs")
MEASURES = ("plan", "published", "shuffle", "lookup", "curve")


def main() -> int:
    parser = argparse.ArgumentParser(description="Bench tundish against its peers.")
    parser.add_argument("--quick", action="store_true", help="small inputs, few rounds, no targets")
    parser.add_argument("--only", choices=MEASURES, help="one measure; prints and leaves RESULTS.md alone")
    options = parser.parse_args()

    try:
        from cases import Scale, hard_plan, published, shuffle
        from curve_case import curve
        from lookup_case import lookup
        from measure import OutputsDiffer, describe_machine, file_system
        from report import render, write
    except ImportError as error:
        print(f"bench: a peer is missing: {error}", file=sys.stderr)
        print(
            "bench: install benches/peers/requirements.txt and tundish, or run `make bench`", file=sys.stderr
        )
        return 1

    scratch = CHECKOUT / "out"
    scratch.mkdir(exist_ok=True)
    if file_system(scratch) in NOT_A_DISK:
        print(
            f"bench: {scratch} is on {file_system(scratch)}; publishing is measured on a real disk",
            file=sys.stderr,
        )
        return 1

    def progress(name: str) -> None:
        print(f"bench: {name} …", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(dir=scratch, prefix="bench-") as folder:
        scale = Scale(
            samples=(10**4, 10**5) if options.quick else (10**5, 10**6, 10**7),
            curve_samples=(10**4, 10**5) if options.quick else (10**5, 10**6, 10**7, 10**8),
            least_rounds=2 if options.quick else 5,
            batches=4 if options.quick else 50,
            folder=Path(folder),
        )
        machine = describe_machine(Path(folder))
        sections = []
        try:
            for name, measure in (
                ("plan", lambda: [hard_plan(scale)]),
                ("published", lambda: [published(scale)]),
                ("shuffle", lambda: [shuffle(scale)]),
                ("lookup", lambda: [lookup(scale)]),
                ("curve", lambda: list(curve(scale))),
            ):
                if options.only in (None, name):
                    progress(name)
                    sections += measure()
        except OutputsDiffer as error:
            print(f"bench: {error}", file=sys.stderr)
            return 1

    rounds = f"Each time is the least of at least {scale.least_rounds} rounds; in a round every contestant runs once."
    rendered = render(sections, machine, rounds)
    print(rendered)
    if not options.quick and options.only is None:
        write(RESULTS, rendered)
        progress(f"wrote {RESULTS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
