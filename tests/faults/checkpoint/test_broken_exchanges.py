"""A rank that gives up in the middle of an exchange: the other one fails at once, and the next save succeeds."""

from __future__ import annotations

import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "distributed"))

from rank_processes import Job, Line, outcome

from tundish.checkpoint import open_readonly

MIB = 1 << 20
PATIENCE = 60.0
ROWS = 2048


def saving(rank: int, line: Line) -> None:
    """Saves tensors of which each rank has half, and fails as it is told; then saves them again."""
    import torch
    from safetensors.torch import load_file
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from tundish._native import staging_stats
    from tundish.checkpoint import Checkpointer

    signal.signal(signal.SIGINT, signal.default_int_handler)
    root, trouble, options = line.hear()
    mesh = init_device_mesh("cpu", (2,))
    state = {
        f"w{number}": DTensor.from_local(
            torch.full((ROWS, 4096), float(2 * number + rank)), mesh, [Shard(0)], run_check=False
        )
        for number in range(8)
    }
    address_space = resource.getrlimit(resource.RLIMIT_AS)

    def tell() -> None:
        while staging_stats()["in_use"] == 0:
            time.sleep(0.0005)
        line.say("copying")

    def fails_here(name: str, tensor: Any) -> Any:
        if rank == 1 and not tensor.is_meta:
            if trouble == "exit":
                raise SystemExit(3)
            if trouble == "no memory":
                mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (mapped + MIB, address_space[1]))
        return [(name, tensor + 0)]

    kind = "dcp" if trouble == "Ctrl-C, dcp" else "hf"
    # Of several files each rank writes some, so that both give and take.
    several: dict[str, Any] = {"shard_bytes": 200 * MIB} if kind == "hf" else {}
    arguments = dict(several)
    if trouble in ("exit", "no memory"):
        arguments["to_hf"] = fails_here
    failures: list[BaseException] = []
    # Longer than the test: what is told in time is not told by a timeout.
    with Checkpointer(root, on_failure=failures.append, timeout=PATIENCE * 2, **options) as checkpointer:
        save = getattr(checkpointer, f"save_{kind}")
        telling = threading.Thread(target=tell)
        telling.start()
        saves: list[Any] = []
        said = outcome(lambda: saves.append(save(1, state, **arguments)))
        resource.setrlimit(resource.RLIMIT_AS, address_space)
        telling.join()
        if saves:
            said = outcome(lambda: saves[0].result(PATIENCE))
        checkpointer.wait(PATIENCE)
        line.say(said, checkpointer.stats()["staging"]["in_use"] + staging_stats()["in_use"])
        # Until the other, too, has nothing left.
        line.hear()
        published = save(2, state).result(PATIENCE)
        if kind == "hf":
            read = load_file(published / "model.safetensors")
            for number in range(8):
                for half in (0, 1):
                    part = read[f"w{number}"][half * ROWS : (half + 1) * ROWS]
                    assert (part == 2 * number + half).all(), (number, half)
        checkpointer.verify(save(3, state, **several).result(PATIENCE))
    line.say("done")


TROUBLES = {
    "Ctrl-C, hf": "KeyboardInterrupt",
    "Ctrl-C, dcp": "KeyboardInterrupt",
    "exit": "SystemExit",
    "no memory": "RuntimeError",
}


@pytest.mark.parametrize("limit_bytes", [None, 160 * MIB])
@pytest.mark.parametrize("trouble", TROUBLES)
def test_the_other_rank_does_not_wait_and_the_next_save_succeeds(
    trouble: str, limit_bytes: int | None, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    with Job(saving, 2, tmp_path) as job:
        for rank in (0, 1):
            job.tell(rank, (root, trouble, {"staging_limit_bytes": limit_bytes}))
        assert job.hear_all() == [("copying",)] * 2
        if trouble.startswith("Ctrl-C"):
            job.signal(1, signal.SIGINT)
        begun = time.monotonic()
        (other, other_left), (own, own_left) = job.hear_all()
        assert time.monotonic() - begun < 20
        assert own[0] == TROUBLES[trouble], own
        assert (other[0], other[2]) == ("PeerFailedError", 1), other
        assert (own_left, other_left) == (0, 0)
        assert [path.name for path in root.iterdir()] == [".owner"]
        for rank in (0, 1):
            job.tell(rank)
        assert job.hear_all() == [("done",)] * 2
        job.expect_end()
    kind = "dcp" if trouble == "Ctrl-C, dcp" else "hf"
    assert [one.path.name for one in open_readonly(root).list()] == [f"{kind}-2", f"{kind}-3"]
