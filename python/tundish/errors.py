"""The exceptions that tundish raises.

Each class derives from `TundishError` and from the builtin exception that fits, so that both
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
    "JobStoreLostError",
    "LoaderHasNoDatasetError",
    "MissingExtraError",
    "NoSuchPackError",
    "NoSuchSampleError",
    "NotAuthorizedError",
    "NotFoundError",
    "NotPicklableError",
    "OutOfMemoryError",
    "PeerFailedError",
    "PeerLeftLoopError",
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
    "TensorStoreFullError",
    "TimedOutError",
    "TransferError",
    "TundishError",
    "VoteTimeoutError",
    "WorkerDiedError",
]

# A message lists at most so many ranges of ranks.
_SHOWN_RANGES = 16
_SHOWN_NAMES = 8


class TundishError(Exception):
    """Base class of every error that tundish raises."""


class _DetailedError(TundishError):
    """An error whose first argument is the message; the others are attributes, so that it pickles with them."""

    def __str__(self) -> str:
        return str(self.args[0])


class InvalidInputError(TundishError, ValueError):
    """An argument has an invalid value."""


class InvalidTypeError(TundishError, TypeError):
    """An argument has an invalid type or dtype."""


class LoaderHasNoDatasetError(TundishError, AttributeError):
    """A loader was asked for its dataset and has none."""


class NoSuchPackError(TundishError, IndexError):
    """A pack index is out of range."""


class NoSuchSampleError(TundishError, IndexError):
    """A sample index is out of range."""


class OutOfMemoryError(TundishError, MemoryError):
    """The system cannot allocate the requested memory."""


class PlanFormatError(TundishError, ValueError):
    """A plan folder is damaged, incomplete, or of an unsupported format version."""


class PlanMismatchError(TundishError, ValueError):
    """A plan does not match the samples or lengths that it is used with."""


class StateMismatchError(TundishError, ValueError):
    """A `state_dict` does not match the object that loads it."""


class StorageError(TundishError, OSError):
    """A file system operation failed. `errno` and `filename` are set."""

    def __str__(self) -> str:
        return super().__str__() if self.errno is None else f"[Errno {self.errno}] {format_os_error(self)}"


class NotFoundError(StorageError, FileNotFoundError):
    """A file or folder does not exist."""


class AlreadyExistsError(StorageError, FileExistsError):
    """The path to publish to exists already."""


class SegmentGoneError(NotFoundError):
    """The shared memory of a handle was released or can no longer be opened. `filename` describes the segment."""


class NotPicklableError(TundishError, TypeError):
    """A function, item, result or exception cannot be pickled to another process."""


class PoolError(TundishError, RuntimeError):
    """A pool accepts no tasks: it is shut down, broken, or belongs to another process."""


class WorkerDiedError(_DetailedError, PoolError):
    """The worker process that ran a task died.

    Attributes:
        pid: Its process ID.
        status: Its exit code, or the negative number of the signal that killed it.
    """

    def __init__(self, message: str, pid: int, status: int) -> None:
        super().__init__(message, pid, status)
        self.pid = pid
        self.status = status


class CallbackError(TundishError, RuntimeError):
    """A checkpoint is published, but a callback that runs after publication failed."""


class RootInUseError(StorageError, BlockingIOError):
    """Another process holds the writer lock of the checkpoint root. The message names its host and process ID."""


class CheckpointInUseError(StorageError):
    """A checkpoint cannot be removed or locked: it is being read, written or removed, or is the newest of its kind."""


class StepExistsError(AlreadyExistsError):
    """A checkpoint of this kind and step is already published or being written."""


class StepOrderError(InvalidInputError):
    """A save has a lower step than the newest published one of its kind."""


class CorruptCheckpointError(_DetailedError, ValueError):
    """A checkpoint is damaged.

    Attributes:
        paths: The files that are missing, changed, or not part of the checkpoint.
    """

    def __init__(self, message: str, paths: tuple[str, ...] = ()) -> None:
        super().__init__(message, paths)
        self.paths = paths


class PeerFailedError(_DetailedError, RuntimeError):
    """Another rank failed. The message contains its error.

    Attributes:
        rank: The rank that failed, or -1 where only the message names it.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message, rank)
        self.rank = rank


class PeerLeftLoopError(_DetailedError, RuntimeError):
    """Another rank left a collective loop early.

    Attributes:
        rank: The rank that left.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message, rank)
        self.rank = rank


class TimedOutError(TundishError, TimeoutError):
    """An operation did not finish within its timeout."""


class VoteTimeoutError(_DetailedError, TimeoutError):
    """A rank did not vote before its deadline.

    Attributes:
        ranks: The ranks that did not vote.
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message, ranks)
        self.ranks = ranks


class JobStoreLostError(TundishError, ConnectionError):
    """The job's c10d store no longer answers."""


class ShardGoneError(_DetailedError, KeyError):
    """A shard does not exist: it was removed, drained with its step, or never stored."""


class ShardMismatchError(TundishError, ValueError):
    """A fetched tensor has another shape or dtype than its handle says."""


class TensorStoreFullError(OutOfMemoryError):
    """The storage or the fetch buffer of a process has reached its byte limit, and nothing was freed in time."""


class TransferError(TundishError, ConnectionError):
    """A server does not answer, refuses a request, or sent a damaged response."""


class NotAuthorizedError(TundishError, PermissionError):
    """A server refused the token of a request, or its user."""


class DrainError(_DetailedError, RuntimeError):
    """A process could not be drained, in this step and in earlier ones.

    Attributes:
        workers: The workers that could not be drained.
    """

    def __init__(self, message: str, workers: tuple[object, ...] = ()) -> None:
        super().__init__(message, workers)
        self.workers = workers


class MissingExtraError(TundishError, ImportError):
    """A feature needs an optional package that is not installed, or another version of it."""


def format_os_error(error: OSError) -> str:
    """Format a system error as its path and its message. The path comes first, unless the message contains it.

    Only absolute paths are looked for in the message: a relative one may also be an ordinary word.
    """
    path, message = error.filename, str(error.strerror)
    if path is None or isinstance(error, SegmentGoneError):
        return message
    is_named = isinstance(path, str) and path.startswith("/") and path in message
    return message if is_named else f"{path}: {message}"


def format_integer(number: int) -> str:
    """Format an integer for a message. Python refuses to format integers of thousands of digits."""
    return str(number) if number.bit_length() <= 128 else f"an integer of {number.bit_length()} bits"


def format_type(value: object) -> str:
    """Format the type of a value with its article, as in "an int" and "a dict"; None stays "None"."""
    if value is None:
        return "None"
    name = type(value).__qualname__
    return f"an {name}" if name[0] in "aeioAEIO" or name == "ndarray" else f"a {name}"


def format_count(number: int, what: str) -> str:
    """Format a count and its noun, as in "1 dataset" and "2 datasets"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def format_share(share: float) -> str:
    """Format a share in percent with one digit, or as many as tell it from all: 0.99997 is "99.997 %"."""
    if 0 < share < 0.001:
        return "< 0.1 %"
    digits = 1
    while share < 1 and round(share * 100, digits) == 100:
        digits += 1
    return f"{share * 100:.{digits}f} %"


def format_list(names: Sequence[str]) -> str:
    """Format names, as in "a, b and 3 more"."""
    more = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def format_ranks(ranks: Sequence[int], count: int | None = None) -> str:
    """Format ranks, as in "rank 3", "ranks 0, 1" and "ranks 0-254, 300 and 9744 more".

    Args:
        ranks: The ranks, ascending.
        count: The number of all ranks, where `ranks` are only some of them.
    """
    noun = "rank" if (len(ranks) if count is None else count) == 1 else "ranks"
    return f"{noun} {format_rank_list(ranks, count)}"


def format_rank_list(ranks: Sequence[int], count: int | None = None) -> str:
    """Format ranks as `format_ranks` does, without the word "ranks"."""
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
    """Raise `MissingExtraError` for `purpose` and name the `pip install` command that fixes it."""
    raise MissingExtraError(f"{purpose} needs {needs}: run `pip install 'tundish[{extra}]'`", name=needs)
