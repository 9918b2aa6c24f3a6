"""A root that an interrupted job left, and the system calls of a run of two ranks on it."""

from __future__ import annotations

import shutil
from pathlib import Path

from support.checkpoint import failpoints as failpoints
from support.checkpoint.failpoints import SystemCall
from support.checkpoint.training_jobs import check_next_start, prepare, train
from support.distributed.rank_processes import Job


class InterruptedRoot:
    """A root with a history, made again for every run, and the system calls of a run on it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._prepared = folder / "prepared"
        self.root = folder / "run" / "root"
        prepare(self._prepared / "root", folder)

    def reset(self) -> Path:
        """The root as it was at first."""
        shutil.rmtree(self.root.parent, ignore_errors=True)
        shutil.copytree(self._prepared, self.root.parent, symlinks=True)
        return self.root

    def start(self, job: Job, rank: int, environment: dict[str, str]) -> None:
        """Let a rank train for two steps or through failures to step 6."""
        order = {"root": str(self.root), "failpoints": environment}
        job.tell(rank, order | {"steps": 2, "last": 6})

    def calls(self) -> list[tuple[int, SystemCall]]:
        """By rank, of a run that goes well."""
        self.reset()
        traces = [self._folder / f"trace-{rank}" for rank in (0, 1)]
        for trace in traces:
            # They are added to, and another test may have made them.
            trace.unlink(missing_ok=True)
        with Job(train, 2, self._folder, fresh=True) as job:
            for rank, trace in enumerate(traces):
                self.start(job, rank, {"TUNDISH_FAILPOINT_TRACE": str(trace)})
            for message in job.hear_all():
                assert message[:2] == ("resumed", 3)
            assert job.hear_all() == [("done", 5), ("done", 5)]
            job.expect_end()
        check_next_start(self.root)
        return [(rank, call) for rank, trace in enumerate(traces) for call in failpoints.system_calls(trace)]
