"""Decides which published checkpoints of a kind may be removed, once a newer one is durable.

The newest checkpoint is never among them, nor a protected one, nor any where no limit is set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tundish.errors import CallbackError, InvalidInputError, InvalidTypeError

__all__ = ["Checkpoint", "Retention"]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A published checkpoint: whole, and durable.

    Attributes:
        kind: "hf" or "dcp".
        tag: of its save; None without.
        size: bytes of all files.
        files: the number of them.
        extra: of a DCP save (step, epoch, consumed tokens).
    """

    kind: str
    step: int
    path: Path
    tag: str | None
    size: int
    files: int
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Retention:
    """Which checkpoints of one kind are kept.

    Attributes:
        keep_last: how many of the newest untagged checkpoints; None keeps all.
        keep_every: also untagged ones whose step is a multiple of this.
        keep: also those for which this function returns True, tagged or not.
        keep_tagged: how many of the newest of each tag; tags that are not named keep all of theirs.
        protected: steps that are kept in any case.

    Raises:
        InvalidInputError: a count is below 1.
        InvalidTypeError: `keep` is no function, or `keep_tagged` no mapping.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep: Callable[[Checkpoint], bool] | None = None
    keep_tagged: Mapping[str, int] = field(default_factory=dict)
    protected: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.keep is not None and not callable(self.keep):
            raise InvalidTypeError(f"keep is {self.keep!r}: give a function of a Checkpoint")
        if not isinstance(self.keep_tagged, Mapping) or not all(
            isinstance(tag, str) for tag in self.keep_tagged
        ):
            raise InvalidTypeError(f"keep_tagged is {self.keep_tagged!r}: give a mapping of tags to numbers")
        counts = {"keep_last": self.keep_last, "keep_every": self.keep_every}
        counts |= {f"keep_tagged[{tag!r}]": count for tag, count in self.keep_tagged.items()}
        for name, count in counts.items():
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
                raise InvalidInputError(f"{name} is {count!r}: give a whole number of at least 1")

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is ever surplus, whatever is published."""
        return self.keep_last is None and not self.keep_tagged

    def surplus(self, published: Sequence[Checkpoint]) -> list[int]:
        """Steps of `published` (one kind, ascending) that need not be kept, oldest first.

        Raises `CallbackError` where `keep` fails.
        """
        newer_of_tag: dict[str | None, int] = {}
        surplus = []
        for checkpoint in reversed(published):
            newer = newer_of_tag.get(checkpoint.tag, 0)
            newer_of_tag[checkpoint.tag] = newer + 1
            limit = self.keep_last if checkpoint.tag is None else self.keep_tagged.get(checkpoint.tag)
            is_newest = checkpoint is published[-1]
            if is_newest or limit is None or newer < limit or self._is_kept(checkpoint):
                continue
            surplus.append(checkpoint.step)
        # `keep` may have protected what was judged before.
        return [step for step in reversed(surplus) if step not in self.protected]

    def _is_kept(self, checkpoint: Checkpoint) -> bool:
        if checkpoint.step in self.protected:
            return True
        if checkpoint.tag is None and self.keep_every is not None and checkpoint.step % self.keep_every == 0:
            return True
        if self.keep is None:
            return False
        try:
            return bool(self.keep(checkpoint))
        except BaseException as caught:  # an exit too is the function's failure
            raise CallbackError(f"keep failed for {checkpoint.path}: {caught!r}") from caught
