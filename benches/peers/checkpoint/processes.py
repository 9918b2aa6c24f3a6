"""Starts one process for each rank, and measures their memory from outside.

The memory of a run is the memory of its processes and their children that no file on a disk backs. Shared memory counts
once. Memory from before the first save is subtracted.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measure import family

__all__ = ["run_ranks"]

CHILD = Path(__file__).with_name("child.py")
# To count the pages of a process holds it up, and what a save takes it keeps for the next one.
_SAMPLING_SECONDS = 0.05
# A process that takes longer hangs.
_LONGEST_SECONDS = 300.0


def run_ranks(request: Mapping[str, Any], *, threads: int) -> dict[str, Any]:
    """Run `request` on `request["world"]` ranks of `threads` threads; the first one's reply.

    `memory` is added: the most bytes that the first save took beyond what was held before.

    Raises RuntimeError, with the end of what was said, where a rank fails.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryFile("w+") as said:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(CHILD), json.dumps(request)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=said,
                text=True,
                # A group of its own, so that its children can be killed with it.
                start_new_session=True,
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(request["world"]),
                    "LOCAL_WORLD_SIZE": str(request["world"]),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": str(threads),
                    # A peer has torch import a package that says it is old.
                    "PYTHONWARNINGS": "ignore::FutureWarning",
                },
            )
            for rank in range(request["world"])
        ]
        try:
            return _watch(ranks)
        except Exception as error:
            said.seek(0)
            raise RuntimeError(f"{request['contestant']}: {error}\n{said.read()[-3000:]}") from error
        finally:
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
                with rank:
                    # Its pipes are closed, and it is waited for.
                    pass


def _watch(ranks: list[subprocess.Popen[str]]) -> dict[str, Any]:
    first = ranks[0]
    assert first.stdin is not None and first.stdout is not None
    _expect(first, "ready")
    before = peak = _memory_of(ranks)
    first.stdin.write("go\n")
    first.stdin.flush()
    while not select.select([first.stdout], [], [], _SAMPLING_SECONDS)[0]:
        peak = max(peak, _memory_of(ranks))
    _expect(first, "warm")
    reply: dict[str, Any] = json.loads(_line(first))
    for rank in ranks:
        if rank.wait(_LONGEST_SECONDS):
            raise RuntimeError(f"a rank ended with {rank.returncode}")
    return {**reply, "memory": peak - before}


def _expect(process: subprocess.Popen[str], word: str) -> None:
    line = _line(process)
    if line.strip() != word:
        raise RuntimeError(f"it said {line!r} and not {word!r}")


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    until = time.monotonic() + _LONGEST_SECONDS
    # Its children may hold the pipe open when it is gone.
    while not select.select([process.stdout], [], [], 1.0)[0]:
        if time.monotonic() > until:
            raise RuntimeError(f"nothing was heard of it for {_LONGEST_SECONDS:g} s")
        if process.poll():
            raise RuntimeError(f"it ended with {process.returncode}")
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"it ended with {process.wait()}")
    return line


def _memory_of(ranks: list[subprocess.Popen[str]]) -> int:
    return sum(_own_memory(process) for rank in ranks for process in family(rank.pid))


def _own_memory(process: int) -> int:
    """Bytes that no file stands behind; what several processes share is divided among them."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines[1:]}
    return sizes["Pss_Anon"] + sizes["Pss_Shmem"]
