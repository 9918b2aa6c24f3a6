"""Where a plan ends up: in memory, in a folder of its own, or in a cache; for one process or for all ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tundish.errors import InvalidInputError
from tundish.packing.arguments import as_absolute, as_new_folder, check_sharing

__all__ = ["PlanDestination"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDestination:
    """The arguments of `pack` that say where the plan ends up, as the caller gave them."""

    out: str | os.PathLike[str] | None
    cache_dir: str | os.PathLike[str] | None
    share: bool
    group: Any
    progress: bool | None

    @property
    def is_collective(self) -> bool:
        """Whether other ranks may wait for this one, even if `check` then refuses the value of `share`."""
        try:
            return bool(self.share)
        except (ValueError, RuntimeError, TypeError):
            # Arrays and tensors of several entries are neither true nor false.
            return True

    @property
    def is_memory(self) -> bool:
        """Whether the plan stays in memory."""
        return self.out is None and self.cache_dir is None

    def check(self) -> None:
        """Refuse arguments that contradict each other."""
        check_sharing(self.share, self.group)
        if self.out is not None and self.cache_dir is not None:
            raise InvalidInputError("give out or cache_dir, not both: each says where the plan is to lie")
        if self.out is not None:
            as_new_folder(self.out, "out")
        if self.cache_dir is not None:
            as_absolute(self.cache_dir, "cache_dir")

    def folder(self, fingerprint: str) -> Path:
        """The folder of the plan with this fingerprint."""
        if self.cache_dir is None:
            return as_absolute(self.out, "out")
        return as_absolute(self.cache_dir, "cache_dir") / f"plan-{fingerprint}"
