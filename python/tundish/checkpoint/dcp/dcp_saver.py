"""`DcpSaver` plans and loads the DCP checkpoints of a checkpointer; `load_dcp` loads one by its path.

Invariant: planning and loading use groups of this saver's own, never the caller's.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from tundish.checkpoint.dcp.loading.load import Loaded, load_from, load_newest
from tundish.checkpoint.dcp.loading.open_checkpoint import Readers
from tundish.checkpoint.dcp.saving.dcp_plan import DcpPlan
from tundish.checkpoint.dcp.saving.rank_comparison import RankComparison
from tundish.checkpoint.publish.read_only_root import ReadOnlyRoot, check_step
from tundish.distributed import DEFAULT_TIMEOUT, Voter
from tundish.errors import NotFoundError

__all__ = ["DcpSaver", "load_dcp"]


class DcpSaver:
    """Saves and loads the DCP checkpoints of the ranks of `group` (None: all). Collective; for the caller's thread.

    Args:
        group: the `ProcessGroup`; without torch.distributed a world of one.
        timeout: seconds to wait for other ranks.
        voter: of the callers' threads.
    """

    def __init__(self, group: Any = None, *, timeout: float, voter: Voter) -> None:
        self._timeout = timeout
        self._voter = voter
        self._ranks = RankComparison(group, timeout=timeout, voter=voter)

    def plan(
        self,
        state_dict: Mapping[str, Any],
        *,
        extra: Mapping[str, Any] | None = None,
        rank_extra: Any = None,
        staging: Literal["eager", "lazy"] = "eager",
        optimizer: Any = None,
    ) -> DcpPlan:
        """Plan a save of `state_dict`. Not collective, unlike its staging and its writing.

        Args:
            state_dict: nested, of tensors, DTensors and other objects.
            extra: JSON, the same on all ranks.
            rank_extra: state of this rank: numbers, strings, bytes, tensors, arrays and containers of them.
            staging: "eager" or "lazy".
            optimizer: for a lazy staging, one or several.

        Raises:
            InvalidInputError: a layout cannot be saved, a name is invalid, there is nothing to save, or a lazy staging
                has no optimizer.
            InvalidTypeError: a value cannot be saved, `extra` is no JSON, or `rank_extra` contains another type.
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
        """Collective: load a checkpoint of the root `view`, as `Checkpointer.load_dcp` says."""
        voter = self._voter
        readers = Readers(voter, self._timeout)
        wanted = "the newest whole checkpoint" if step is None else f"step {step!r}"
        what, same = "choosing the checkpoint to load", f"load_dcp of {wanted}, verify {bool(verify)}"

        def choose(proposed: int | None, error: BaseException | None) -> int | None:
            text = json.dumps(proposed)
            chosen = voter.broadcast(
                text, error, source=voter.ranks[0], what=what, same=same, timeout=self._timeout
            )
            return cast("int | None", json.loads(chosen))

        if step is not None:
            with voter.agreed(what, same=same, timeout=self._timeout):
                check_step(step)
            path = view.path / f"dcp-{step}"
            return load_from(state_dict, path, step=step, verify=verify, readers=readers)
        loaded = load_newest(state_dict, view, verify=verify, readers=readers, choose=choose)
        if loaded is None:
            # On all ranks: a first start is not the failure of one rank.
            raise NotFoundError(errno.ENOENT, "there is no DCP checkpoint", str(view.path))
        return loaded

    def close(self) -> None:
        """Close the groups; not collective."""
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
        state_dict: as it was saved, or parts of it, with the tensors to load into; on any number of ranks.
        path: of a published checkpoint, which is not removed or replaced meanwhile.
        group: the ranks that load together.
        verify: read all bytes first, each rank a part, and compare their checksums.
        timeout: seconds that ranks wait for each other.

    Returns:
        `extra`, and the `rank_extra` of every rank that saved, by rank, as `Checkpointer.load_dcp` does.

    Raises:
        NotFoundError: there is no whole checkpoint at `path`.
        CorruptCheckpointError: a file is damaged.
        StateMismatchError: the state dict does not fit. After each of these errors, which all ranks raise, the state
            dict is unchanged.
    """
    # A link is resolved once.
    folder = Path(os.path.realpath(path))
    with Voter(group, timeout=timeout) as voter:
        return load_from(state_dict, folder, verify=verify, readers=Readers(voter, timeout))
