"""`PackMix`: an order over the packs of several plans.

Invariants: the order is read-only, and is determined by the plans and the parameters. The packs before a stage of the
parameters are those of the mix with the stages before it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, overload

import numpy as np
from numpy.typing import NDArray

from tundish.errors import NoSuchPackError, PlanFormatError, PlanMismatchError, format_count
from tundish.packing.arguments.choices import check_sharing
from tundish.packing.arguments.integer_arrays import IntegerArray, as_integer_array
from tundish.packing.arguments.integers import as_integer
from tundish.packing.arguments.paths import as_absolute, as_new_folder
from tundish.packing.mixing.arguments import as_plans, as_weights
from tundish.packing.mixing.folder import open_mix, save_mix
from tundish.packing.mixing.ordering import agreed_order
from tundish.packing.mixing.parameters import MixParameters
from tundish.packing.plan.pack import pack_numbers
from tundish.packing.plan.pack_plan import PackPlan

__all__ = ["MixedPack", "PackMix"]

# Packs that are counted together: some megabytes of temporaries.
PACKS_AT_ONCE = 1 << 18
# Packs that are made together when a mix is iterated.
ITERATED = 1 << 10


class MixedPack(NamedTuple):
    """A pack of a mix: the number of its plan in the mix, and the number of the pack in the plan."""

    plan: int
    pack: int


class PackMix:
    """An order over the packs of several plans, in which each plan has the share that its weight says.

    `tundish.mix` and `PackMix.load` make mixes. `PackedDataset` and `PackedBatchSampler` take a mix in the place of a
    plan. `mix[i]` says which pack comes in place *i*, and `lookup` says it for many places at once.

    Attributes:
        plans: The plans, in the order in which they were given.
        packs: The packs in their order, numbered through all plans, (packs of the mix,), int32 or int64, read-only.
            Pack *k* of plan *p* has the number *k* + the packs of all plans before *p*.
        max_length: The most tokens of a pack, the largest `max_length` of the plans.
        weights: The weight of each plan; after `resume`, those that hold at the end.
        seed: The seed of the orders in which each plan's packs come.
        exhausted: What happens when a plan is through: "repeat", "stop" or "drop".
        epochs: Epochs after which a plan is through; None if it never is.
        num_packs: The most packs of the mix, or None.
        fingerprint: 32 hexadecimal digits, a hash of the plans and everything else that determines the order.
        path: The folder that `packs` is mapped from; None for a mix in memory.

    Example:
        >>> import tundish as td
        >>> mix = td.mix([td.pack([8] * 9, 8), td.pack([8] * 9, 8)], [2, 1], num_packs=6)
        >>> len(mix), [mix[place].plan for place in range(6)]
        (6, [0, 0, 1, 0, 0, 1])
    """

    def __init__(
        self,
        plans: Sequence[PackPlan],
        packs: IntegerArray,
        parameters: MixParameters,
        *,
        path: Path | None = None,
    ) -> None:
        """Make a mix of an order that was computed or checked; `mix`, `resume` and `load` call it."""
        self.plans = tuple(plans)
        # Unpickled arrays are writable.
        packs.flags.writeable = False
        self.packs = packs
        self.path = path
        self.max_length: int = max(plan.max_length for plan in self.plans)
        self.weights: list[float] = list(parameters.stages[-1].weights)
        self.seed: int = parameters.seed
        self.exhausted: str = parameters.exhausted
        self.epochs: int | None = parameters.epochs
        self.num_packs: int | None = parameters.num_packs
        self.fingerprint: str = parameters.fingerprint
        self._parameters = parameters
        # The number of the first pack of each plan, and one past the last.
        self._bounds = np.cumsum([0, *map(len, self.plans)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.packs)

    @overload
    def __getitem__(self, index: int) -> MixedPack: ...
    @overload
    def __getitem__(self, index: slice) -> list[MixedPack]: ...
    def __getitem__(self, index: int | slice) -> MixedPack | list[MixedPack]:
        """Return the pack in place `index`; negative numbers count from the end, a slice gives a list.

        Raises:
            NoSuchPackError: There is no such place (an `IndexError`).
            InvalidTypeError: The index is neither an integer nor a slice of integers.
            InvalidInputError: The step of a slice is 0.
        """
        number = pack_numbers(index, len(self), "mix")
        if isinstance(number, range):
            return self._located(np.arange(number.start, number.stop, number.step, dtype=np.int64))
        return self._located(np.array([number], dtype=np.int64))[0]

    def __iter__(self) -> Iterator[MixedPack]:
        for start in range(0, len(self), ITERATED):
            yield from self._located(np.arange(start, min(start + ITERATED, len(self)), dtype=np.int64))

    def _located(self, places: NDArray[np.int64]) -> list[MixedPack]:
        plans, packs = self.lookup(places)
        return list(map(MixedPack, plans.tolist(), packs.tolist()))

    def __repr__(self) -> str:
        where = f", path={str(self.path)!r}" if self.path else ""
        return (
            f"PackMix({len(self)} packs of {format_count(len(self.plans), 'plan')}, weights={self.weights}, "
            f"exhausted={self.exhausted!r}, fingerprint={self.fingerprint[:12]}…{where})"
        )

    def lookup(self, places: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return which packs come in many places.

        Args:
            places: Integers, shape (k,), each in 0 … len(mix) - 1.

        Returns:
            The number of each pack's plan, and the number of the pack in its plan, both int64, shape (k,).

        Raises:
            NoSuchPackError: A place is out of range.
            PlanFormatError: The mix is damaged: it names a pack that no plan has.

        Example:
            >>> import tundish as td
            >>> mix = td.mix([td.pack([8] * 9, 8), td.pack([8], 8)], [1, 1], exhausted="drop")
            >>> plans, packs = mix.lookup([0, 1, 2])
            >>> plans.tolist(), packs.tolist()
            ([0, 1, 0], [2, 0, 6])
        """
        asked = as_integer_array(places, "places")
        outside = (asked < 0) | (asked >= len(self))
        if outside.any():
            raise NoSuchPackError(f"pack {asked[outside][0]} does not exist: the mix has {len(self)} packs")
        packs = np.asarray(self.packs)[asked].astype(np.int64)
        return self._split(packs)

    def _split(self, packs: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The plan of each pack, and its number there, for packs that are numbered through all plans."""
        if len(packs) and not (packs.min() >= 0 and packs.max() < self._bounds[-1]):
            raise PlanFormatError(
                f"the mix{f' in {self.path}' if self.path else ''} names packs from {packs.min()} to {packs.max()}, "
                f"and its plans have {self._bounds[-1]}: it is damaged, make it again"
            )
        # Plans without packs begin where the next plan begins; the last that begins there has the pack.
        plans = np.searchsorted(self._bounds[:-1], packs, side="right") - 1
        return plans, packs - self._bounds[plans]

    def stats(self) -> dict[str, Any]:
        """Count what the mix takes of each plan.

        Returns:
            packs: Packs of the mix.
            asked: The share that each plan's weight asks for, a list of floats that add up to 1; after `resume`, the
                mean over all packs.
            given: The share of the packs that each plan has; 0.0 in an empty mix.
            taken: Packs of each plan in the mix; those that come again count again.
            epochs: How often the mix goes through each plan: `taken` over its packs, 0.0 for a plan without packs.

        Raises:
            PlanFormatError: The mix is damaged.

        Example:
            >>> import tundish as td
            >>> mix = td.mix([td.pack([8] * 9, 8), td.pack([8], 8)], [3, 1], num_packs=8)
            >>> stats = mix.stats()
            >>> stats["asked"], stats["given"], stats["taken"], stats["epochs"][1]
            ([0.75, 0.25], [0.75, 0.25], [6, 2], 2.0)
        """
        taken = np.zeros(len(self.plans), dtype=np.int64)
        for start in range(0, len(self), PACKS_AT_ONCE):
            packs = np.asarray(self.packs[start : start + PACKS_AT_ONCE]).astype(np.int64)
            taken += np.bincount(self._split(packs)[0], minlength=len(self.plans))
        counts = np.maximum(np.diff(self._bounds), 1)
        return {
            "packs": len(self),
            "asked": self._asked().tolist(),
            "given": (taken / max(len(self), 1)).tolist(),
            "taken": taken.tolist(),
            "epochs": (taken / counts).tolist(),
        }

    def _asked(self) -> NDArray[np.float64]:
        """The share that the weights ask for, as a mean over the stages."""
        stages = self._parameters.stages
        stops = [*(stage.start for stage in stages[1:]), len(self)]
        packs = [stop - stage.start for stage, stop in zip(stages, stops, strict=True)]
        if not any(packs):
            packs[-1] = 1
        shares = np.zeros(len(self.plans))
        for stage, count in zip(stages, packs, strict=True):
            # The sum of large weights may be beyond every float.
            weights = np.array(stage.weights) / max(stage.weights)
            shares += weights / weights.sum() * (count / sum(packs))
        return shares

    def resume(
        self,
        *,
        weights: Sequence[float],
        after: int,
        share: bool = False,
        group: Any = None,
        progress: bool | None = None,
    ) -> PackMix:
        """Change the weights after `after` packs, and keep the packs before.

        The packs before place `after` stay as they are. From there on each plan goes on where it is: no pack comes
        again before its plan is through. The new shares are counted from there on. `exhausted`, `epochs` and
        `num_packs` are those of the mix, and count the packs before `after` too.

        A state of a `PackedBatchSampler` over this mix, saved after at most `after` packs, can be loaded by one over
        the result.

        Args:
            weights: A weight for each plan, as in `tundish.mix`. With the weight 0 a plan comes no more.
            after: How many packs were consumed, 0 … len(mix). Of a sampler's state it is
                `state["step"] * sampler.global_batch`.
            share: As in `tundish.mix`.
            group: As in `tundish.mix`.
            progress: Show progress; by default on a terminal.

        Returns:
            The new mix; this one stays as it is.

        Raises:
            InvalidTypeError: An argument is of the wrong type.
            InvalidInputError: `after` is out of range, or the weights cannot be used.
            TundishError: As `tundish.mix`.

        Example:
            >>> import tundish as td
            >>> mix = td.mix([td.pack([8] * 9, 8), td.pack([8] * 9, 8)], [1, 1], num_packs=12)
            >>> changed = mix.resume(weights=[0, 1], after=4)
            >>> changed[:4] == mix[:4], [pack.plan for pack in changed[4:]]
            (True, [1, 1, 1, 1, 1, 1, 1, 1])
        """

        def resumed() -> MixParameters:
            check_sharing(share, group)
            start = as_integer(after, "after", 0, len(self))
            return self._parameters.resumed(start, as_weights(weights, len(self.plans)))

        parameters, packs = agreed_order(resumed, self.packs, share=share, group=group, progress=progress)
        return PackMix(self.plans, packs, parameters)

    def packs_in_common(self, fingerprint: str) -> int | None:
        """The number of packs that this mix has in common with a mix that it was resumed from.

        Args:
            fingerprint: The fingerprint of the other mix.

        Returns:
            The number of packs, all at the beginning; None if this mix was not resumed from it.
        """
        return self._parameters.packs_in_common(fingerprint)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Publish the mix as the folder `path`: whole and durable, or not at all.

        The folder holds `mix.json`, and `packs` as `packs.npy`. The plans are not in it: save them too. If the same mix
        already lies there, nothing happens.

        Args:
            path: The folder to make; its parent must exist.

        Raises:
            AlreadyExistsError: Something else lies there.
            NotFoundError: The parent folder does not exist.
            StorageError: The file system refused (read-only, full).

        Example:
            >>> import tempfile, tundish as td
            >>> plans, folder = [td.pack([8] * 9, 8), td.pack([8] * 9, 8)], tempfile.mkdtemp() + "/mix"
            >>> td.mix(plans, [2, 1]).save(folder)
            >>> td.PackMix.load(folder, plans).weights
            [2.0, 1.0]
        """
        save_mix(as_new_folder(path, "path"), self._parameters, self.packs)

    @classmethod
    def load(cls, path: str | os.PathLike[str], plans: Sequence[Any]) -> Self:
        """Map a mix from its folder, in constant memory.

        Replacing or removing the files later changes nothing. Truncating one ends a process that reads it (SIGBUS).

        Args:
            path: A folder made by `save`.
            plans: The plans (or datasets) of the mix, in their order.

        Returns:
            The mix, whose `packs` are mapped from the file.

        Raises:
            NotFoundError: The folder or one of its files is missing.
            PlanFormatError: A file is damaged, or of another version; the message names it.
            PlanMismatchError: The plans are not those of the mix.
            StorageError: The file system refused.

        Example:
            >>> import tempfile, tundish as td
            >>> plans, folder = [td.pack([8] * 9, 8), td.pack([8] * 9, 8)], tempfile.mkdtemp() + "/mix"
            >>> mix = td.mix(plans, [2, 1])
            >>> mix.save(folder)
            >>> td.PackMix.load(folder, plans)[:3] == mix[:3]
            True
        """
        folder, given = as_absolute(path, "path"), as_plans(plans)
        parameters, packs = open_mix(folder)
        expected = [plan.fingerprint for plan in parameters.plans]
        found = [plan.fingerprint for plan in given]
        if len(found) != len(expected):
            raise PlanMismatchError(
                f"{folder} is a mix of {format_count(len(expected), 'plan')}, and {len(found)} are given: give all of "
                "them, in the order in which they were mixed"
            )
        for number, (mine, theirs) in enumerate(zip(expected, found, strict=True)):
            if mine != theirs:
                raise PlanMismatchError(
                    f"{folder} was made with another plan {number}: its fingerprint is {mine}, that of the given one "
                    f"is {theirs}. Give the plans of the mix in their order, or make the mix again"
                )
        return cls(given, packs, parameters, path=folder)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is not None:
            return _mix_in_folder, (type(self), self.path, self.plans, self.fingerprint)
        return type(self), (self.plans, self.packs, self._parameters)


def _mix_in_folder(
    mix_class: type[PackMix], path: Path, plans: Sequence[PackPlan], fingerprint: str
) -> PackMix:
    """Map the mix that was pickled as its folder."""
    mix = mix_class.load(path, plans)
    if mix.fingerprint != fingerprint:
        raise PlanMismatchError(f"{path} holds another mix now than the one that was pickled")
    return mix
