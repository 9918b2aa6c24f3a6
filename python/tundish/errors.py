"""Every error this library raises on purpose.

Each class derives from `TundishError` and from the builtin that fits, so that both
`except TundishError` and `except FileNotFoundError` work. A message says what was wrong, where
(path, rank, sample index), and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

__all__ = [
    "AlreadyExistsError",
    "CallbackError",
    "CheckpointInUseError",
    "CorruptCheckpointError",
    "DrainError",
    "InvalidInputError",
    "InvalidTypeError",
    "MissingExtraError",
    "NoDatasetError",
    "NoSuchPackError",
    "NotAuthorizedError",
    "NotFoundError",
    "NotPicklableError",
    "OutOfMemoryError",
    "PeerFailedError",
    "PeerStoppedError",
    "PlanFormatError",
    "PlanMismatchError",
    "PoolError",
    "RootInUseError",
    "SegmentGoneError",
    "ShardGoneError",
    "ShardMismatchError",
    "StateMismatchError",
    "StepExistsError",
    "StepOrderError",
    "StorageError",
    "StoreFullError",
    "StoreLostError",
    "TimedOutError",
    "TransferError",
    "TundishError",
    "UnsupportedError",
    "VoteTimeoutError",
    "WorkerDiedError",
]

# Of ranks, in a message.
_SHOWN_RANGES = 16


class TundishError(Exception):
    """Base of every error of this library."""


class InvalidInputError(TundishError, ValueError):
    """An argument has a value that cannot be used."""


class InvalidTypeError(TundishError, TypeError):
    """An argument has a type or dtype that cannot be used."""


class NoDatasetError(TundishError, AttributeError):
    """A loader is asked for its dataset, to make another one over it, and has none."""


class NoSuchPackError(TundishError, IndexError):
    """A pack was asked for by a number that the plan does not have."""


class OutOfMemoryError(TundishError, MemoryError):
    """The system has no room for the memory that was asked for."""


class PlanFormatError(TundishError, ValueError):
    """A plan folder is damaged, incomplete or of another format version."""


class PlanMismatchError(TundishError, ValueError):
    """A plan and the samples or lengths it is used with do not belong together."""


class StateMismatchError(TundishError, ValueError):
    """A loaded `state_dict` does not fit the object that loads it."""


class StorageError(TundishError, OSError):
    """The file system refused: read-only, full, vanished. `errno` and `filename` are set."""

    def __str__(self) -> str:
        text = super().__str__()
        return text.removesuffix(f": {self.filename!r}") if names_its_path(self) else text


class NotFoundError(StorageError, FileNotFoundError):
    """A file or folder that was named is not there."""


class AlreadyExistsError(StorageError, FileExistsError):
    """The place to publish to is taken by something else."""


class SegmentGoneError(NotFoundError):
    """The shared memory behind a handle was given back, or no longer can be reached."""


class NotPicklableError(TundishError, TypeError):
    """A function, an item, a result or an exception cannot be sent between processes."""


class PoolError(TundishError, RuntimeError):
    """A pool takes no tasks: it is shut down, broken, or another process's."""


class WorkerDiedError(PoolError):
    """The worker died that ran a task; `pid` was its process, `status` minus the signal or the exit code."""

    def __init__(self, message: str, pid: int, status: int) -> None:
        super().__init__(message, pid, status)
        self.pid = pid
        self.status = status

    def __str__(self) -> str:
        return str(self.args[0])


class UnsupportedError(TundishError, NotImplementedError):
    """This system cannot do what was asked for."""


class CallbackError(TundishError, RuntimeError):
    """A checkpoint is published, but a callback that was to hear of it failed."""


class RootInUseError(StorageError, BlockingIOError):
    """Another process owns the checkpoint root; the message names its host and process id."""


class CheckpointInUseError(StorageError):
    """A checkpoint may not go, as it is read, written or the newest of its kind; or readers are locked out of it."""


class StepExistsError(AlreadyExistsError):
    """A checkpoint of this kind and step is published, or being written, already."""


class StepOrderError(InvalidInputError):
    """A save below the newest published step of its kind."""


class CorruptCheckpointError(TundishError, ValueError):
    """A checkpoint is damaged; `paths` names its files that are missing, changed or not its own."""

    def __init__(self, message: str, paths: tuple[str, ...] = ()) -> None:
        super().__init__(message, paths)
        self.paths = paths

    def __str__(self) -> str:
        return str(self.args[0])


class PeerFailedError(TundishError, RuntimeError):
    """Another rank failed; `rank` names it (-1: its own error tells) and the message carries its error."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message, rank)
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])


class PeerStoppedError(TundishError, RuntimeError):
    """Another rank left a loop that all go through together; `rank` names it."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message, rank)
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])


class TimedOutError(TundishError, TimeoutError):
    """What was waited for did not come in the time that was given."""


class VoteTimeoutError(TundishError, TimeoutError):
    """A rank did not vote before its deadline; `ranks` names the silent ones."""

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message, ranks)
        self.ranks = ranks

    def __str__(self) -> str:
        return str(self.args[0])


class StoreLostError(TundishError, ConnectionError):
    """The job's key-value store, served by the launcher, is gone or no longer answers."""


class ShardGoneError(TundishError, KeyError):
    """A shard is not there: it was removed, or drained with its step, or never stored."""

    def __str__(self) -> str:
        # That of a KeyError is the message in quotes.
        return str(self.args[0])


class ShardMismatchError(TundishError, ValueError):
    """What came for a handle has another shape or dtype than the handle declares."""


class StoreFullError(OutOfMemoryError):
    """The storage or the fetch buffer of a process is at its limit in bytes, and nothing was given back in time."""


class TransferError(TundishError, ConnectionError):
    """A shard's owner, or a worker, does not answer, refuses, or sent what is damaged."""


class NotAuthorizedError(TundishError, PermissionError):
    """A worker wants a token, or another one than it was told."""


class DrainError(TundishError, RuntimeError):
    """A process could not be drained, now and when it was tried before; `workers` are those of which this is so."""

    def __init__(self, message: str, workers: tuple[object, ...] = ()) -> None:
        super().__init__(message, workers)
        self.workers = workers

    def __str__(self) -> str:
        return str(self.args[0])


class MissingExtraError(TundishError, ImportError):
    """A feature needs packages that an extra of tundish installs."""


def names_its_path(error: OSError) -> bool:
    """Whether the sentence holds the path already, which would otherwise be told twice.

    The compiled module's sentences do, and its paths are absolute; of a relative one, the words of a
    sentence are not to be taken for it.
    """
    path = error.filename
    return isinstance(path, str) and path.startswith("/") and path in str(error.strerror)


def shown(number: int) -> str:
    """`number` as a message can hold it: Python refuses to write out thousands of digits, and nobody reads them."""
    return str(number) if number.bit_length() <= 128 else f"an integer of {number.bit_length()} bits"


def counted(number: int, what: str) -> str:
    """A number of things, for messages: "1 dataset", "2 datasets"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def ranks_named(ranks: Sequence[int], count: int | None = None) -> str:
    """Ranks, for messages: "rank 3", "ranks 0, 1", "ranks 0-254, 300 and 9744 more".

    `count`: how many there are in all, where `ranks` are only some of them.
    """
    return ("rank " if (len(ranks) if count is None else count) == 1 else "ranks ") + listed(ranks, count)


def listed(ranks: Sequence[int], count: int | None = None) -> str:
    """As `ranks_named`, without the word."""
    ranges: list[tuple[int, int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], rank
        else:
            ranges.append((rank, rank))
    shown_ranges, named = [], 0
    for first, last in ranges[:_SHOWN_RANGES]:
        named += last - first + 1
        apart = ", " if last == first + 1 else "-"
        shown_ranges.append(str(first) if first == last else f"{first}{apart}{last}")
    everyone = len(ranks) if count is None else count
    return ", ".join(shown_ranges) + (f" and {everyone - named} more" if everyone > named else "")


def missing_extra(extra: str, needs: str, purpose: str) -> NoReturn:
    """Raise `MissingExtraError` for `purpose`, naming the `pip install` that mends it."""
    raise MissingExtraError(f"{purpose} needs {needs}: run `pip install 'tundish[{extra}]'`", name=needs)
