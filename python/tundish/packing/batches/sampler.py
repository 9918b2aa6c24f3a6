"""`PackedBatchSampler`: the packs that each rank trains on at each step, and where to continue after a stop.

Invariants:
1. The order of global batches depends on the plan, the global batch (`batch_size * world_size`), the seed, the epoch
   and the options. It does not depend on the rank, or on how the global batch is split over ranks. Rank `r` takes the
   `r`-th run of `batch_size` entries of each global batch.
2. Every rank has the same number of steps, without communication.
3. A state is loaded completely or refused.
4. The arguments of a sampler never change: the number of steps and every saved state depend on them.
5. Any step can be reached without walking the steps before it, so that resuming is as fast as starting.
6. Draws are those of `numpy.random.RandomState`, whose stream numpy keeps frozen: a run that was saved under one
   version of numpy continues under another. The permutation is drawn natively, bit for bit the same, so that Ctrl-C
   ends it within 100 ms.
7. Working memory is one permutation, made at the first batch (4 bytes a pack below 2³¹ packs; none without `shuffle`).
   With `group_by_longest` it is also one window of 64 global batches.

Nothing here imports torch.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tundish import _native
from tundish.errors import (
    InvalidInputError,
    InvalidTypeError,
    StateMismatchError,
    format_count,
    format_integer,
    format_type,
)
from tundish.packing.arguments import as_integer, check_flag
from tundish.packing.mixing import PackMix
from tundish.packing.plan import PackPlan
from tundish.saved_states import check_state

_Packs = NDArray[np.integer[Any]]

# Long enough that every step of a window finds similar packs, short enough that the packs of a step stay a random
# choice.
_WINDOW_BATCHES = 64

_KIND, _VERSION = "PackedBatchSampler", 1
LARGEST_SEED = 2**32 - 1
# Packs a step of all ranks together. A larger number is a typing error, and would take the memory of the machine.
LARGEST_GLOBAL_BATCH = 2**24


class PackedBatchSampler:
    """Lists of pack indices for one rank; the `batch_sampler` of a `torch.utils.data.DataLoader`.

    An epoch is a sequence of global batches of `batch_size * world_size` packs; this rank's part of each
    is `batch_size` of them. `len(sampler)` is the number of steps in a whole epoch, the same on every rank.

    Args:
        plan: The packs to draw from: a plan, or a mix of plans (`tundish.mix`).
        batch_size: Packs that a rank takes at each step.
        rank: This process's number, from 0. If left out, it is taken from `torch.distributed` if that is
            initialised, else from the variable `RANK` that torchrun sets, else it is 0. A rank is taken only where
            `world_size` is that of the same job.
        world_size: The number of ranks: give it with `rank`. By default it comes from the same source as the rank, else
            it is 1.
        seed: 0 … 2³² − 1; the same on every rank.
        epoch: The first epoch; `set_epoch` changes it.
        shuffle: Draw a new order of packs each epoch: the default for a plan. `False` keeps the plan's order. A mix has
            an order of its own, which every epoch keeps.
        drop_last: `True` leaves out the packs that do not fill a last global batch. `False` fills it with the packs
            that began the epoch, again and again if there are fewer packs than a global batch.
        group_by_longest: Put packs with similar `longest` pieces into the same step. The cost of attention
            grows with the square of a piece's length, and a step lasts as long as its slowest rank.
            Windows of 64 global batches of the shuffled order are sorted by `longest` and cut into global
            batches. These are then shuffled, and so are the packs within each. So the packs of a step are similar,
            and long and short steps still come in random order.

    Raises:
        InvalidTypeError: An argument is of the wrong type.
        InvalidInputError: An argument is out of range, or contradicts another one.

    Example:
        >>> import tundish as td
        >>> sampler = td.PackedBatchSampler(td.pack([8] * 6, 8), 2, rank=1, world_size=2, shuffle=False)
        >>> list(sampler)
        [[2, 3], [0, 1]]
    """

    def __init__(
        self,
        plan: PackPlan | PackMix,
        batch_size: int,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        epoch: int = 0,
        *,
        shuffle: bool | None = None,
        drop_last: bool = False,
        group_by_longest: bool = False,
    ) -> None:
        if not isinstance(plan, PackPlan | PackMix):
            raise InvalidTypeError(f"plan is {format_type(plan)}: give a PackPlan, as pack returns it")
        is_mix = isinstance(plan, PackMix)
        if shuffle is None:
            shuffle = not is_mix
        check_flag(shuffle, "shuffle")
        check_flag(drop_last, "drop_last")
        check_flag(group_by_longest, "group_by_longest")
        if is_mix and (shuffle or group_by_longest):
            option = "shuffle" if shuffle else "group_by_longest"
            raise InvalidInputError(
                f"{option}=True would undo the shares of the mix, which has a random order already: leave {option} "
                "out, and make the mix with another seed for another order"
            )
        if group_by_longest and not shuffle:
            raise InvalidInputError("group_by_longest changes the order of packs: it needs shuffle=True")
        if (rank is None) != (world_size is None):
            raise InvalidInputError(f"rank is {rank} and world_size is {world_size}: give both, or neither")
        if rank is None:
            rank, world_size = running_ranks()
        self._batch_size = as_integer(batch_size, "batch_size", 1, LARGEST_GLOBAL_BATCH)
        self._world_size = as_integer(world_size, "world_size", 1, LARGEST_GLOBAL_BATCH)
        self._rank = as_integer(rank, "rank", 0, LARGEST_GLOBAL_BATCH)
        if self._rank >= self._world_size:
            raise InvalidInputError(
                f"rank {self._rank} is not below world_size {self._world_size}: ranks count from 0; "
                "give both rank and world_size, or neither"
            )
        if self.global_batch > LARGEST_GLOBAL_BATCH:
            raise InvalidInputError(
                f"batch_size {self._batch_size} x world_size {self._world_size} = {self.global_batch} packs a step; "
                f"there may be {LARGEST_GLOBAL_BATCH}: batch_size counts the packs of one rank"
            )
        self._seed = as_integer(seed, "seed", 0, LARGEST_SEED)
        self._epoch = as_integer(epoch, "epoch", 0, LARGEST_SEED)
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._group_by_longest = group_by_longest
        self._plan = plan
        self._packs = len(plan)
        global_batch = self.global_batch
        self._steps = self._packs // global_batch if drop_last else -(-self._packs // global_batch)
        self._first_step = 0
        self._newest: _Steps | None = None

    def __repr__(self) -> str:
        names = (
            "batch_size",
            "rank",
            "world_size",
            "seed",
            "epoch",
            "shuffle",
            "drop_last",
            "group_by_longest",
        )
        options = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"PackedBatchSampler({format_count(self._steps, 'step')} of {self._plan!r}, {options})"

    @property
    def batch_size(self) -> int:
        """Packs that this rank takes at each step."""
        return self._batch_size

    @property
    def rank(self) -> int:
        """This process's number among the ranks, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._world_size

    @property
    def seed(self) -> int:
        """The seed of the order of packs."""
        return self._seed

    @property
    def shuffle(self) -> bool:
        """Whether each epoch has a new order of packs."""
        return self._shuffle

    @property
    def drop_last(self) -> bool:
        """Whether the packs that do not fill a last global batch are left out."""
        return self._drop_last

    @property
    def group_by_longest(self) -> bool:
        """Whether packs with similar longest pieces are put into the same step."""
        return self._group_by_longest

    @property
    def global_batch(self) -> int:
        """Packs that all ranks together take at each step."""
        return self._batch_size * self._world_size

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration goes through."""
        return self._epoch

    @property
    def start_step(self) -> int:
        """The step that the next iteration starts at: 0, except for the first one after `load_state_dict`."""
        return self._first_step

    def set_epoch(self, epoch: int) -> None:
        """Go to `epoch`: call it on every rank before iterating, as with torch's `DistributedSampler`.

        Another epoch starts at its first step. Naming the current epoch changes nothing, so that a loop may call
        this right after `load_state_dict`.

        Args:
            epoch: 0 … 2³² − 1.

        Raises:
            InvalidTypeError: It is not an integer.
            InvalidInputError: It is out of range.

        Example:
            >>> import tundish as td
            >>> sampler = td.PackedBatchSampler(td.pack([8] * 6, 8), 2, rank=0, world_size=1)
            >>> for epoch in range(2):
            ...     sampler.set_epoch(epoch)
            ...     steps = list(sampler)
            >>> len(steps)
            3
        """
        epoch = as_integer(epoch, "epoch", 0, LARGEST_SEED)
        if epoch != self._epoch:
            self.move(epoch, 0)

    def __len__(self) -> int:
        """Count the steps of a whole epoch, the same on every rank and the same after a resume."""
        return self._steps

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over this rank's steps: a list of `batch_size` pack indices each.

        After `load_state_dict` the first iteration starts at the step that was loaded; every other one
        starts at the epoch's first step. `state_dict` reports the position of the newest iterator.
        """
        self._newest = None
        return _Steps(self)

    def state_dict(self, steps_done: int | None = None) -> dict[str, Any]:
        """Return the position in this epoch: plain integers, booleans and strings.

        A `DataLoader` with workers draws batches ahead of the training loop, and so does one that Accelerate prepared.
        Then pass the number of steps that were trained on, or use `tundish.loader`, which counts them.

        Args:
            steps_done: Steps of this epoch that are done, counted from the epoch's start, also after a resume. The
                default is the number of steps handed out. It is right without workers, and with torchdata's
                `StatefulDataLoader`, which takes this state at each draw.

        Returns:
            The position, and everything that determines the order of global batches.

        Raises:
            InvalidInputError: This iteration did not hand out so many steps, or began after them. Or `steps_done` is
                left out, and a loader draws ahead.

        Example:
            >>> import tundish as td
            >>> sampler = td.PackedBatchSampler(td.pack([8] * 6, 8), 2, rank=0, world_size=1)
            >>> first = next(iter(sampler))
            >>> sampler.state_dict()["step"]
            1
        """
        first, step = self._first_step, self._first_step
        if self._newest is not None:
            first, step = self._newest.first, self._newest.step
        if steps_done is None and self._newest is not None and self._newest.drawn_ahead_by:
            raise InvalidInputError(
                f"{self._newest.drawn_ahead_by} draws batches ahead of the training loop, so that this sampler does "
                "not know how many were trained on: give state_dict(steps_done=...), counted from the epoch's start, "
                "or iterate over td.loader(...), whose state_dict() counts the batches that it gave out"
            )
        if steps_done is not None:
            steps_done = as_integer(steps_done, "steps_done", 0, 2**63 - 1)
            if not first <= steps_done <= step:
                raise InvalidInputError(
                    f"steps_done is {steps_done}, but this iteration began at step {first} of epoch "
                    f"{self._epoch} and has handed out the steps before {step}: count from the epoch's "
                    "start, also after a resume"
                )
            step = steps_done
        return self.state_at(step)

    def state_at(self, step: int) -> dict[str, Any]:
        """The state after a step of this epoch, which was checked."""
        return self._identity() | {"epoch": self._epoch, "step": step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the epoch and step of `state`; the next iteration starts there.

        The rank, and how the global batch is split into `batch_size` and `world_size`, may differ from when
        the state was saved. After the state of a finished epoch, the next iteration is empty. If `set_epoch` has
        already gone to the epoch after it, that epoch starts at its first step instead. A refused state changes
        nothing.

        Over a mix that `PackMix.resume` made, the state may be one of the mix before. It must have been saved within
        the packs that both have in common.

        Args:
            state: A result of `state_dict`.

        Raises:
            StateMismatchError: The state is not one of this class and version, is damaged, or was saved with
                another plan, global batch, seed or option.

        Example:
            >>> import tundish as td
            >>> plan = td.pack([8] * 6, 8)
            >>> sampler = td.PackedBatchSampler(plan, 2, rank=0, world_size=1, shuffle=False)
            >>> first = next(iter(sampler))
            >>> resumed = td.PackedBatchSampler(plan, 2, rank=0, world_size=1, shuffle=False)
            >>> resumed.load_state_dict(sampler.state_dict())
            >>> list(resumed)
            [[2, 3], [4, 5]]
        """
        identity = self._identity()
        check_state(state, _KIND, _VERSION, (*identity, "epoch", "step"))
        kept = self._packs_in_common(state)
        for key, mine in identity.items():
            theirs = _value_of_state(state, key, type(mine))
            if theirs != mine and (kept is None or key not in ("plan", "packs")):
                said = format_integer(theirs) if isinstance(theirs, int) else theirs
                raise StateMismatchError(self._difference(key, mine, said))
        epoch = _number_of_state(state, "epoch", LARGEST_SEED)
        step = _number_of_state(state, "step", self._steps if kept is None else sys.maxsize)
        if kept is not None and step * self.global_batch > kept:
            raise StateMismatchError(
                f"the state was saved after {step} steps of {self.global_batch} packs, and the mix of that run was "
                f"resumed after {kept} packs: resume it with after={step * self.global_batch}"
            )
        if step == self._steps and self._epoch == epoch + 1:
            # torchdata's StatefulDataLoader loads the state of a finished epoch after the loop has called `set_epoch`
            # for the next one. The state must not take the loop back.
            epoch, step = self._epoch, 0
        self.move(epoch, step)

    def _packs_in_common(self, state: Mapping[str, Any]) -> int | None:
        """The number of packs in common with the mix of `state`, if this sampler's mix was resumed from it."""
        plan = state["plan"]
        if not isinstance(self._plan, PackMix) or not isinstance(plan, str):
            return None
        return self._plan.packs_in_common(plan)

    def _identity(self) -> dict[str, Any]:
        """Everything that determines the order of global batches, except the epoch."""
        return {
            "kind": _KIND,
            "version": _VERSION,
            "plan": self._plan.fingerprint,
            "packs": self._packs,
            "global_batch": self.global_batch,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "group_by_longest": self.group_by_longest,
        }

    def _difference(self, key: str, mine: object, theirs: object) -> str:
        if key in ("plan", "packs"):
            what = "fingerprint" if key == "plan" else "number of packs"
            return (
                f"the state was saved with another plan: its {what} is {theirs}, this sampler's is {mine}. "
                "Load the plan of that run, or start the epoch anew"
            )
        if key == "global_batch":
            return (
                f"the state was saved with a global batch of {theirs} packs, this sampler's is "
                f"{self.batch_size} x {self.world_size} ranks = {mine}. "
                f"Choose batch_size and world_size whose product is {theirs}"
            )
        return (
            f"the state was saved with {key}={theirs}, this sampler has {key}={mine}. "
            f"Construct it with {key}={theirs}"
        )

    def move(self, epoch: int, step: int) -> None:
        """Go to a step of an epoch, both of which were checked."""
        self._epoch = epoch
        self._first_step = step
        self._newest = None

    def _begin(self, steps: _Steps) -> int:
        """The first step of an iterator that draws its first batch."""
        first, self._first_step = self._first_step, 0
        self._newest = steps
        return first


class _Steps:
    """Iterates over this rank's steps of an epoch.

    The packs are shuffled (or stay as they are) and repeated from the start as often as the steps take. With
    `group_by_longest`, each window of 64 global batches is sorted by the longest piece and cut into global batches.
    These are then shuffled within the window, and so are the packs within each.

    Attributes:
        first: The step that it began with.
        step: The next step.
        drawn_ahead_by: The loader that draws ahead of the training loop, in words; None if there is none.
    """

    def __init__(self, sampler: PackedBatchSampler) -> None:
        self.first = self.step = 0
        self.drawn_ahead_by: str | None = None
        self._sampler = sampler
        # The seed and the epoch, once it has begun.
        self._draws: tuple[int, int] | None = None
        self._order: _Packs | None = None
        self._window: tuple[int, _Packs] | None = None

    def __iter__(self) -> _Steps:
        return self

    def __next__(self) -> list[int]:
        sampler = self._sampler
        if self._draws is None:
            # Not before the first draw: a DataLoader with workers makes two iterators and draws from one.
            self.first = self.step = sampler._begin(self)
            self._draws = sampler.seed, sampler.epoch
            self.drawn_ahead_by = _loader_ahead()
        if self.step >= len(sampler):
            # Frees the memory.
            self._order = self._window = None
            raise StopIteration
        packs = self._global_batch(self.step, self._draws)
        self.step += 1
        start = sampler.rank * sampler.batch_size
        return packs[start : start + sampler.batch_size].tolist()  # type: ignore[no-any-return]

    def _global_batch(self, step: int, draws: tuple[int, int]) -> _Packs:
        size = self._sampler.global_batch
        if not self._sampler.group_by_longest:
            return self._ordered(step * size, (step + 1) * size, draws)
        number, row = divmod(step, _WINDOW_BATCHES)
        if self._window is None or self._window[0] != number:
            self._window = number, self._grouped(number, draws)
        return self._window[1][row]  # type: ignore[no-any-return]

    def _ordered(self, start: int, stop: int, draws: tuple[int, int]) -> _Packs:
        """The packs at the positions from `start` to `stop` in the order, which repeats from its beginning."""
        packs = len(self._sampler._plan)
        positions = np.arange(start, stop, dtype=np.int64) % packs
        if not self._sampler.shuffle:
            return positions
        if self._order is None:
            self._order = _native.shuffled_indices(packs, *draws)
        return self._order[positions]

    def _grouped(self, number: int, draws: tuple[int, int]) -> _Packs:
        """The packs of window `number`, one row for each global batch.

        An example of two batches of two packs, with longest pieces of 9, 1, 8 and 2 tokens. Sorted and cut, they are
        `[1 2] [8 9]`. The batches are shuffled: `[8 9] [1 2]`. Each batch is shuffled: `[9 8] [1 2]`.
        """
        size = self._sampler.global_batch
        # Packs of a mix are not grouped.
        plan: Any = self._sampler._plan
        first = number * _WINDOW_BATCHES
        batches = min(_WINDOW_BATCHES, len(self._sampler) - first)
        packs = self._ordered(first * size, (first + batches) * size, draws)
        packs = packs[np.argsort(plan.longest[packs], kind="stable")].reshape(batches, size)
        # A stream of its own for each window: a resume then needs the draws of no window before it.
        random = np.random.RandomState((*draws, number))
        packs = packs[random.permutation(batches)]
        # Without this the last rank would always have the longest packs of the step.
        within = np.argsort(random.random_sample(packs.shape), axis=1, kind="stable")
        return np.take_along_axis(packs, within, axis=1)


def _loader_ahead() -> str | None:
    """The loader that asks for a batch and draws ahead of the training loop, in words; None if there is none.

    A sampler sees no more of a loader than its calls: a loader that draws ahead makes several before it gives a batch,
    as a loop does that trains and saves no state.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if module == "accelerate.data_loader":
            return "a loader that Accelerate prepared"
        if module == "torch.utils.data.dataloader":
            iterator: Any = frame.f_locals.get("self")
            if type(iterator).__module__.startswith("torchdata."):
                # It takes a state at each draw.
                return None
            if workers := getattr(iterator, "_num_workers", 0):
                return f"a DataLoader with {format_count(workers, 'worker')}"
        frame = frame.f_back
    return None


def _value_of_state(state: Mapping[str, Any], key: str, kind: type) -> Any:
    """A value of a state, checked for its type; storing may have changed an int to another integer type."""
    value = state[key]
    if kind is int and not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    elif type(value) is kind:
        return value
    raise StateMismatchError(
        f"{key} in the sampler's state is {value!r}, but must be of type {kind.__name__}"
    )


def _number_of_state(state: Mapping[str, Any], key: str, maximum: int) -> int:
    number: int = _value_of_state(state, key, int)
    if not 0 <= number <= maximum:
        raise StateMismatchError(
            f"{key} in the sampler's state is {format_integer(number)}, but must be in 0 … {maximum}: it was edited"
        )
    return number


def running_ranks() -> tuple[int, int]:
    """Rank and world size of this process, from torch.distributed or the environment."""
    # A process that never imported torch.distributed cannot have initialised it.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    found = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    if found["RANK"] is None and found["WORLD_SIZE"] is None:
        return 0, 1
    for name, text in found.items():
        if text is None or not text.isdecimal():
            raise InvalidInputError(
                f"the environment has RANK={found['RANK']} and WORLD_SIZE={found['WORLD_SIZE']}: {name} is "
                "no whole number. Set both as torchrun does, or give rank and world_size"
            )
    return int(found["RANK"] or 0), int(found["WORLD_SIZE"] or 1)
