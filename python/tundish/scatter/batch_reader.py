"""The source's loader: reads batches from it, as many for each step as there are ranks, and its parts.

Invariants:
- Batches are drawn in the loader's order. Each is returned once, except for the padding of a last step.
- A state of the loader belongs to the batches that were drawn before it was taken.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from tundish.errors import InvalidInputError, format_type

Tail = Literal["drop", "pad", "short"]
_END = object()

# Attributes with the number of processes among which a part of a loader splits the data.
_COUNTS = ("num_replicas", "num_processes", "world_size")
# And with its own number among them. An object with a count alone may be prepared by so many processes.
_RANKS = ("rank", "process_index")


class StepBatches(NamedTuple):
    """The batches of one step.

    Attributes:
        batches: one for each rank.
        new: how many of them are new, the first ones. The others are None, or the new ones once more.
        state: of the loader, after them; None where it has none, and at its end.
    """

    batches: list[Any]
    new: int
    state: Any


class BatchReader:
    """Reads one epoch from a loader, `width` batches a step.

    Args:
        loader: any iterable of batches.
        width: how many batches a step has.
        tail: how to complete the last step if the batches are fewer than `width`.
        skip: how many batches are skipped, if there is no `state`.
        state: of the loader, from which it resumes.
        report_progress: called with the number of batches that were skipped, and of those to skip.

    Raises:
        InvalidInputError: the loader has fewer than `skip` batches, or its sampler skips some already.
        Errors of the loader.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        width: int,
        tail: Tail,
        skip: int = 0,
        state: Any = None,
        report_progress: Callable[[int, int], None] = lambda _done, _all: None,
    ) -> None:
        self._loader = loader
        self._width = width
        self._tail = tail
        self._is_stateful = is_stateful(loader)
        self._is_over = False
        self._is_whole_epoch = not skip and state is None
        self._is_resumed = state is not None and self._is_stateful
        if self._is_resumed:
            loader.load_state_dict(copy.deepcopy(state))  # type: ignore[attr-defined]
            self._batches = iter(loader)
        else:
            if skip:
                _refuse_resumed_sampler(loader, skip)
            self._batches = _batches_after(loader, skip, report_progress)
        # Iterating over it again goes on where the last iteration ended.
        self._is_iterator = self._batches is loader
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            # A shuffling sampler takes its seed from torch's generator at its first draw. In a background thread, the
            # order would depend on other draws from the generator.
            self._batches = _draw_first(self._batches)

    def draw(self) -> StepBatches | None:
        """The batches of the next step; None at the end of the data.

        Raises `InvalidInputError` where a whole epoch has no batches because an earlier one used up the iterator.
        """
        if self._is_over:
            return None
        # Not `islice`, which calls `__iter__`: an iterator may start again there.
        batches: list[Any] = []
        while len(batches) < self._width and (batch := next(self._batches, _END)) is not _END:
            batches.append(batch)
        if self._is_iterator and self._is_whole_epoch and not batches:
            raise InvalidInputError(
                f"the source's loader is an iterator ({type(self._loader).__qualname__}) and has no batches left: it "
                "passes once. For several epochs, give an iterable that starts again: a list, a DataLoader, or an "
                "object whose __iter__ makes a new generator"
            )
        self._is_whole_epoch = False
        if self._is_resumed:
            _forget_starting_state(self._loader)
            self._is_resumed = False
        new = len(batches)
        if new < self._width:
            self._is_over = True
            if new == 0 or self._tail == "drop":
                return None
            more = itertools.repeat(None) if self._tail == "short" else itertools.cycle(tuple(batches))
            batches.extend(itertools.islice(more, self._width - new))
        # At its end, a loader's state may be that of a new epoch.
        takes_state = self._is_stateful and not self._is_over
        state = copy.deepcopy(self._loader.state_dict()) if takes_state else None  # type: ignore[attr-defined]
        return StepBatches(batches, new, state)


def step_count(batches: int, width: int, tail: Tail) -> int:
    """How many steps so many batches are."""
    return batches // width if tail == "drop" else -(-batches // width)


def _forget_starting_state(loader: Any) -> None:
    """Have the epochs after a resumed one start at the beginning of the data.

    Datasets of Hugging Face start each iteration at the state that they were given, until they get another epoch.
    """
    for part in (loader, getattr(loader, "dataset", None)):
        if getattr(part, "_starting_state_dict", None) is not None:
            part.load_state_dict(None)  # type: ignore[union-attr]


def _refuse_resumed_sampler(loader: Any, skip: int) -> None:
    """Raise if a `PackedBatchSampler` was resumed too: twice as many batches would be skipped."""
    step = getattr(getattr(loader, "batch_sampler", None), "start_step", None)
    if isinstance(step, int) and step > 0:
        raise InvalidInputError(
            f"the first {skip} batches are to be skipped, and the loader's batch_sampler was resumed by itself, at "
            f"step {step}: load the state into the DispatchLoader alone"
        )


def _batches_after(
    loader: Iterable[Any], skip: int, report_progress: Callable[[int, int], None]
) -> Iterator[Any]:
    """The batches after the first `skip`."""
    # A subclass may do more than its sampler says.
    plain: DataLoader[Any] | None = loader if type(loader) is DataLoader else None
    sampler = None if plain is None or isinstance(plain.dataset, IterableDataset) else plain.batch_sampler
    if skip and plain is not None and sampler is not None:
        return iter(_replace_batch_sampler(plain, _SkippingSampler(sampler, skip, report_progress)))
    batches = iter(loader)
    _skip_batches(batches, skip, report_progress)
    return batches


def _skip_batches(batches: Iterator[Any], skip: int, report_progress: Callable[[int, int], None]) -> None:
    for number in range(skip):
        report_progress(number, skip)
        if next(batches, _END) is _END:
            raise InvalidInputError(
                f"the first {skip} batches are to be skipped, but the loader has only {number}: give the data for "
                "which the state or skip_batches was made"
            )


class _SkippingSampler:
    """A batch sampler without its first batches. Their data is not read."""

    def __init__(
        self, sampler: Iterable[Any], skip: int, report_progress: Callable[[int, int], None]
    ) -> None:
        self._sampler = sampler
        self._skip = skip
        self._show = report_progress

    def __iter__(self) -> Iterator[Any]:
        # At the first draw: a DataLoader with workers makes two iterators and draws from one.
        indices = iter(self._sampler)
        _skip_batches(indices, self._skip, self._show)
        yield from indices


def _replace_batch_sampler(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """A copy of `loader` with another batch sampler. The sampler of a `DataLoader` cannot be replaced."""
    options = (
        "num_workers",
        "collate_fn",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
        "generator",
        "prefetch_factor",
    )
    return DataLoader(
        loader.dataset, batch_sampler=sampler, **{name: getattr(loader, name) for name in options}
    )


def _draw_first(batches: Iterator[Any]) -> Iterator[Any]:
    """The same batches. Draws the first one now."""
    first = next(batches, _END)
    return iter(()) if first is _END else itertools.chain([first], batches)


def length_of(loader: Any) -> int | None:
    """How many batches an epoch has; None where the loader does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def is_stateful(loader: Any) -> bool:
    """Whether a loader has a state to resume from."""
    return callable(getattr(loader, "state_dict", None)) and callable(
        getattr(loader, "load_state_dict", None)
    )


def advances_epoch(loader: Any) -> bool:
    """Whether a loader goes to the next epoch after each iteration, as `td.loader` does: its order depends on it."""
    return bool(getattr(loader, "advances_epoch", False))


def set_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of all parts of a loader that have one."""
    # The loader and its batch sampler often have one sampler.
    for part in {id(part): part for part in _parts_of(loader).values()}.values():
        if callable(method := getattr(part, "set_epoch", None)):
            method(epoch)


def refuse_begun(loader: Any) -> None:
    """Raise `InvalidInputError` where a loader is past the beginning, from which the other ranks count."""
    if advances_epoch(loader) and (loader.epoch or loader.step):
        raise InvalidInputError(
            f"the source's loader is at epoch {loader.epoch} after {loader.step} batches: load the state into the "
            "DispatchLoader alone, or call set_epoch of that"
        )


def refuse_sharded(loader: Any) -> None:
    """Raise `InvalidInputError` where a loader, or a part of it, reads only one rank's part of the data."""
    if type(loader).__module__ == "accelerate.data_loader":
        raise InvalidInputError(
            f"the loader is Accelerate's {type(loader).__qualname__}, which deals its batches out to the ranks "
            "already: give DispatchLoader the one that was given to accelerator.prepare, and do not prepare it"
        )
    parts = _parts_of(loader)
    # Datasets of Hugging Face that were split by node, which are loaders too.
    parts["its split"] = getattr(loader, "_distributed", None)
    parts["its dataset's split"] = getattr(parts["its dataset"], "_distributed", None)
    for name, part in parts.items():
        if not any(isinstance(getattr(part, rank, None), int) for rank in _RANKS):
            continue
        for count in _COUNTS:
            number = getattr(part, count, None)
            if isinstance(number, int) and number > 1:
                how = f", with {count}=1" if advances_epoch(part) else ""
                raise InvalidInputError(
                    f"the loader reads one of {number} parts of the data ({name} is {format_type(part)} with "
                    f"{count}={number}), and each rank would get only a share of that: make it for one process{how}, "
                    "which reads for all ranks"
                )


def _parts_of(loader: Any) -> dict[str, Any]:
    """A loader and its parts, by their names in messages."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return {
        "it": loader,
        "its dataset": getattr(loader, "dataset", None),
        "its sampler": getattr(loader, "sampler", None),
        "its batch_sampler": batch_sampler,
        "the sampler of its batch_sampler": getattr(batch_sampler, "sampler", None),
    }
