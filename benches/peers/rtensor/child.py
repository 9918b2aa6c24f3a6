"""An owner or a consumer of one contestant, in a process of its own.

    python benches/peers/rtensor/child.py

Answers each line of JSON from its parent with one line. Only answers go to standard output: a library's messages go to
standard error. It ends with its parent.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from rtensor.contestants import consumer_class, owner_class
from rtensor.tensors import digest, read


class Child:
    """The requests that a parent can send."""

    def own(self, contestant: str, cases: list[str]) -> str:
        """Serve the tensors of these cases: where."""
        self._owner = owner_class(contestant)(cases)
        place: str = self._owner.place
        return place

    def consume(self, contestant: str, place: str) -> None:
        self._consumer = consumer_class(contestant)(place)
        # A collection of all of torch's objects takes longer than a round.
        gc.collect()
        gc.freeze()

    def fetch(self, case: str) -> list[float]:
        """The seconds until every byte of a case was read, and its digest."""
        gc.collect()
        begin = time.perf_counter()
        tensors = self._consumer.fetch(case)
        read(tensors)
        seconds = time.perf_counter() - begin
        found = digest(tensors)
        del tensors
        self._consumer.forget(case)
        return [seconds, found]

    def beside(self, large: str, small: str, fetches: int, longest: float) -> list[float]:
        """The seconds of so many fetches of a small case while a large one is fetched again and again.

        Fewer where they take longer than `longest` seconds in all.
        """
        is_over = threading.Event()
        begun = threading.Event()

        def fetch_large() -> None:
            while not is_over.is_set():
                begun.set()
                read(self._consumer.fetch(large))
                self._consumer.forget(large)

        thread = threading.Thread(target=fetch_large)
        thread.start()
        begun.wait()
        times = []
        end = time.perf_counter() + longest
        while len(times) < fetches and time.perf_counter() < end:
            begin = time.perf_counter()
            read(self._consumer.fetch(small))
            times.append(time.perf_counter() - begin)
            self._consumer.forget(small)
        is_over.set()
        thread.join()
        return times


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    actor = Child()
    for line in sys.stdin:
        what, arguments = json.loads(line)
        method: Callable[..., Any] = getattr(actor, what)
        print(json.dumps(method(*arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main()
    # A library's thread may hang in a call.
    os._exit(0)
