"""One rank that saves in one way, in a process of its own.

    python benches/peers/checkpoint/child.py REQUEST

Owns nothing but its reply. Takes a JSON request (made in `processes`), says "ready" on the first rank, waits for a
line, saves once to have everything warm, says "warm", saves `rounds` times with a clock, each time after the ways
`beside`, of which only the stall counts, and prints one line of JSON.
What always holds: the tensors are changed as soon as a save returns; what the last save of each process wrote is read
back and compared bit for bit; what is on the disk is removed, and the disk at rest, before the next save begins.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist

from checkpoint import training
from checkpoint.contestants import WAYS, Handle, Saver
from checkpoint.state import WORKLOADS, Changes, differing, make_state, sharded


class Rank:
    """Saves of one way on one rank."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._way = WAYS[request["way"]]
        self.world = request["world"]
        if self.world > 1 or self._way.needs_group:
            dist.init_process_group("gloo")
        state = make_state(WORKLOADS[request["workload"]])
        self.state = sharded(state) if request["sharded"] else state
        self._root = Path(request["root"])
        self._changes = Changes(self.state)
        self.saver = self._way.open(self._root, self.state)
        self._number = 0

    def folder(self) -> Path:
        """Where the next save goes: the name is tundish's, the others take any."""
        self._number += 1
        kind = "dcp" if self._way.arguments.get("kind") == "dcp" else "hf"
        return self._root / f"{kind}-{self._number}"

    def together(self) -> None:
        """Wait for the other rank."""
        if self.world > 1:
            dist.barrier()

    def timed(self) -> tuple[float, float, Path]:
        """Save once: seconds until it returns, seconds until it is durable, and where."""
        folder = self.folder()
        self.together()
        begin = time.perf_counter()
        handle = self.saver.save(folder, self.state)
        stall = time.perf_counter() - begin
        self.change(handle)
        handle.wait()
        durable = time.perf_counter() - begin
        self._changes.toggle()
        self.together()
        return stall, durable, folder

    def beside(self, floor: Saver) -> float:
        """Seconds until the save of another way returns, from which nothing goes to the disk."""
        self.together()
        begin = time.perf_counter()
        floor.save(self._root, self.state)
        stall = time.perf_counter() - begin
        self.together()
        time.sleep(0.1)
        return stall

    def wrongly_copied(self, floor: Saver) -> list[str]:
        """The names of what the last save of another way did not copy as it is."""
        return differing(floor.read(self._root, self.state), self.state)

    def open_beside(self, way: str) -> Saver:
        """Another way, warm."""
        floor = WAYS[way].open(self._root, self.state)
        self.beside(floor)
        return floor

    def change(self, handle: Handle) -> None:
        """What training does next: step, and change its tensors."""
        before = getattr(handle, "before_changes", None)
        if before is not None:
            before()
        self._changes.toggle()

    def compare(self, folder: Path) -> list[str]:
        """Read a save back; the names that differ."""
        # From the disk and not from memory.
        for path in folder.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
        return differing(self.saver.read(folder, self.state), self.state)

    def remove(self, folder: Path) -> None:
        """Take a save off the disk, and wait until the disk is at rest."""
        self.together()
        if int(os.environ.get("RANK", "0")) == 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.sync()
            time.sleep(0.1)
        self.together()


def main() -> None:
    request = json.loads(sys.argv[1])
    is_first = int(os.environ.get("RANK", "0")) == 0
    rank = Rank(request)
    if is_first:
        print("ready", flush=True)
        sys.stdin.readline()
    rank.remove(rank.timed()[2])
    if is_first:
        print("warm", flush=True)
    floors = {way: rank.open_beside(way) for way in request["beside"]}
    reply: dict[str, Any] = {"stall": [], "durable": [], "differing": [], "lost": {}}
    reply["beside"] = {way: [] for way in floors}
    for number in range(request["rounds"]):
        for way in floors:
            reply["beside"][way].append(rank.beside(floors[way]))
        stall, durable, folder = rank.timed()
        reply["stall"].append(stall)
        reply["durable"].append(durable)
        if number == request["rounds"] - 1 and request["compare"]:
            reply["differing"] = rank.compare(folder)
            reply["differing"] += [name for way in floors for name in rank.wrongly_copied(floors[way])]
        rank.remove(folder)
    # Training has their memory.
    floors.clear()
    for name in request["loops"]:
        reply["lost"][name] = [training.lost(training.LOOPS[name], rank) for _ in range(request["rounds"])]
    rank.saver.close()
    if rank.world > 1:
        replies: list[Any] = [None] * rank.world
        dist.all_gather_object(replies, reply)
        # What all wait for is what the last one needs.
        reply["stall"] = [max(each) for each in zip(*(other["stall"] for other in replies), strict=True)]
        for way in reply["beside"]:
            each_rank = zip(*(other["beside"][way] for other in replies), strict=True)
            reply["beside"][way] = [max(each) for each in each_rank]
        reply["durable"] = [max(each) for each in zip(*(other["durable"] for other in replies), strict=True)]
        reply["differing"] = [name for other in replies for name in other["differing"]]
    if dist.is_initialized():
        dist.destroy_process_group()
        # A thread of torch's gloo frees what was gathered once it gets hold of the interpreter; where that ends before,
        # it takes the process along ("terminate called without an active exception").
        time.sleep(0.1)
    if is_first:
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
