"""What a checkpointer has of DCP checkpoints: their plans and their loading.

What always holds: planning and loading are on groups of this saver's own, never on the caller's.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from tundish.checkpoint.dcp.load import Loaded, load_from, load_newest
from tundish.checkpoint.dcp.opened import Readers
from tundish.checkpoint.dcp.plan import DcpPlan
from tundish.checkpoint.dcp.ranks import Ranks
from tundish.checkpoint.publish.read_only_root import ReadOnlyRoot, check_step
from tundish.distributed import DEFAULT_TIMEOUT, Voter
from tundish.errors import NotFoundError

__all__ = ["DcpSaver", "load_dcp"]


class DcpSaver:
    """Saves and loads the DCP checkpoints of the ranks of `group` (None: all). Collective; for the caller's thread.

    Args:
        group: the `ProcessGroup`; without torch.distributed a world of one.
        timeout: seconds that anything waits for the other ranks.
        voter: of the callers' threads.
    """

    def __init__(self, group: Any = None, *, timeout: float, voter: Voter) -> None:
        self._timeout = timeout
        self._voter = voter
        self._ranks = Ranks(group, timeout=timeout, voter=voter)

    def plan(
        self,
        state_dict: Mapping[str, Any],
        *,
        extra: Mapping[str, Any] | None = None,
        rank_extra: Any = None,
        staging: Literal["eager", "lazy"] = "eager",
        optimizer: Any = None,
    ) -> DcpPlan:
        """A save of `state_dict`. Not collective, unlike its staging and its writing.

        Raises:
            InvalidInputError: layouts that cannot be saved, names that cannot be used, nothing to save, a lazy staging
                without an optimizer.
            InvalidTypeError: what is no tensor with values and cannot be pickled; an `extra` that is no JSON; a
                `rank_extra` of something else than numbers, strings, bytes, tensors, arrays and containers of them.
        """
        return DcpPlan(
            state_dict,
            extra=extra,
            rank_extra=rank_extra,
            staging=staging,
            optimizer=optimizer,
            ranks=self._ranks,
        )

    def load(
        self, state_dict: dict[str, Any], *, view: ReadOnlyRoot, step: int | None, verify: bool
    ) -> Loaded:
        """Collective: load a checkpoint of the root that `view` shows, as `Checkpointer.load_dcp` says."""
        voter = self._voter
        readers = Readers(voter, self._timeout)
        wanted = "the newest whole checkpoint" if step is None else f"step {step!r}"
        what, same = "choosing the checkpoint to load", f"load_dcp of {wanted}, verify {bool(verify)}"

        def choose(proposed: int | None, error: BaseException | None) -> int | None:
            step = json.dumps(proposed)
            told = voter.broadcast(
                step, error, source=voter.ranks[0], what=what, same=same, timeout=self._timeout
            )
            return cast("int | None", json.loads(told))

        if step is not None:
            with voter.agreed(what, same=same, timeout=self._timeout):
                check_step(step)
            path = view.path / f"dcp-{step}"
            return load_from(state_dict, path, step=step, verify=verify, readers=readers)
        loaded = load_newest(state_dict, view, verify=verify, readers=readers, choose=choose)
        if loaded is None:
            # On all ranks alike: a first start is no failure of one of them.
            raise NotFoundError(errno.ENOENT, "there is no DCP checkpoint", str(view.path))
        return loaded

    def close(self) -> None:
        """Let go of the groups; not collective."""
        self._ranks.close()


def load_dcp(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    group: Any = None,
    verify: bool = True,
    timeout: float = DEFAULT_TIMEOUT.total_seconds(),
) -> tuple[dict[str, Any], Mapping[int, Any]]:
    """Collective over `group` (None: all ranks): load the DCP checkpoint at `path` into `state_dict`, in place.

    Args:
        state_dict: as it was saved, or parts of it, with the tensors to load into, on whatever ranks.
        path: a published checkpoint, which is neither removed nor replaced until it is loaded.
        group: the ranks that load together.
        verify: read all bytes first, each rank a part of them, and compare their checksums.
        timeout: seconds that ranks wait for each other.

    Returns `extra` and the `rank_extra` of every rank that saved, by rank, as `Checkpointer.load_dcp` does.

    Raises, on all ranks: `NotFoundError` where no whole checkpoint is, `CorruptCheckpointError`, `StateMismatchError`
    where the state dict does not fit. Until then nothing of it is changed.
    """
    # Where a link leads is looked up once.
    folder = Path(os.path.realpath(path))
    with Voter(group, timeout=timeout) as voter:
        return load_from(state_dict, folder, verify=verify, readers=Readers(voter, timeout))
