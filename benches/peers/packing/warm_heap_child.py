"""Times tundish and the two numpy forms in a process whose allocator returns no memory to the system.

Takes the samples, the rounds and the tokens a pack as arguments, compares the plans in full, and prints one line of
JSON: the least seconds of each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import Contestant, race

import tundish as td
from packing import numpy_forms
from packing.distributions import TEXT, draw_lengths, draw_order
from packing.equal_outputs import assert_all_equal, sums


def main() -> None:
    samples, rounds, max_length = (int(argument) for argument in sys.argv[1:])
    lengths, order = draw_lengths(samples, TEXT), draw_order(samples)

    def pack() -> td.PackPlan:
        return td.pack(lengths, max_length, order=order, threads=1, progress=False)

    def loop() -> numpy_forms.Arrays:
        return numpy_forms.chunked(lengths, order, max_length)

    def vectorised() -> numpy_forms.Arrays:
        return numpy_forms.vectorised(lengths, order, max_length)

    contestants = {
        "tundish": Contestant(pack, lambda plan: sums(plan.arrays())),
        "loop": Contestant(loop, sums),
        "vectorised": Contestant(vectorised, sums),
    }
    seconds = race(contestants, rounds)
    expected = vectorised()
    assert_all_equal("memory kept", pack().arrays(), expected)
    assert_all_equal("memory kept, loop", loop(), expected)
    print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
