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

    `background`: the group for them; where it is None they travel over `callers_group`, on the caller's thread.
    """

    background: OwnGroup | None
    callers_group: Any
    device: torch.device
    tag: int

    @property
    def group(self) -> Any:
        """What they travel over."""
        return self.callers_group if self.background is None else self.background.group

    def break_off(self) -> None:
        """Give up in the middle of an exchange. The caller's own group is not ours to let go of."""
        if self.background is not None:
            self.background.close()
