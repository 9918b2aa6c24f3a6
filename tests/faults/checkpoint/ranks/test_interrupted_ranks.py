"""Ctrl-C on one rank in a collective call: the others get an error that names it, published data stays."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from support.distributed.rank_processes import Job, Line, outcome
from support.waiting import NOTICED, PATIENCE

from tundish.checkpoint import open_readonly

FINE = ("", "", None)


def calling(rank: int, line: Line) -> None:
    """Makes a checkpointer, then one call after the other; the last rank is interrupted where it is told."""
    import torch

    from tundish.checkpoint import Checkpointer
    from tundish.checkpoint.dcp.save import DcpSave
    from tundish.checkpoint.hf.export import HfExport
    from tundish.checkpoint.staging import Staged
    from tundish.distributed import Voter

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    places: dict[str, tuple[Any, str]] = {
        "planning": (HfExport, "write_plan"),
        "planning dcp": (DcpSave, "write_plan"),
        "voting": (Voter, "combine"),
        "voting on a load": (Voter, "vote"),
        "staging": (Staged, "copy"),
        "staging dcp": (Staged, "copy"),
    }
    root = line.hear()
    failures: list[BaseException] = []
    checkpointer: Any = None
    while (order := line.hear()) is not None:
        call, step, place = order
        if call == "open":
            # Longer than the test: an error that comes in time is not one of a timeout.
            checkpointer = Checkpointer(root, on_failure=failures.append, timeout=PATIENCE * 2)
            line.say(FINE, 0.0)
            continue

        def make(call: str = call, step: int = step, checkpointer: Any = checkpointer) -> None:
            tensors = {"w": torch.full((10,), float(step))}
            if call == "load_dcp":
                checkpointer.load_dcp(tensors)
            elif call == "close":
                checkpointer.close()
            else:
                getattr(checkpointer, call)(step, tensors).result(PATIENCE)

        begun = time.monotonic()
        if place is None or rank == 0:
            line.say(outcome(make), time.monotonic() - begun)
            continue
        kind, name = places[place]
        whole = getattr(kind, name)
        setattr(kind, name, interrupt)
        try:
            came = outcome(make)
        finally:
            setattr(kind, name, whole)
        line.say(came, time.monotonic() - begun)


@pytest.mark.parametrize(
    ("call", "place"),
    [
        ("save_hf", "planning"),
        ("save_hf", "voting"),
        ("save_hf", "staging"),
        ("save_dcp", "planning dcp"),
        ("save_dcp", "staging dcp"),
        ("load_dcp", "voting on a load"),
    ],
)
def test_other_ranks_get_an_error_that_names_the_interrupted_rank(
    call: str, place: str, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    with Job(calling, 2, tmp_path) as job:

        def each(call: str, step: int = 0, place: str | None = None) -> list[Any]:
            job.tell_all((call, step, place))
            said = job.hear_all()
            assert max(seconds for _, seconds in said) < NOTICED, (call, place)
            return [came for came, _ in said]

        job.tell_all(root)
        each("open")
        for kind in ("save_hf", "save_dcp"):
            assert each(kind, 1) == [FINE, FINE]
        first, second = each(call, 2, place)
        assert second[0] == "KeyboardInterrupt"
        assert (first[0], first[2]) == ("PeerFailedError", 1), first
        # The interrupted checkpointer says so; the other rank's next call fails and names it.
        first, second = each(call, 3)
        assert second[0] == "InvalidInputError"
        assert "was interrupted by KeyboardInterrupt" in second[1]
        assert (first[0], first[2]) == ("PeerFailedError", 1), first
        assert each("close") == [FINE, FINE]
        assert [(one.kind, one.step) for one in open_readonly(root).list()] == [("dcp", 1), ("hf", 1)]
        each("open")
        assert each("save_hf", 4) == [FINE, FINE]
        assert each("close") == [FINE, FINE]
        job.tell_all()
        job.expect_end()
    readonly = open_readonly(root)
    assert [(one.kind, one.step) for one in readonly.list()] == [("dcp", 1), ("hf", 1), ("hf", 4)]
    for one in readonly.list():
        readonly.verify(one.path)
