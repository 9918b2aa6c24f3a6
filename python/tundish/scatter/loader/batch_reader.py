"""Reads batches from the source's loader, as many for each step as there are ranks.

Invariants:
- Batches are drawn in the loader's order, and each is returned once, but for the padding of a last step.
- A state of the loader belongs to the batches that were drawn before it was taken.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from tundish.errors import InvalidInputError

__all__ = ["BatchReader", "StepBatches", "Tail", "has_state", "length_of", "set_epoch_of_all", "steps_of"]

Tail = Literal["drop", "pad", "short"]
_END = object()


class StepBatches(NamedTuple):
    """The batches of one step.

    Attributes:
        batches: one for each rank.
        new: how many of them are new, the first ones. The others are None, or were returned before.
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
        tail: what becomes of the last batches where they are fewer than `width`.
        kept: which of them stays with the caller, which may change it before the next step.
        skip: how many batches are left out, where there is no `state`. The last ones may be read, to be repeated.
        state: of the loader, from which it resumes.
        show: called with how many batches were left out, and how many are to be.

    Raises:
        InvalidInputError: the loader has fewer than `skip` batches, or its sampler leaves some out already.
        Whatever the loader raises.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        width: int,
        tail: Tail,
        kept: int = 0,
        skip: int = 0,
        state: Any = None,
        show: Callable[[int, int], None] = lambda _done, _all: None,
    ) -> None:
        self._loader = loader
        self._width = width
        self._tail = tail
        self._kept = kept
        self._has_state = has_state(loader)
        # The batches of the step before, for padding.
        self._before: list[Any] = []
        self._is_over = False
        # How many of the batches that are left out an incomplete first step repeats.
        again = 0
        self._is_resumed = state is not None and self._has_state
        if self._is_resumed:
            loader.load_state_dict(copy.deepcopy(state))  # type: ignore[attr-defined]
            self._batches = iter(loader)
        else:
            if skip:
                _refuse_resumed_sampler(loader, skip)
            again = width if tail == "pad" and skip >= width and self._may_end_after(skip) else 0
            self._batches = _after_first(loader, skip, again, show)
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            # A shuffling sampler takes its seed from torch's generator at its first draw. Drawn later, by a background
            # thread, the order would depend on what else draws from there meanwhile.
            self._batches = _with_first_drawn(self._batches)
        if again:
            self._before = list(itertools.islice(self._batches, again))
            if len(self._before) < again:
                raise _too_few(skip - again + len(self._before), skip)

    def draw(self) -> StepBatches | None:
        """The batches of the next step; None at the end of the data."""
        if self._is_over:
            return None
        batches = list(itertools.islice(self._batches, self._width))
        if self._is_resumed:
            _begin_anew_next_time(self._loader)
            self._is_resumed = False
        new = len(batches)
        if new < self._width:
            self._is_over = True
            if new == 0 or self._tail == "drop":
                return None
            missing = self._width - new
            batches += [None] * missing if self._tail == "short" else self._padding(batches, missing)
        if self._tail == "pad":
            self._before = batches
        # A loader may resume from its state at the end with a new epoch: there the number of batches counts.
        takes_state = self._has_state and not self._is_over
        state = copy.deepcopy(self._loader.state_dict()) if takes_state else None  # type: ignore[attr-defined]
        return StepBatches(batches, new, state)

    def _may_end_after(self, skip: int) -> bool:
        """Whether fewer than a step's batches may follow the first `skip`."""
        length = length_of(self._loader)
        return length is None or length - skip < self._width

    def _padding(self, batches: list[Any], missing: int) -> list[Any]:
        """Batches for the ranks for which the last `batches` are too few."""
        if not self._before:
            return list(itertools.islice(itertools.cycle(batches), missing))
        # The caller may have changed the batch that it kept.
        others = [number for number in range(self._width) if number != self._kept]
        wanted = range(self._width - missing, self._width)
        return [self._before[others[0] if number == self._kept else number] for number in wanted]


def has_state(loader: Any) -> bool:
    """Whether a loader has a state to resume from."""
    return callable(getattr(loader, "state_dict", None)) and callable(
        getattr(loader, "load_state_dict", None)
    )


def length_of(loader: Any) -> int | None:
    """How many batches an epoch has; None where the loader does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def steps_of(batches: int, width: int, tail: Tail) -> int:
    """How many steps so many batches are."""
    return batches // width if tail == "drop" else -(-batches // width)


def set_epoch_of_all(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of all parts of a loader that have one."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = (
        loader,
        getattr(loader, "dataset", None),
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    )
    # The loader and its batch sampler often have one sampler.
    for part in {id(part): part for part in parts}.values():
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)


def _begin_anew_next_time(loader: Any) -> None:
    """Have the epochs after a resumed one start at the beginning of the data.

    Datasets of Hugging Face start each iteration at the state that they were given, until they get another epoch.
    """
    for part in (loader, getattr(loader, "dataset", None)):
        if getattr(part, "_starting_state_dict", None) is not None:
            part.load_state_dict(None)  # type: ignore[union-attr]


def _refuse_resumed_sampler(loader: Any, skip: int) -> None:
    """Raise where a `PackedBatchSampler` was resumed too: twice as many batches would be left out."""
    step = getattr(getattr(loader, "batch_sampler", None), "start_step", None)
    if isinstance(step, int) and step > 0:
        raise InvalidInputError(
            f"the first {skip} batches are to be left out, and the loader's batch_sampler was resumed by itself, at "
            f"step {step}: load the state into the DispatchLoader alone"
        )


def _after_first(
    loader: Iterable[Any], skip: int, again: int, show: Callable[[int, int], None]
) -> Iterator[Any]:
    """The batches after the first `skip`, and before them the last `again` of those."""
    # A subclass may do more than its sampler says.
    plain: DataLoader[Any] | None = loader if type(loader) is DataLoader else None
    sampler = None if plain is None or isinstance(plain.dataset, IterableDataset) else plain.batch_sampler
    if skip > again and plain is not None and sampler is not None:
        return iter(_with_sampler(plain, _Rest(sampler, skip, again, show)))
    batches = iter(loader)
    _leave_out(batches, skip, again, show)
    return batches


def _leave_out(batches: Iterator[Any], skip: int, again: int, show: Callable[[int, int], None]) -> None:
    for number in range(skip - again):
        show(number, skip)
        if next(batches, _END) is _END:
            raise _too_few(number, skip)


class _Rest:
    """A batch sampler without its first batches, whose data is not read."""

    def __init__(
        self, sampler: Iterable[Any], skip: int, again: int, show: Callable[[int, int], None]
    ) -> None:
        self._sampler = sampler
        self._skip = skip
        self._again = again
        self._show = show

    def __iter__(self) -> Iterator[Any]:
        # At the first draw: a DataLoader with workers makes two iterators and draws from one.
        indices = iter(self._sampler)
        _leave_out(indices, self._skip, self._again, self._show)
        yield from indices


def _with_sampler(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """A loader as `loader`, whose sampler cannot be replaced, with another sampler."""
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


def _too_few(found: int, skip: int) -> InvalidInputError:
    return InvalidInputError(
        f"the first {skip} batches are to be left out, and the loader has {found}: this is not the data that the state "
        "or skip_batches is meant for"
    )


def _with_first_drawn(batches: Iterator[Any]) -> Iterator[Any]:
    """The same batches, of which the first is drawn now."""
    first = next(batches, _END)
    return iter(()) if first is _END else itertools.chain([first], batches)
