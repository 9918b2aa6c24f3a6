"""`loader`: the dataset, the sampler and the collator of packs in one, with a state that counts what was given out.

Invariants:
1. A state leads to the batch after the last one that an iteration gave its caller. Batches that workers made ahead do
   not count.
2. The order of packs is that of `PackedBatchSampler`, or of the stream. The loader counts, and draws nothing.
3. Without shuffling, each pack comes once on all ranks together, and all ranks make the same number of steps.
4. A state is loaded completely or refused.
5. An iteration takes no number from torch's global generator. A resumed run then draws what an unbroken one draws.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypedDict

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tundish.errors import (
    InvalidInputError,
    InvalidTypeError,
    LoaderHasNoDatasetError,
    PlanMismatchError,
    StateMismatchError,
    format_count,
    format_type,
)
from tundish.packing.arguments import as_integer, check_flag
from tundish.packing.batches.collator import PackedCollator
from tundish.packing.batches.loss_weights import num_items_in_batch as count_items
from tundish.packing.batches.sampler import (
    LARGEST_GLOBAL_BATCH,
    LARGEST_SEED,
    PackedBatchSampler,
    running_ranks,
)
from tundish.packing.batches.stream_batches import StreamProgress, StreamSource
from tundish.packing.dataset import PackedDataset
from tundish.packing.item import IGNORED_LABEL
from tundish.packing.mixing import PackMix
from tundish.packing.plan import PackPlan
from tundish.packing.stream import PackedStream
from tundish.saved_states import check_state

_logger = logging.getLogger("tundish.packing")

_KIND, _VERSION = "PackLoader", 1
_MOST_WORKERS = 2**16
_MOST_BATCHES = 2**20


class PackLoaderStats(TypedDict):
    """Counts of a `PackLoader` on this rank."""

    epoch: int
    """The epoch under way, or the next one."""
    step: int
    """Batches of this epoch that were given out, those before a resume included."""
    batches: int
    """Batches that this loader has given out in all."""
    next_seconds: float
    """Seconds that the loop waited for them."""


def loader(
    samples: Any,
    plan: PackPlan | PackMix | None = None,
    *,
    batch_size: int,
    seed: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
    num_workers: int = 0,
    collator: Callable[[list[Any]], Any] | None = None,
    drop_last: bool = False,
    shuffle: bool = True,
    group_by_longest: bool = False,
    num_items_in_batch: bool | int = False,
    pin_memory: bool = False,
    prefetch_factor: int | None = None,
    multiprocessing_context: Any = None,
    **options: Any,
) -> PackLoader:
    """Return a loader of the batches of this rank, whose state leads to the batch after the last one given out.

    Args:
        samples: What the plan was made for, as in `PackedDataset`; or a `PackedDataset`, without a plan; or a
            `PackedStream`, which this rank packs for itself.
        plan: A plan or a mix. A mix keeps its own order, whatever `shuffle` is.
        batch_size: Packs of a batch.
        seed: As in `PackedBatchSampler`.
        rank: As in `PackedBatchSampler`.
        world_size: As in `PackedBatchSampler`. 1 alone means rank 0 of 1, as `DispatchLoader` takes it.
        num_workers: Processes that make batches. Each worker packs its part of a stream, as `PackedStream` says.
        collator: The `collate_fn` that makes a batch of a list of items; None for `PackedCollator()`.
        drop_last: Leave out the packs that do not fill a last global batch; of a stream, those that do not fill a last
            batch of a worker. If it is False, a shuffled epoch repeats the packs that it began with to fill the last
            global batch.
        shuffle: False is for evaluation: packs come in the plan's order, and each comes exactly once on all ranks
            together. A last batch may have fewer packs. If a rank has none in the last step, it gets a pack whose
            labels are all -100, and `is_padding` is True, so that all ranks make the same steps. A stream is never
            shuffled.
        group_by_longest: As in `PackedBatchSampler`.
        num_items_in_batch: Add the number of learned tokens of a step, on all ranks, to each batch, as the float
            `num_items_in_batch`: see `td.packing.num_items_in_batch`. It counts over so many batches, one for each
            accumulation step; True is 1. Asking for a batch is then collective over the job's ranks, which must make
            the same number of steps. Take states after whole groups: a resumed loader begins a new one.
        pin_memory: As in torch's `DataLoader`.
        prefetch_factor: As in torch's `DataLoader`.
        multiprocessing_context: As in torch's `DataLoader`.
        **options: Further arguments of `PackedDataset`, for example `columns`.

    Returns:
        A `PackLoader`. Its batches are on the CPU.

    Raises:
        InvalidTypeError: An argument is of a wrong type.
        InvalidInputError: An argument is out of range, contradicts another one, or has no meaning for a stream.
        PlanMismatchError: The samples do not fit the plan.

    Example:
        >>> import tundish as td
        >>> samples = [[1, 2, 3], [4, 5], [6, 7, 8]]
        >>> loader = td.loader(samples, td.pack([3, 2, 3], 4), batch_size=1, shuffle=False)
        >>> [batch["input_ids"].tolist() for batch in loader]
        [[[1, 2, 3, 4]], [[5, 6, 7, 8]]]
    """
    if unknown := [name for name in options if name not in inspect.signature(PackedDataset).parameters]:
        raise InvalidTypeError(
            f"td.loader has no argument {', '.join(map(repr, unknown))}, nor has PackedDataset"
        )
    workers = as_integer(num_workers, "num_workers", 0, _MOST_WORKERS)
    if prefetch_factor is not None and not workers:
        raise InvalidInputError("prefetch_factor is for workers: give num_workers > 0 too, or leave it out")
    check_flag(shuffle, "shuffle")
    check_flag(drop_last, "drop_last")
    collate = PackedCollator() if collator is None else collator
    if isinstance(collate, type) and issubclass(collate, PackedCollator):
        raise InvalidTypeError(
            f"collator is the class {collate.__name__}: give an object, for example {collate.__name__}()"
        )
    if not callable(collate):
        raise InvalidTypeError(
            f"collator is {format_type(collate)}: give a function that makes a batch of a list of items, or None"
        )
    batches_a_step = (
        int(num_items_in_batch)
        if isinstance(num_items_in_batch, bool)
        else as_integer(num_items_in_batch, "num_items_in_batch", 1, _MOST_BATCHES)
    )
    source: _PlanSource | StreamSource
    if isinstance(samples, PackedStream):
        given = {
            "plan": plan is not None,
            "seed": seed != 0,
            "rank": rank is not None,
            "world_size": world_size is not None,
            "group_by_longest": group_by_longest,
        }
        _refuse_beside_stream([*(name for name, is_given in given.items() if is_given), *options])
        size = as_integer(batch_size, "batch_size", 1, LARGEST_GLOBAL_BATCH)
        source = StreamSource(samples, collate, batch_size=size, drop_last=drop_last, workers=workers)
    else:
        dataset = _as_dataset(samples, plan, options)
        if rank is None and world_size == 1:
            rank = 0
        sampler = PackedBatchSampler(
            dataset.plan,
            batch_size,
            rank,
            world_size,
            seed,
            # A mix has an order of its own.
            shuffle=shuffle and not isinstance(dataset.plan, PackMix),
            drop_last=drop_last,
            group_by_longest=group_by_longest,
        )
        if not len(sampler):
            raise InvalidInputError(
                f"an epoch has no batch: the plan has {format_count(len(dataset), 'pack')}, and a step takes "
                f"{sampler.global_batch} on all ranks. Give more samples, a smaller batch_size, or leave out drop_last"
            )
        ranks = running_ranks()[1]
        if batches_a_step and sampler.world_size != ranks:
            raise InvalidInputError(
                f"num_items_in_batch counts over all {ranks} ranks of the job, and world_size is {sampler.world_size}: "
                "leave it out, and call td.packing.num_items_in_batch(batches, group=...) in the loop"
            )
        source = _PlanSource(dataset, sampler, collate, is_each_once=not (shuffle or drop_last))
    # Torch takes the seeds of its workers from the global generator, unless it has another one.
    generator = torch.Generator()
    batches = DataLoader(
        source.batches,
        batch_size=None,
        sampler=source.steps,
        collate_fn=_unchanged,
        generator=generator,
        num_workers=workers,
        pin_memory=pin_memory,
        prefetch_factor=prefetch_factor,
        multiprocessing_context=multiprocessing_context,
    )
    return PackLoader(source, batches, generator, batches_a_step)


class PackLoader:
    """Iterates over this rank's batches, one epoch after the other; `tundish.loader` makes it.

    An iteration goes through the rest of the epoch after `load_state_dict`, else through a whole one. The next one goes
    through the next epoch, whether `set_epoch` is called or not. After a `break`, the epoch begins anew.

    Attributes:
        is_padding: Whether the last batch only keeps this rank in step with the others; see `shuffle` of
            `tundish.loader`.

    Iterating raises the errors of `PackedDataset`, `PackedStream` and the collator.

    Example:
        >>> import tundish as td
        >>> plan = td.pack([8] * 6, 8)
        >>> loader = td.loader([[1] * 8] * 6, plan, batch_size=2)
        >>> for epoch in range(loader.epoch, 2):
        ...     for batch in loader:
        ...         state = loader.state_dict()  # into the checkpoint
        >>> loader.epoch, loader.stats()["batches"]
        (2, 6)
    """

    # Tells a DispatchLoader that the order depends on the epoch.
    advances_epoch = True

    def __init__(
        self,
        source: _PlanSource | StreamSource,
        batches: DataLoader[Any],
        generator: torch.Generator,
        batches_a_step: int,
    ) -> None:
        self._source = source
        self._dataloader = batches
        self._generator = generator
        self._batches_a_step = batches_a_step
        self._progress: _PlanProgress | StreamProgress = source.progress()
        # Whether the newest iteration ended, and whether it gave its last batch: the next one goes through the next
        # epoch.
        self._is_complete = self._gave_last = False
        # A `DispatchLoader` over it logs epochs itself.
        self.logs_epochs = True
        self._batches = 0
        self._next_seconds = 0.0
        self.is_padding = False

    @property
    def batch_size(self) -> int:
        """Packs of a batch."""
        return self._source.batch_size

    @property
    def num_workers(self) -> int:
        """Processes that make batches."""
        return self._dataloader.num_workers

    @property
    def rank(self) -> int | None:
        """This rank's number among those that share the packs; None for a stream."""
        return self._source.rank

    @property
    def world_size(self) -> int | None:
        """The number of ranks that share the packs; None for a stream."""
        return self._source.world_size

    @property
    def epoch(self) -> int:
        """The epoch under way, or that of the next iteration."""
        return self._source.epoch + self._is_complete

    @property
    def step(self) -> int:
        """Batches of this epoch that were given out, those before a resume included."""
        return 0 if self._is_complete else self._progress.step

    @property
    def resumes_on_any_ranks(self) -> bool:
        """Whether a state is the same on all ranks, and loads on any number of them: not that of a stream."""
        return self._source.resumes_on_any_ranks

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless it is the one under way; not needed from one epoch to the next.

        Args:
            epoch: 0 … 2³² − 1; the same on every rank. A stream hands it on to its source.

        Raises:
            InvalidTypeError: It is not an integer.
            InvalidInputError: It is out of range.

        Example:
            >>> import tundish as td
            >>> loader = td.loader([[1] * 8] * 6, td.pack([8] * 6, 8), batch_size=2)
            >>> loader.set_epoch(3)
            >>> loader.epoch
            3
        """
        epoch = as_integer(epoch, "epoch", 0, LARGEST_SEED)
        if epoch != self._source.epoch or self._is_complete:
            self._source.set_epoch(epoch)
            self._restart(self._source.progress())

    def __len__(self) -> int:
        """Count the batches of a whole epoch, the same on every rank and after a resume.

        Raises:
            InvalidTypeError: It is a stream without `num_packs`.
        """
        if self._source.length is None:
            raise InvalidTypeError(
                "the number of batches is not known: a PackedStream has no length without num_packs"
            )
        return self._source.length

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the epoch after `load_state_dict`, else over a whole one."""
        if self._is_complete or self._gave_last:
            self._source.set_epoch(self._source.epoch + 1)
        self._restart(self._source.begin())
        self._generator.manual_seed(self._source.seed << 32 | self._source.epoch)
        return _Iteration(self, iter(self._dataloader), self._progress)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch that was given out.

        Returns:
            Plain numbers, words and lists. For a plan or a mix it is the same on all ranks, and has some hundred bytes.
            For a stream each rank has its own, with what `PackedStream.state_dict` holds for each worker.

        Example:
            >>> import tundish as td
            >>> loader = td.loader([[1] * 8] * 6, td.pack([8] * 6, 8), batch_size=2)
            >>> batch = next(iter(loader))
            >>> loader.state_dict()["sampler"]["step"]
            1
        """
        state = self._source.state_dict(self._progress)
        return {"kind": _KIND, "version": _VERSION, "of": self._source.name, **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next iteration begin with the batch after the last one that was given out before `state`.

        The number of ranks may be another one for a plan or a mix, with the same global batch (`batch_size` ×
        `world_size`). A stream needs as many workers as before. After the state of a whole epoch, the next iteration is
        empty. A refused state changes nothing.

        Args:
            state: As `state_dict` returned it, for a plan or a mix on any rank.

        Raises:
            StateMismatchError: It is no state of such a loader, is damaged, or was saved with another plan, seed,
                global batch or option, or with another number of workers of a stream.

        Example:
            >>> import tundish as td
            >>> loader = td.loader([[1] * 8] * 6, td.pack([8] * 6, 8), batch_size=2)
            >>> batch = next(iter(loader))
            >>> loader.load_state_dict(loader.state_dict())
            >>> len(list(loader))
            2
        """
        check_state(state, _KIND, _VERSION, ("of",))
        if state["of"] != self._source.name:
            raise StateMismatchError(
                f"the state is of a loader over {state['of']!r:.100}, and this one is over {self._source.name!r}"
            )
        check_state(state, _KIND, _VERSION, self._source.state_keys)
        self._source.load_state_dict(state)
        self._restart(self._source.progress())
        if self._source.logs():
            _logger.info("resuming epoch %d after %s", self.epoch, _counted(self.step))

    def stats(self) -> PackLoaderStats:
        """Return counts of this rank.

        Returns:
            Epoch, batches and seconds; see `PackLoaderStats`.

        Example:
            >>> import tundish as td
            >>> loader = td.loader([[1] * 8] * 6, td.pack([8] * 6, 8), batch_size=2)
            >>> batch = next(iter(loader))
            >>> loader.stats()["batches"]
            1
        """
        return PackLoaderStats(
            epoch=self.epoch, step=self.step, batches=self._batches, next_seconds=self._next_seconds
        )

    def __repr__(self) -> str:
        steps = "" if self._source.length is None else f" of {self._source.length}"
        return (
            f"PackLoader({self._source.described()}, batch_size={self.batch_size}, num_workers={self.num_workers}, "
            f"epoch={self.epoch}, step={self.step}{steps})"
        )

    @property
    def dataset(self) -> NoReturn:
        """Raise `AttributeError`: another loader over the dataset would split the packs once more."""
        raise LoaderHasNoDatasetError(
            "a loader of packs has no dataset to make another loader over: it gives each rank its own batches already. "
            "Do not give it to accelerator.prepare_data_loader or skip_first_batches: iterate over it as it is, and "
            "resume with load_state_dict"
        )

    @property
    def _distributed(self) -> Any:
        """How the source of a stream is split by node: a `DispatchLoader` refuses to read one rank's part for all."""
        return self._source.distributed

    def _restart(self, progress: _PlanProgress | StreamProgress) -> None:
        self._progress = progress
        self._is_complete = self._gave_last = False

    def _give(self, progress: _PlanProgress | StreamProgress, mark: Any) -> None:
        """Count a batch that an iteration gives out."""
        self.is_padding = progress.advance(mark)
        self._batches += 1
        self._gave_last = progress is self._progress and progress.step == self._source.length

    def _end(
        self, progress: _PlanProgress | StreamProgress, batches: int, seconds: float, waited: float
    ) -> None:
        """Count the end of an iteration."""
        if progress is not self._progress:
            # Another iteration was begun since, or the loader went to another epoch.
            return
        if batches and self.logs_epochs and self._source.logs():
            _logger.info(
                "epoch %d: %s in %.1f s, of which the loop waited %.1f s for them",
                self.epoch,
                _counted(batches),
                seconds,
                waited,
            )
        self._is_complete = True


class _Iteration(Iterator[Any]):
    """Gives the batches of one epoch, and counts each as it gives it.

    The loader does not refer to it, so that workers end when the loop is left.
    """

    def __init__(
        self, loader: PackLoader, made: Iterator[Any], progress: _PlanProgress | StreamProgress
    ) -> None:
        self._loader = loader
        self._progress = progress
        # Batches, each with its mark.
        self._made = progress.marked(made)
        # Those that are made and not given out.
        self._ready: deque[tuple[Any, Any]] = deque()
        self._is_over = False
        self._given = 0
        self._began = time.monotonic()
        self._waited = 0.0

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        if not self._ready:
            began = time.monotonic()
            try:
                self._make()
            except BaseException:
                # The next call must not find the end of the epoch.
                self._is_over = True
                raise
            waited = time.monotonic() - began
            self._waited += waited
            self._loader._next_seconds += waited
        if not self._ready:
            self._is_over = True
            self._loader._end(self._progress, self._given, time.monotonic() - self._began, self._waited)
            raise StopIteration
        batch, mark = self._ready.popleft()
        self._given += 1
        self._loader._give(self._progress, mark)
        return batch

    def _make(self) -> None:
        """Make the next batch ready, or those of a step; none at the end."""
        size = self._loader._batches_a_step
        if not size:
            self._ready.extend(itertools.islice(self._made, 1))
            return
        ready = []

        def draw() -> Iterator[Any]:
            for batch, mark in itertools.islice(self._made, size):
                ready.append((batch, mark))
                yield batch

        # If a batch cannot be made on one rank, all ranks raise.
        items = count_items(draw()).item()
        for batch, _ in ready:
            batch["num_items_in_batch"] = items
        self._ready.extend(ready)


# ---- Packs of a plan or a mix ----


class _PlanSource:
    """The batches of this rank of a plan or a mix.

    Args:
        dataset: The packs.
        sampler: Their order.
        collate: Makes a batch of items.
        is_each_once: Whether the last global batch is left as it is, without repeated packs.

    Attributes:
        batches: Makes the batch of a list of packs.
        steps: The packs of each step.
        length: Steps of an epoch.
    """

    name = "packs of a plan"
    resumes_on_any_ranks = True
    state_keys = ("sampler",)
    distributed = None

    def __init__(
        self,
        dataset: PackedDataset,
        sampler: PackedBatchSampler,
        collate: Callable[[list[Any]], Any],
        *,
        is_each_once: bool,
    ) -> None:
        self.batches = _PlanBatches(dataset, collate)
        self.steps = _StepsOnce(sampler, len(dataset)) if is_each_once else sampler
        self.length: int | None = len(sampler)
        self.seed = sampler.seed
        self.batch_size = sampler.batch_size
        self.rank: int | None = sampler.rank
        self.world_size: int | None = sampler.world_size
        self._sampler = sampler
        # In the last step, this rank may have no pack.
        own = self.steps.count(len(sampler) - 1) if isinstance(self.steps, _StepsOnce) else 1
        self._padding_step = None if own > 0 else len(sampler) - 1

    @property
    def epoch(self) -> int:
        return self._sampler.epoch

    def logs(self) -> bool:
        return self.rank == 0

    def described(self) -> str:
        what = "a mix" if isinstance(self.batches.dataset.plan, PackMix) else "a plan"
        return f"{what} of {len(self.batches.dataset)} packs, rank {self.rank} of {self.world_size}"

    def set_epoch(self, epoch: int) -> None:
        self._sampler.move(epoch, 0)

    def progress(self) -> _PlanProgress:
        """The progress of an iteration that begins now."""
        return _PlanProgress(self._sampler.start_step, self._padding_step)

    begin = progress

    def state_dict(self, progress: Any) -> dict[str, Any]:
        return {"sampler": self._sampler.state_at(progress.step)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sampler.load_state_dict(state["sampler"])


class _PlanProgress:
    """How far an iteration over packs is.

    Attributes:
        step: Steps of the epoch that were given out, or that a resume left out.
    """

    def __init__(self, step: int, padding_step: int | None) -> None:
        self.step = step
        self._padding_step = padding_step

    def marked(self, made: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        return ((batch, None) for batch in made)

    def advance(self, _mark: Any) -> bool:
        """Count a batch that is given out; returns whether it is padding."""
        self.step += 1
        return self.step - 1 == self._padding_step


class _PlanBatches(Dataset[Any]):
    """A dataset whose entry for a list of packs is their batch; for an empty list it is one that teaches nothing."""

    def __init__(self, dataset: PackedDataset, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self._collate = collate

    def __getitem__(self, packs: list[int]) -> Any:
        items = self.dataset.__getitems__(packs or [-1])
        if not packs:
            items[0]["labels"].fill_(IGNORED_LABEL)
        return self._collate(items)


class _StepsOnce:
    """The steps of a sampler that does not shuffle, without the packs that it repeats to fill the last global batch."""

    def __init__(self, sampler: PackedBatchSampler, packs: int) -> None:
        self._sampler = sampler
        self._packs = packs

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[list[int]]:
        for step, packs in enumerate(self._sampler, self._sampler.start_step):
            yield packs[: max(0, self.count(step))]

    def count(self, step: int) -> int:
        """Packs that are left for this rank before a step; below 1 if there is none."""
        sampler = self._sampler
        return self._packs - step * sampler.global_batch - sampler.rank * sampler.batch_size


# ---- The arguments ----


def _as_dataset(samples: Any, plan: PackPlan | PackMix | None, options: Mapping[str, Any]) -> PackedDataset:
    """The packs of a plan, of which `samples` may be the dataset.

    Raises:
        InvalidTypeError, InvalidInputError, PlanMismatchError: As `loader`.
    """
    if isinstance(samples, PackedDataset):
        if options:
            raise InvalidInputError(
                f"samples is a PackedDataset, which has options of its own: give {', '.join(options)} where it is made"
            )
        if plan is not None and getattr(plan, "fingerprint", None) != samples.plan.fingerprint:
            raise PlanMismatchError(
                "samples is a PackedDataset, and plan is not the plan that it was made with: leave the plan out"
            )
        return samples
    if plan is not None:
        return PackedDataset(samples, plan, **options)
    if isinstance(samples, PackPlan | PackMix):
        advice = "the samples that it was made for come first: td.loader(samples, plan, batch_size=...)"
    elif isinstance(samples, IterableDataset) or not hasattr(samples, "__getitem__"):
        advice = "pack a stream as it comes: td.loader(td.PackedStream(samples, max_length), batch_size=...)"
    else:
        advice = "make one, for example td.pack(td.packing.lengths(samples), max_length)"
    raise InvalidTypeError(f"samples is {format_type(samples)}, and no plan is given: {advice}")


def _refuse_beside_stream(names: Sequence[str]) -> None:
    if names:
        raise InvalidInputError(
            f"samples is a PackedStream, for which {', '.join(names)} has no meaning: a stream has an order and "
            "options of its own, and each rank has its own stream; leave it out"
        )


def _counted(batches: int) -> str:
    return f"{batches} batch{'' if batches == 1 else 'es'}"


def _unchanged(batch: Any) -> Any:
    """The `collate_fn` of batches that are made already."""
    return batch
