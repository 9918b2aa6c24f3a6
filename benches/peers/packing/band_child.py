"""What the two numpy forms take of each other in a process that gives no memory back.

Takes the samples and the rounds as arguments, and prints one line of JSON: the least seconds of each form.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import Contestant, race

from packing import numpy_forms
from packing.distributions import TEXT, draw_lengths, draw_order


def main() -> None:
    samples, rounds, max_length = (int(argument) for argument in sys.argv[1:])
    lengths, order = draw_lengths(samples, TEXT), draw_order(samples)
    forms = {"loop": numpy_forms.chunked, "vectorised": numpy_forms.vectorised}
    contestants = {
        name: Contestant(
            lambda form=form: form(lengths, order, max_length),  # type: ignore[misc]
            lambda arrays: int(arrays["longest"].sum()),
        )
        for name, form in forms.items()
    }
    print(json.dumps(race(contestants, rounds)), flush=True)


if __name__ == "__main__":
    main()
