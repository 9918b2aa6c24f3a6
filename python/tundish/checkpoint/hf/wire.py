"""The way that tensors take between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tundish.checkpoint.owngroup import OwnGroup

__all__ = ["Wire"]


@dataclass(frozen=True, kw_only=True)
class Wire:
    """How parts travel: in memory of `device`; `tag` is never the same for two saves at a time.

    `own`: the group for them, of this `generation`; where it is None they travel over `callers_group`, on the caller's
    thread, and nobody can give up.
    """

    own: OwnGroup | None
    generation: int
    callers_group: Any
    device: torch.device
    tag: int

    @property
    def group(self) -> Any:
        """What they travel over; raises `PeerFailedError` where it was let go of."""
        return self.callers_group if self.own is None else self.own.of_generation(self.generation)

    def break_off(self) -> None:
        """Give up in the middle of an exchange. The caller's own group is not ours to let go of."""
        if self.own is not None:
            self.own.close(self.generation)
