"""One rank that saves with one contestant, in a process of its own.

    python benches/peers/checkpoint/child.py REQUEST

REQUEST is JSON, made in `processes`. The first rank prints "ready", waits for a line, saves once to warm up, and prints
"warm". Then it saves `rounds` times with a clock, and prints one line of JSON. Before each timed save it runs the
contestants `beside`, whose stalls are timed. With `loads` it loads each timed save.

The tensors change as soon as a save returns. The last save of each process is read back and compared bit for bit. Each
save is removed, and the disk is idle, before the next one begins.
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
from checkpoint.contestants import CONTESTANTS, Handle, Saver, State
from checkpoint.state import WORKLOADS, Changes, differing, make_state, sharded


class Rank:
    """Saves of one contestant on one rank."""

    def __init__(self, contestant: str, root: Path, state: State, world: int, *, loads: bool) -> None:
        self._contestant = CONTESTANTS[contestant]
        self.world = world
        self.state = state
        self._root = root
        self._changes = Changes(self.state)
        self.saver = self._contestant.open(self._root, self.state)
        self._number = 0
        # What `load` fills: copies have memory that was written to.
        self._target = {name: tensor.clone() for name, tensor in state.items()} if loads else {}

    def folder(self) -> Path:
        """Where the next save goes: the name is tundish's, the others take any."""
        self._number += 1
        kind = "dcp" if self._contestant.arguments.get("kind") == "dcp" else "hf"
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
        """Seconds until the save of another contestant returns, from which nothing goes to the disk."""
        self.together()
        begin = time.perf_counter()
        floor.save(self._root, self.state)
        stall = time.perf_counter() - begin
        self.together()
        time.sleep(0.1)
        return stall

    def wrongly_copied(self, floor: Saver) -> list[str]:
        """The names of what the last save of another contestant did not copy as it is."""
        return differing(floor.read(self._root, self.state), self.state)

    def open_beside(self, contestant: str) -> Saver:
        """Another contestant, warm."""
        floor = CONTESTANTS[contestant].open(self._root, self.state)
        self.beside(floor)
        return floor

    def change(self, handle: Handle) -> None:
        """Do the next training step, which changes the tensors."""
        before = getattr(handle, "before_changes", None)
        if before is not None:
            before()
        self._changes.toggle()

    def evict(self, folder: Path) -> None:
        """Let the next read of a save come from the disk and not from memory."""
        self.together()
        for path in folder.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
        self.together()

    def load(self, folder: Path) -> dict[str, float]:
        """Load a save into tensors that have their memory: seconds from the disk, and from the page cache."""
        seconds = {}
        for case in ("cold", "warm"):
            if case == "cold":
                self.evict(folder)
            self.together()
            begin = time.perf_counter()
            self.saver.load(folder, self._target)
            self.together()
            seconds[case] = time.perf_counter() - begin
        return seconds

    def compare(self, folder: Path) -> list[str]:
        """Read a save back; the names that differ."""
        self.evict(folder)
        return differing(self.saver.read(folder, self.state), self.state)

    def remove(self, folder: Path) -> None:
        """Take a save off the disk, and wait until the disk is at rest."""
        self.together()
        if int(os.environ.get("RANK", "0")) == 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.sync()
            time.sleep(0.1)
        self.together()


def opened(request: dict[str, Any]) -> Rank:
    """The contestant that is asked for, and what it saves."""
    if request["world"] > 1 or CONTESTANTS[request["contestant"]].needs_group:
        dist.init_process_group("gloo")
    state: State = make_state(WORKLOADS[request["workload"]])
    if request["sharded"]:
        state = sharded(state)
    return Rank(request["contestant"], Path(request["root"]), state, request["world"], loads=request["loads"])


def main() -> None:
    request = json.loads(sys.argv[1])
    is_first = int(os.environ.get("RANK", "0")) == 0
    rank = opened(request)
    if is_first:
        print("ready", flush=True)
        sys.stdin.readline()
    rank.remove(rank.timed()[2])
    if is_first:
        print("warm", flush=True)
    floors = {contestant: rank.open_beside(contestant) for contestant in request["beside"]}
    reply: dict[str, Any] = {"stall": [], "durable": [], "differing": [], "lost": {}, "loads": []}
    reply["beside"] = {contestant: [] for contestant in floors}

    def save(number: int) -> None:
        for contestant in floors:
            reply["beside"][contestant].append(rank.beside(floors[contestant]))
        stall, durable, folder = rank.timed()
        reply["stall"].append(stall)
        reply["durable"].append(durable)
        if number == request["rounds"] - 1 and request["compare"]:
            reply["differing"] += rank.compare(folder)
            reply["differing"] += [
                name for contestant in floors for name in rank.wrongly_copied(floors[contestant])
            ]
        if request["loads"]:
            reply["loads"].append(rank.load(folder))
        rank.remove(folder)

    for number in range(request["rounds"]):
        save(number)
    # Training has their memory.
    floors.clear()
    for name in request["loops"]:
        reply["lost"][name] = [
            training.lost(training.LOOPS[name], rank) for _ in range(min(request["rounds"], 2))
        ]
    rank.saver.close()
    if rank.world > 1:
        replies: list[Any] = [None] * rank.world
        dist.all_gather_object(replies, reply)
        # All ranks wait for the last one, so its time counts.
        reply["stall"] = [max(each) for each in zip(*(other["stall"] for other in replies), strict=True)]
        for contestant in reply["beside"]:
            each_rank = zip(*(other["beside"][contestant] for other in replies), strict=True)
            reply["beside"][contestant] = [max(each) for each in each_rank]
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
