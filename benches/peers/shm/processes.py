"""The processes of one run: a pool's parent, or the ranks of a job.

When a run ends, fails or takes too long, all processes of its groups are killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["rank_environments", "run_pool", "run_program", "run_ranks"]

_HERE = Path(__file__).parent
# A run that takes longer has hung.
_LONGEST_SECONDS = 300.0


def run_pool(request: Mapping[str, Any]) -> dict[str, Any]:
    """The reply of child.py; raises RuntimeError with the end of its output if it fails."""
    [reply] = run_program(_HERE / "child.py", request, [{}])
    return reply


def run_ranks(request: Mapping[str, Any], *, ranks: int) -> list[dict[str, Any]]:
    """The replies of node_child.py on so many ranks of one node; RuntimeError where one fails."""
    return run_program(_HERE / "node_child.py", request, rank_environments(ranks))


def rank_environments(ranks: int) -> list[dict[str, str]]:
    """The environment that torchrun gives so many ranks of one node."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        for rank in range(ranks)
    ]


def run_program(
    program: Path,
    request: Mapping[str, Any],
    environments: list[dict[str, str]],
    prefixes: Sequence[Sequence[str]] = (),
) -> list[dict[str, Any]]:
    """The replies of so many processes of one program; raises RuntimeError with the end of its output if one fails.

    `prefixes`: what the command of each begins with: a program that becomes it, as `nice` does.
    """
    with contextlib.ExitStack() as stack:
        files = [
            [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in ("reply", "said")]
            for _ in environments
        ]
        children = [
            subprocess.Popen(
                [*prefix, sys.executable, str(program), json.dumps(request)],
                stdin=subprocess.DEVNULL,
                stdout=reply,
                stderr=said,
                # Its children are in its process group.
                start_new_session=True,
                env={**os.environ, **environment},
            )
            for environment, prefix, (reply, said) in zip(
                environments, prefixes or [()] * len(environments), files, strict=True
            )
        ]
        try:
            _wait(children)
        finally:
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        for child, (_, said) in zip(children, files, strict=True):
            if child.returncode:
                raise RuntimeError(
                    f"{program.name} ended with {child.returncode} for {request}:\n{_text(said)[-3000:]}"
                )
        return [json.loads(_text(reply).splitlines()[-1]) for reply, _ in files]


def _wait(children: list[subprocess.Popen[bytes]]) -> None:
    """Wait until all have ended, one has failed, or the time is over."""
    until = time.monotonic() + _LONGEST_SECONDS
    while any(child.poll() is None for child in children):
        if any(child.poll() for child in children) or time.monotonic() > until:
            return
        time.sleep(0.01)


def _text(file: Any) -> str:
    file.seek(0)
    return file.read()
