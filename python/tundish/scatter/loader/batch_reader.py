"""BatchReader the source's data: from a loader, one round of batches after the other.

Owns one pass through a loader that is the caller's. What always holds: batches are drawn in the loader's order and each
is given out once, but for the repeated ones of a last round that says so; a state of the loader belongs to the batches
that were drawn before it was taken. Nothing here knows of other ranks.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from tundish.errors import InvalidInputError

__all__ = ["BatchReader", "Drawn", "Tail", "keeps_state", "length_of", "rounds_of", "tell_epoch"]

Tail = Literal["drop", "pad", "short"]
_NOTHING_MORE = object()


class Drawn(NamedTuple):
    """The batches of one round.

    Attributes:
        batches: as many as a round has.
        new: how many of them are, the first ones. The others are None, or were there before.
        state: the loader's own, after them; None where it has none, and at its end.
    """

    batches: list[Any]
    new: int
    state: Any


class BatchReader:
    """One pass through `loader`, `width` batches a round.

    `kept`: which of them stays with whoever reads, and may be changed there before the next round; `state`: the
    loader's own, from which it goes on; else `skip` batches are left out, but the last of them may be read to be
    repeated. `show` is told of how many of them it was.

    Raises what the loader raises, and `InvalidInputError` where it has fewer batches than are to be left out, or its
    sampler leaves some out already.
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
        self._keeps_state = keeps_state(loader)
        self._before: list[Any] = []
        self._is_over = False
        # Of those left out, what the first round repeats where it is the last one and not whole.
        again = 0
        self._goes_on = state is not None and self._keeps_state
        if self._goes_on:
            loader.load_state_dict(copy.deepcopy(state))  # type: ignore[attr-defined]
            self._batches = iter(loader)
        else:
            if skip:
                _refuse_resumed(loader, skip)
            again = width if tail == "pad" and skip >= width and self._may_end_after(skip) else 0
            self._batches = _without_first(loader, skip, again, show)
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            # A sampler that shuffles takes its seed from torch's generator at its first draw. Whoever makes this
            # draws from there as well, in an order of its own.
            self._batches = _begun(self._batches)
        if again:
            self._before = list(itertools.islice(self._batches, again))
            if len(self._before) < again:
                raise _too_few(skip - again + len(self._before), skip)

    def draw(self) -> Drawn | None:
        """The next round; None at the end of the data."""
        if self._is_over:
            return None
        batches = list(itertools.islice(self._batches, self._width))
        if self._goes_on:
            _begin_anew_after(self._loader)
            self._goes_on = False
        count = len(batches)
        if count < self._width:
            self._is_over = True
            if count == 0 or self._tail == "drop":
                return None
            missing = self._width - count
            batches += [None] * missing if self._tail == "short" else self._repeated(batches, missing)
        if self._tail == "pad":
            self._before = batches
        # A loader that came to its end may begin anew from its state: there the batches count.
        has_state = self._keeps_state and not self._is_over
        state = copy.deepcopy(self._loader.state_dict()) if has_state else None  # type: ignore[attr-defined]
        return Drawn(batches, count, state)

    def _may_end_after(self, skip: int) -> bool:
        """Whether after `skip` batches there may be fewer than a round has."""
        length = length_of(self._loader)
        return length is None or length - skip < self._width

    def _repeated(self, batches: list[Any], missing: int) -> list[Any]:
        """What those get for whom the last `batches` are too few."""
        if not self._before:
            return list(itertools.islice(itertools.cycle(batches), missing))
        # The one that was kept may not be any more what it was.
        others = [number for number in range(self._width) if number != self._kept]
        wanted = range(self._width - missing, self._width)
        return [self._before[others[0] if number == self._kept else number] for number in wanted]


def keeps_state(loader: Any) -> bool:
    """Whether a loader can tell where it stands, and go on from there."""
    return callable(getattr(loader, "state_dict", None)) and callable(
        getattr(loader, "load_state_dict", None)
    )


def length_of(loader: Any) -> int | None:
    """How many batches a pass has; None where nobody knows."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def rounds_of(batches: int, width: int, tail: Tail) -> int:
    """How many rounds so many batches are."""
    return batches // width if tail == "drop" else -(-batches // width)


def tell_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of all parts of a loader that have one."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = (
        loader,
        getattr(loader, "dataset", None),
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    )
    # A loader's sampler is often that of its batch sampler.
    for part in {id(part): part for part in parts}.values():
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)


def _begin_anew_after(loader: Any) -> None:
    """Have the passes after this one, which went on from a state, begin where the data does.

    The datasets of Hugging Face begin each pass at the state that they were given, until they are told another epoch.
    """
    for part in (loader, getattr(loader, "dataset", None)):
        if getattr(part, "_starting_state_dict", None) is not None:
            part.load_state_dict(None)  # type: ignore[union-attr]


def _refuse_resumed(loader: Any, skip: int) -> None:
    """Raise where a sampler was resumed too, as a `PackedBatchSampler` can be: twice as many would be left out."""
    step = getattr(getattr(loader, "batch_sampler", None), "start_step", None)
    if isinstance(step, int) and step > 0:
        raise InvalidInputError(
            f"the first {skip} batches are to be left out, and the loader's batch_sampler was resumed by itself, at "
            f"step {step}: load the state into the DispatchLoader alone"
        )


def _without_first(
    loader: Iterable[Any], skip: int, again: int, show: Callable[[int, int], None]
) -> Iterator[Any]:
    """What follows the first `skip` batches, and before that the last `again` of them."""
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
        if next(batches, _NOTHING_MORE) is _NOTHING_MORE:
            raise _too_few(number, skip)


class _Rest:
    """A batch sampler without its first batches, of which nobody reads the data."""

    def __init__(
        self, sampler: Iterable[Any], skip: int, again: int, show: Callable[[int, int], None]
    ) -> None:
        self._sampler = sampler
        self._skip = skip
        self._again = again
        self._show = show

    def __iter__(self) -> Iterator[Any]:
        # Not before the first draw: a DataLoader with workers makes two iterators and draws from one.
        indices = iter(self._sampler)
        _leave_out(indices, self._skip, self._again, self._show)
        yield from indices


def _with_sampler(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """A loader as `loader`, which does not let go of its sampler, with another one."""
    kept = (
        "num_workers",
        "collate_fn",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
        "generator",
        "prefetch_factor",
    )
    return DataLoader(loader.dataset, batch_sampler=sampler, **{name: getattr(loader, name) for name in kept})


def _too_few(found: int, skip: int) -> InvalidInputError:
    return InvalidInputError(
        f"the first {skip} batches are to be left out, and the loader has {found}: this is not the data that the state "
        "or skip_batches is meant for"
    )


def _begun(batches: Iterator[Any]) -> Iterator[Any]:
    """The same batches, of which the first was drawn."""
    first = next(batches, _NOTHING_MORE)
    return iter(()) if first is _NOTHING_MORE else itertools.chain([first], batches)
