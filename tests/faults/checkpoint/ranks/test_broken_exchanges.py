"""A rank that gives up in the middle of an exchange: the others fail at once, and the next save succeeds."""

from __future__ import annotations

import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.distributed.rank_processes import Job, Line, outcome
from support.waiting import NOTICED, PATIENCE

from tundish.checkpoint import open_readonly

MIB = 1 << 20
ROWS = 2048
TENSORS = 4


def saving(rank: int, line: Line) -> None:
    """Saves tensors of which each rank has a part, and fails as it is told; then saves them again."""
    import torch
    import torch.distributed as distributed
    from safetensors.torch import load_file
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from tundish._native import staging_stats
    from tundish.checkpoint import Checkpointer

    signal.signal(signal.SIGINT, signal.default_int_handler)
    root, trouble = line.hear()
    size = distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    state = {
        f"w{number}": DTensor.from_local(
            torch.full((ROWS, 4096), float(size * number + rank)), mesh, [Shard(0)], run_check=False
        )
        for number in range(TENSORS)
    }
    address_space = resource.getrlimit(resource.RLIMIT_AS)

    def tell() -> None:
        while staging_stats()["in_use"] == 0:
            time.sleep(0.0005)
        line.say("copying")

    def fails_here(name: str, tensor: Any) -> Any:
        if rank == size - 1 and not tensor.is_meta:
            if trouble == "exit":
                raise SystemExit(3)
            if trouble == "no memory":
                mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (mapped + MIB, address_space[1]))
        return [(name, tensor + 0)]

    kind = "dcp" if trouble == "Ctrl-C, dcp" else "hf"
    # Of several files each rank writes some, so that both give and take.
    several: dict[str, Any] = {"shard_bytes": 100 * MIB} if kind == "hf" else {}
    arguments = dict(several)
    if trouble in ("exit", "no memory"):
        arguments["to_hf"] = fails_here
    failures: list[BaseException] = []
    # Longer than the test: what is told in time is not told by a timeout.
    checkpointer = Checkpointer(root, on_failure=failures.append, timeout=PATIENCE * 2)
    telling = threading.Thread(target=tell)
    telling.start()
    saves: list[Any] = []
    said = outcome(lambda: saves.append(getattr(checkpointer, f"save_{kind}")(1, state, **arguments)))
    resource.setrlimit(resource.RLIMIT_AS, address_space)
    telling.join()
    if saves:
        said = outcome(lambda: saves[0].result(PATIENCE))
    if trouble == "no memory":
        checkpointer.wait(PATIENCE)
    else:
        # The interrupted rank's checkpointer is closed: all ranks open another one.
        checkpointer.close()
    line.say(said, staging_stats()["in_use"])
    # Until the others, too, have nothing left.
    line.hear()
    if trouble != "no memory":
        checkpointer = Checkpointer(root, on_failure=failures.append, timeout=PATIENCE * 2)
    with checkpointer:
        save = getattr(checkpointer, f"save_{kind}")
        published = save(2, state).result(PATIENCE)
        if kind == "hf":
            read = load_file(published / "model.safetensors")
            for number in range(TENSORS):
                for part in range(size):
                    values = read[f"w{number}"][part * ROWS : (part + 1) * ROWS]
                    assert (values == size * number + part).all(), (number, part)
        checkpointer.verify(save(3, state, **several).result(PATIENCE))
    line.say("done")


TROUBLES = {
    "Ctrl-C, hf": "KeyboardInterrupt",
    "Ctrl-C, dcp": "KeyboardInterrupt",
    "exit": "SystemExit",
    "no memory": "RuntimeError",
}


@pytest.mark.parametrize(("trouble", "size"), [*((trouble, 2) for trouble in TROUBLES), ("exit", 3)])
def test_the_others_do_not_wait_and_the_next_save_succeeds(
    trouble: str, size: int, path_in_memory: Path
) -> None:
    root = path_in_memory / "root"
    with Job(saving, size, path_in_memory) as job:
        job.tell_all((root, trouble))
        assert job.hear_all() == [("copying",)] * size
        if trouble.startswith("Ctrl-C"):
            job.signal(size - 1, signal.SIGINT)
        begun = time.monotonic()
        *others, (own, own_left) = job.hear_all()
        assert time.monotonic() - begun < NOTICED
        assert own[0] == TROUBLES[trouble], own
        assert own_left == 0
        for other, left in others:
            assert other[0] == "PeerFailedError", other
            # Of several, some hear of it from one that heard of it.
            assert other[2] == 1 or size > 2, other
            assert left == 0
        assert not [path.name for path in root.iterdir() if path.name != ".owner"]
        job.tell_all()
        assert job.hear_all() == [("done",)] * size
        job.expect_end()
    kind = "dcp" if trouble == "Ctrl-C, dcp" else "hf"
    assert [one.path.name for one in open_readonly(root).list()] == [f"{kind}-2", f"{kind}-3"]
