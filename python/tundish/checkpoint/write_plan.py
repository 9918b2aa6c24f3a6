"""`WritePlan`: the files that one rank writes for one save, known before any value of a tensor is read.

The kinds of checkpoints differ only up to here: each makes a `WritePlan` of its arguments. What follows is the same for
all: ranks vote on it, `Staged` copies the tensors, and the files are written and published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol

import torch

from tundish.distributed import VoteId

Staging = Literal["eager", "lazy"]

# As huggingface_hub takes by default. One rank writes a file, so files are small enough for many ranks to share in.
DEFAULT_SHARD_BYTES = 5 * 10**9


class Place(NamedTuple):
    """Where a tensor lies in a buffer: bytes `start` to `stop` - 1."""

    start: int
    stop: int
    dtype: torch.dtype
    shape: Sequence[int]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedBuffer:
    """Host memory for tensors.

    Attributes:
        size: in bytes.
        places: where tensors are copied to, sorted and without overlap.
        sources: the local tensor of each place, on any device; converted to the dtype of its place.
        names: of the tensors, for messages.
    """

    size: int
    places: Sequence[Place]
    sources: Sequence[torch.Tensor]
    names: Sequence[str]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedFile(PlannedBuffer):
    """A file, as its image lies in host memory.

    Attributes:
        name: in the checkpoint.
        frames: returns the start and the contents of all bytes beside the tensors. Called when the file is written.
    """

    name: str
    frames: Callable[[], Iterable[tuple[int, bytes]]]


class SmallFile(NamedTuple):
    """A file without tensors: its name in the checkpoint, and its contents or an open file that is copied."""

    name: str
    contents: bytes | BinaryIO


class Exchange(Protocol):
    """Fills places of a save's buffers with tensors of other ranks."""

    def run(self) -> None:
        """Collective: send and receive."""

    def wait(self) -> None:
        """Block until everything that was received is in host memory."""

    def abort(self) -> None:
        """Called instead of `run`: ranks that wait for this one fail at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WritePlan:
    """The files of one rank.

    Attributes:
        files: those with tensors.
        snapshots: more memory, for copies of tensors that a lazy save exchanges later.
        small_files: the other files of this rank.
        late_files: on the first rank, returns the files that are written after those of all ranks, from the notes of
            all ranks in the group's order.
        note: a text that `late_files` needs.
        optimizers: a lazy save copies what belongs to them until their next step; none for an eager save.
        is_pinned: whether a CUDA device copies into the memory.
        exchange: makes the exchange with other ranks, of the buffers of `files` and `snapshots` and the `Copies` of the
            save; None if none is needed.
        exchange_bytes: host memory that the exchange takes beside the buffers.
        checkpoint_bytes: on the first rank, about the bytes of the files of all ranks.
    """

    files: Sequence[PlannedFile]
    snapshots: Sequence[PlannedBuffer] = ()
    small_files: Sequence[SmallFile] = ()
    late_files: Callable[[Sequence[str]], Iterable[SmallFile]] | None = None
    note: str = ""
    optimizers: Sequence[Any] = ()
    is_pinned: bool = False
    exchange: Callable[[Sequence[Any], Any], Exchange] | None = None
    exchange_bytes: int = 0
    checkpoint_bytes: int = 0

    @property
    def file_bytes(self) -> int:
        """Bytes of the files with tensors."""
        return sum(file.size for file in self.files)

    @property
    def staged_bytes(self) -> int:
        """Host memory that staging takes."""
        return self.file_bytes + sum(buffer.size for buffer in self.snapshots) + self.exchange_bytes


class SavePlan(Protocol):
    """One save on its way to a `WritePlan`. Making it is local, and refuses what cannot be saved.

    Attributes:
        fingerprint: equal on all ranks exactly if their saves fit together.
        needs_ranks: whether `agree` has to talk to other ranks before there is a plan, as far as this rank knows.
        replicas: hashes of what several ranks hold, by a name for these ranks; equal under one name, unless a value
            differs between ranks.
    """

    @property
    def fingerprint(self) -> str: ...
    @property
    def needs_ranks(self) -> bool: ...
    @property
    def replicas(self) -> Mapping[str, str]: ...

    def agree(self, vote: VoteId, *, any_needs: bool, do_replicas_differ: bool) -> bool:
        """Collective: plan with the other ranks, where any rank needs it or replicas differ.

        Values that differ between ranks by mistake are refused here, with their names.

        Args:
            vote: the vote in which all ranks had a plan to make.
            any_needs: whether `needs_ranks` holds on any rank; the same on all.
            do_replicas_differ: whether `replicas` differ between ranks; the same on all.

        Returns:
            Whether an earlier `write_plan` does not hold any more.
        """

    def write_plan(self) -> WritePlan:
        """The files of this rank. Local; after `agree` where a rank needs it."""

    def release(self) -> None:
        """Close open files; ranks that wait for this one in an exchange fail. Never raises."""
