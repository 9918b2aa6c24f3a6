"""Any rank may protect a step, and all ranks give the same arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.distributed.rank_processes import Job, Line, outcome

from tundish.checkpoint import Checkpointer

# The arguments of the first and the second rank, and the message about them.
DIFFERENT: dict[str, tuple[Any, Any, str]] = {
    "keep_last": (1, None, "keep_last is 1 on rank 0 and None on rank 1"),
    "keep_every": (None, 5, "keep_every is None on rank 0 and 5 on rank 1"),
    "keep": (None, bool, "keep is None on rank 0 and 'a function' on rank 1"),
    "keep_tagged": (
        {"best": 1},
        {"best": 2},
        "keep_tagged is {'best': 1} on rank 0 and {'best': 2} on rank 1",
    ),
    "staging_limit_bytes": (1 << 20, None, "staging_limit_bytes is 1048576 on rank 0 and None on rank 1"),
    "checksum": ("crc64", None, "checksum is 'crc64' on rank 0 and None on rank 1"),
    "timeout": (50, 60, "timeout is 50.0 on rank 0 and 60.0 on rank 1"),
}


def open_differently(rank: int, line: Line) -> None:
    (root,) = line.hear()
    options: dict[str, Any] = {name: given[rank] for name, given in DIFFERENT.items()}
    said = outcome(lambda: Checkpointer(root, on_failure="raise", **options))
    # Callbacks of a rank may differ, and a refused checkpointer holds nothing.
    with Checkpointer(root, on_failure=print if rank else "raise", on_event=print if rank else None):
        pass
    line.say((said, sorted(path.name for path in root.iterdir())))


def protect_on_the_second(rank: int, line: Line) -> None:
    (root,) = line.hear()
    tensors = {"weight": torch.ones(10)}
    with Checkpointer(root, on_failure="raise", keep_last=1) as checkpointer:
        for step in (1, 2, 3, 4):
            checkpointer.save_hf(step, tensors, blocking=True)
            checkpointer.save_dcp(step, tensors, blocking=True)
            if rank == 1 and step == 1:
                checkpointer.protect(1)
            if rank == 1 and step == 3:
                checkpointer.protect(3)
        line.say(sorted(path.name for path in root.glob("[hd]*-[0-9]")))


def run(scenario: Any, folder: Path) -> list[Any]:
    with Job(scenario, 2, folder) as job:
        job.tell_all((folder / "root",))
        said = job.hear_all()
        job.expect_end()
    return [one for (one,) in said]


def test_arguments_that_differ_between_ranks_are_refused_by_name(tmp_path: Path) -> None:
    for rank, ((kind, text, _), left) in enumerate(run(open_differently, tmp_path)):
        assert left == [".owner"]
        assert kind == ("InvalidInputError", "PeerFailedError")[rank]
        for *_, message in DIFFERENT.values():
            assert message in text


def test_any_rank_protects(tmp_path: Path) -> None:
    stay = ["dcp-1", "dcp-3", "dcp-4", "hf-1", "hf-3", "hf-4"]
    assert run(protect_on_the_second, tmp_path) == [stay, stay]
