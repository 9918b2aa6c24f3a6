"""One pool in a process of its own.

    python benches/peers/shm/child.py REQUEST

Takes a JSON request from `cases` and prints one line of JSON. Spawned workers import this module and their memory is
measured, so it imports only what they need.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    import numpy as np

    from shm import floors, memory, timing

    measures = {
        "tasks": timing.empty_tasks,
        "results": timing.results,
        "binding": timing.binding,
        "readers": memory.readers,
        "bare workers": memory.bare_workers,
        "floors": floors.floors,
    }
    request = json.loads(sys.argv[1])
    array = np.arange(request["array_bytes"] // 8, dtype=np.int64)
    reply = {name: measures[name](request, array) for name in request["measures"]}
    print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
