"""An error on one rank before a save is staged: all ranks raise, nothing is left, the next save succeeds."""

from __future__ import annotations

import gc
import itertools
import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.distributed.rank_processes import Job, Line, outcome
from support.waiting import PATIENCE

MIB = 1 << 20
FINE = ("", "", None)


class Breaking:
    """A rank that saves, and fails as it is told."""

    def __init__(self, line: Line, root: Path) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        from tundish.checkpoint import Checkpointer

        self._line = line
        self._mesh = init_device_mesh("cpu", (2,))
        self._failures: list[BaseException] = []
        self._checkpointer = Checkpointer(root, on_failure=self._failures.append, timeout=PATIENCE / 2)

    def save(self, kind: str, step: int, staging: str, trouble: str) -> tuple[Any, Any, Any]:
        """The outcomes of the call and of the future, and the errors that the failure policy got."""
        from tundish._native import trim_staging

        state = state_of(self._mesh)
        if trouble == "refused":
            state["plain.3"] = state["plain.3"].to("meta")
        if trouble == "freed":
            threading.Thread(target=self._free, args=(state,)).start()
        saves: list[Any] = []
        limits = resource.getrlimit(resource.RLIMIT_AS)
        if trouble == "no memory":
            # Nor what an earlier save left for this one.
            gc.collect()
            trim_staging()
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
            resource.setrlimit(resource.RLIMIT_AS, (mapped + 12 * MIB, limits[1]))
        try:
            called = outcome(lambda: saves.append(self._begin(kind, step, staging, state)))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        came_to = outcome(lambda: saves[0].result(PATIENCE)) if saves else None
        self._checkpointer.wait(PATIENCE)
        told, self._failures[:] = [type(one).__name__ for one in self._failures], []
        return called, came_to, told

    def _begin(self, kind: str, step: int, staging: str, state: dict[str, Any]) -> Any:
        arguments: dict[str, Any] = {"shard_bytes": 40 * MIB} if kind == "hf" else {}
        if staging == "lazy":
            parameters = [torch.nn.Parameter(local_of(one), requires_grad=False) for one in state.values()]
            arguments |= {"staging": "lazy", "optimizer": torch.optim.SGD(parameters)}
        return getattr(self._checkpointer, f"save_{kind}")(step, state, **arguments)

    def _free(self, state: dict[str, Any]) -> None:
        """Free tensors between plan and staging: after what was planned has its part of the budget."""
        while self._checkpointer.stats()["staging_in_use_bytes"] == 0:
            time.sleep(0.001)
        for tensor in state.values():
            local_of(tensor).untyped_storage().resize_(0)
        self._line.say("freed")

    def discard_after(self, step: int) -> tuple[str, str, Any]:
        return outcome(lambda: self._checkpointer.discard_after(step))

    def left(self) -> list[str]:
        """The resources that this rank still holds."""
        from tundish._native import staging_stats

        stats = self._checkpointer.stats()
        held = [
            staging_stats()["in_use"],
            *(stats[name] for name in stats if "in_use" in name or "under_way" in name),
        ]
        threads = {thread.name for thread in threading.enumerate() if "tundish" in thread.name}
        return [repr(one) for one in held if one] + sorted(
            threads - {"tundish-hf-finalize", "tundish-dcp-finalize", "tundish-vote"}
        )

    def close(self) -> None:
        self._checkpointer.close()


def local_of(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def state_of(mesh: Any) -> dict[str, Any]:
    """Of 64 MiB each rank writes about half."""
    from torch.distributed.tensor import DTensor, Shard

    part = torch.full((1024, 4096), mesh.get_rank() + 0.25)
    return {
        "spread": DTensor.from_local(part, mesh, [Shard(0)], run_check=False),
        **{f"plain.{number}": torch.full((MIB,), number + 0.5) for number in range(8)},
    }


def breaking(rank: int, line: Line) -> None:
    this = Breaking(line, *line.hear())
    while (order := line.hear()) is not None:
        name, *given = order
        line.say(getattr(this, name)(*given))


def each(job: Job, *order: Any) -> list[Any]:
    job.tell_all(order)
    return [said for (said,) in job.hear_all()]


def save(job: Job, failing: int, kind: str, step: int, staging: str, trouble: str) -> list[Any]:
    """A save with `trouble` on one rank; what all say of it."""
    job.tell(failing, ("save", kind, step, staging, trouble))
    if trouble == "freed":
        # It waits for the other in the vote that stands before staging.
        assert job.hear(failing) == ("freed",)
    job.tell(1 - failing, ("save", kind, step, staging, ""))
    return [said for (said,) in job.hear_all()]


def assert_nothing_left(job: Job, root: Path, expected: list[str]) -> None:
    assert each(job, "left") == [[], []]
    names = {path.name for path in root.iterdir()}
    assert names - {".owner", "hf-latest", "dcp-latest"} == set(expected)


TROUBLES = {
    "refused": ("InvalidInputError", "'plain.3' is on the meta device"),
    "no memory": ("OutOfMemoryError", "give the process more memory"),
    "freed": ("InvalidInputError", "has no values: its storage of 0 bytes was freed"),
}


def assert_told(said: list[Any], failing: int, trouble: str) -> None:
    """The rank that failed raises what it failed with, once, the other one that it did, and which."""
    kind, text = TROUBLES[trouble]
    raised = []
    for called, came_to, told in said:
        # An error that the call raised is not reported again; otherwise the future and the policy report it.
        raised.append(came_to if called == FINE else called)
        assert (came_to is None) == (called != FINE)
        assert told == ([came_to[0]] if called == FINE else []), said
    assert raised[failing][0] == kind
    assert text in raised[failing][1]
    assert "tensor 0" not in raised[failing][1]
    assert raised[1 - failing][0] == "PeerFailedError"
    assert raised[1 - failing][1].endswith(f"rank {failing} failed with {kind}: {raised[failing][1]}")
    assert raised[1 - failing][2] == failing


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_an_error_on_one_rank_fails_all_and_leaves_nothing(
    kind: str, failing: int, path_in_memory: Path
) -> None:
    root = path_in_memory / "root"
    with Job(breaking, 2, path_in_memory) as job:
        job.tell_all((root,))
        published: list[str] = []
        step = 0
        # Parts that no other rank waits for are copied from the reservation on: freed after it, they may be saved.
        troubles = [trouble for trouble in TROUBLES if kind == "hf" or trouble != "freed"]
        for staging, trouble in itertools.product(("eager", "lazy"), troubles):
            step += 1
            said = save(job, failing, kind, step, staging, trouble)
            assert_told(said, failing, trouble)
            assert_nothing_left(job, root, published)
            step += 1
            said = save(job, failing, kind, step, staging, "")
            assert said == [(FINE, FINE, [])] * 2
            published.append(f"{kind}-{step}")
            assert_nothing_left(job, root, published)
        each(job, "close")
        job.tell_all()
        job.expect_end()


def test_steps_that_ranks_do_not_agree_on_are_not_set_aside(path_in_memory: Path) -> None:
    root = path_in_memory / "root"
    with Job(breaking, 2, path_in_memory) as job:
        job.tell_all((root,))
        for step in (1, 2, 3):
            assert save(job, 0, "dcp", step, "eager", "") == [(FINE, FINE, [])] * 2
        for rank, step in enumerate((1, 2)):
            job.tell(rank, ("discard_after", step))
        assert all("discard_after of step" in text for ((_, text, _),) in job.hear_all())
        assert_nothing_left(job, root, ["dcp-1", "dcp-2", "dcp-3"])
        assert each(job, "discard_after", 2) == [FINE, FINE]
        assert not (root / "dcp-3").exists() and (root / "dcp-2").exists()
        each(job, "close")
        job.tell_all()
        job.expect_end()
