"""`mix`: an order over the packs of several plans, by weight; `PackMix`: such an order.

Invariants: the order is read-only, and is computed from the parameters alone. The packs before a stage are those of the
mix with the stages before it. The fingerprint is a checksum of all that a saved mix says.
"""

from __future__ import annotations

import errno
import hashlib
import json
import numbers
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Self, overload

import numpy as np
from numpy.typing import NDArray

from tundish import _native
from tundish.errors import (
    AlreadyExistsError,
    InvalidInputError,
    InvalidTypeError,
    NoSuchPackError,
    PlanFormatError,
    PlanMismatchError,
    TundishError,
    format_count,
    format_type,
)
from tundish.packing.arguments import (
    IntegerArray,
    as_absolute,
    as_integer,
    as_integer_array,
    as_optional_integer,
    check_choice,
    check_sharing,
)
from tundish.packing.inspection.display import mix_as_html
from tundish.packing.inspection.plan_stats import mix_stats
from tundish.packing.plan import PackPlan, pack_numbers
from tundish.progress import ProgressLine
from tundish.regular_files import read_regular_file

EXHAUSTED = ("repeat", "stop", "drop")
LARGEST_SEED = 2**32 - 1
# The core says that no memory holds a larger mix.
LARGEST_MIX = 2**48
FORMAT_VERSION = 2
# Another order for the same parameters needs another number here.
ORDER_VERSION = 1
# The largest file that is read: a million plans fit.
LARGEST_FILE = 256 << 20
# Packs that are made together when a mix is iterated.
ITERATED = 1 << 10


def mix(
    plans: Sequence[Any] | Mapping[str, Any],
    weights: Sequence[float] | Mapping[str, float],
    *,
    num_packs: int | None = None,
    epochs: int | None = None,
    seed: int = 0,
    exhausted: str = "repeat",
    share: bool = False,
    group: Any = None,
    progress: bool | None = None,
) -> PackMix:
    """Order the packs of several plans so that each plan has the share that its weight says.

    After any number of packs, each plan is within one pack of its share. This is the blending of Megatron-LM, with one
    difference. `build_blending_indices` takes a pack of the plan that lacks most, which may leave a plan more than a
    pack behind. This function looks only at plans that have had less than their share, and takes the one whose next
    pack is due first (Tijdeman, "The chairman assignment problem", 1980).

    The packs of a plan come in a random order, and in a new one in each epoch. Epoch *e* of plan *p* has the order
    `numpy.random.RandomState([seed, p, e]).shuffle(numpy.arange(len(plan)))`.

    A plan is finished after `epochs` passes. `exhausted` says what the mix does then. The mix ends after `num_packs`
    packs in any case.

    | `exhausted` | the plan | the mix ends |
    |---|---|---|
    | `"repeat"` | goes on in a new order | when all plans are finished |
    | `"stop"` | | when the first plan is finished |
    | `"drop"` | leaves; the others go on, with their weights in proportion | when all plans are finished |

    By default `epochs` is 1. With `exhausted="repeat"` and `num_packs`, it is unlimited: the mix has exactly
    `num_packs` packs. With `"drop"`, shares restart when a plan leaves.

    Args:
        plans: The plans, or the `PackedDataset`s of plans: a list, or a mapping of names to them.
        weights: A number for each plan, in a list or by the plans' names: finite, at least 0, in any unit. With the
            weight 0 a plan takes no part, and its epochs do not count; at least one weight must be above 0. A plan
            without packs must have the weight 0.
        num_packs: The most packs of the mix, 1 … 2⁴⁸.
        epochs: Epochs after which a plan is finished, at least 1.
        seed: 0 … 2³² − 1; the same on every rank.
        exhausted: "repeat", "stop" or "drop".
        share: Make the call collective over the ranks of a torch.distributed job. Every rank passes the same arguments.
            One rank a node computes the order, and all ranks of the node map the same memory.
        group: The process group that shares; by default all ranks.
        progress: Show progress; by default on a terminal.

    Returns:
        The mix: one index for each of its packs, int32 if the plans have up to 2³¹ packs, else int64. To compute it
        takes one more index for each pack of the plans.

    Raises:
        InvalidTypeError: An argument is of the wrong type.
        InvalidInputError: A weight is negative, infinite or not a number; all are 0; there are not as many as plans; a
            plan without packs has a weight; an argument is out of range; or the mix would have more than 2⁴⁸ packs.
        OutOfMemoryError: The system has no memory for the order.
        PeerFailedError: With `share`, another rank failed, and the message carries its error; or ranks ask for
            different mixes.
        KeyboardInterrupt: On Ctrl-C, within 100 ms.

    Example:
        >>> import tundish as td
        >>> web, code = td.pack([8] * 90, 8), td.pack([8] * 10, 8)
        >>> mix = td.mix({"web": web, "code": code}, {"web": 0.7, "code": 0.3}, num_packs=100)
        >>> [mix[place].plan for place in range(10)]
        [0, 0, 1, 0, 0, 1, 0, 0, 1, 0]
        >>> stats = mix.stats()
        >>> dict(zip(stats["names"], stats["epochs"])), stats["tokens"]
        ({'web': 0.7777777777777778, 'code': 3.0}, [560, 240])
    """

    def checked() -> MixParameters:
        check_sharing(share, group)
        check_choice(exhausted, "exhausted", EXHAUSTED)
        names, found = _as_plans(plans)
        most = as_optional_integer(num_packs, "num_packs", 1, LARGEST_MIX)
        most_epochs = as_optional_integer(epochs, "epochs", 1, LARGEST_MIX)
        if most_epochs is None and (exhausted != "repeat" or most is None):
            most_epochs = 1
        return MixParameters(
            plans=tuple(PlanIdentity(plan.fingerprint, len(plan)) for plan in found),
            seed=as_integer(seed, "seed", 0, LARGEST_SEED),
            exhausted=exhausted,
            epochs=most_epochs,
            num_packs=most,
            stages=(Stage(0, _as_weights(weights, names)),),
        )

    parameters, packs = _agreed_order(checked, share=share, group=group, progress=progress)
    names, found = _as_plans(plans)
    return PackMix(found, packs, parameters, names)


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
        names: The name of each plan; "plan 0", "plan 1" … where none were given.
        packs: The packs in their order, numbered through all plans, (packs of the mix,), int32 or int64, read-only.
            Pack *k* of plan *p* has the number *k* + the packs of all plans before *p*.
        max_length: The most tokens of a pack, the largest `max_length` of the plans.
        weights: The weight of each plan; after `resume`, those that hold at the end.
        since: The first pack for which these weights hold: 0 without `resume`.
        seed: The seed of the orders in which each plan's packs come.
        exhausted: What happens when a plan is finished: "repeat", "stop" or "drop".
        epochs: Epochs after which a plan is finished; None if it never is.
        num_packs: The most packs of the mix, or None.
        fingerprint: 32 hexadecimal digits, a hash of the plans and everything else that determines the order.

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
        names: Sequence[str],
    ) -> None:
        """Make a mix of an order that was computed; `mix`, `resume` and `load` call it."""
        self.plans = tuple(plans)
        self.names = tuple(names)
        # Unpickled arrays are writable.
        packs.flags.writeable = False
        self.packs = packs
        self.max_length: int = max(plan.max_length for plan in self.plans)
        self.weights: list[float] = list(parameters.stages[-1].weights)
        self.since: int = parameters.stages[-1].start
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
        weights = ", ".join(
            f"{name}: {weight:g}" for name, weight in zip(self.names, self.weights, strict=True)
        )
        return (
            f"PackMix({format_count(len(self), 'pack')} of {format_count(len(self.plans), 'plan')}, "
            f"weights={{{weights}}}, exhausted={self.exhausted!r}, fingerprint={self.fingerprint[:12]}…)"
        )

    def _repr_html_(self) -> str:
        """The plans and their shares as a small table, for notebooks."""
        return mix_as_html(self)

    def lookup(self, places: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return which packs come in many places.

        Args:
            places: Integers, shape (k,), each in 0 … len(mix) - 1.

        Returns:
            The number of each pack's plan, and the number of the pack in its plan, both int64, shape (k,).

        Raises:
            NoSuchPackError: A place is out of range.

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
            raise NoSuchPackError(
                f"pack {asked[outside][0]} does not exist: the mix has {format_count(len(self), 'pack')}"
            )
        packs = np.asarray(self.packs)[asked].astype(np.int64)
        # Plans without packs begin where the next plan begins; the last that begins there has the pack.
        plans = np.searchsorted(self._bounds[:-1], packs, side="right") - 1
        return plans, packs - self._bounds[plans]

    def stats(self) -> dict[str, Any]:
        """Count what the mix takes of each plan.

        Returns:
            packs: Packs of the mix.
            names: The names of the plans; the other lists are in their order.
            since: The first pack for which the present weights hold: 0 without `resume`.
            asked: The share of the packs that each plan's present weight asks for; the shares add up to 1.
            given: The share that each plan has of the packs from `since` on; 0.0 if there are none.
            taken: Packs of each plan in the whole mix; those that come again count again.
            tokens: Tokens of these packs, without padding: exact for whole epochs of a plan. The packs of a begun epoch
                count with the plan's mean.
            epochs: How often the mix goes through each plan: `taken` over its packs, 0.0 for a plan without packs.

        Example:
            >>> import tundish as td
            >>> mix = td.mix([td.pack([8] * 9, 8), td.pack([8], 8)], [3, 1], num_packs=8)
            >>> stats = mix.stats()
            >>> stats["asked"], stats["given"], stats["taken"], stats["epochs"][1]
            ([0.75, 0.25], [0.75, 0.25], [6, 2], 2.0)
        """
        return mix_stats(self)

    def resume(
        self,
        *,
        weights: Sequence[float] | Mapping[str, float],
        after: int,
        share: bool = False,
        group: Any = None,
        progress: bool | None = None,
    ) -> PackMix:
        """Change the weights after `after` packs, and keep the packs before.

        The packs before place `after` stay as they are. From there on each plan goes on where it is: no pack comes
        again before its plan is finished. The new shares are counted from there on. `exhausted`, `epochs` and
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
            return self._parameters.resumed(start, _as_weights(weights, self.names))

        parameters, packs = _agreed_order(resumed, share=share, group=group, progress=progress)
        return PackMix(self.plans, packs, parameters, self.names)

    def packs_in_common(self, fingerprint: str) -> int | None:
        """The number of packs that this mix has in common with a mix that it was resumed from.

        Args:
            fingerprint: The fingerprint of the other mix.

        Returns:
            The number of packs, all at the beginning; None if this mix was not resumed from it.
        """
        parameters = self._parameters
        for number in range(1, len(parameters.stages)):
            if replace(parameters, stages=parameters.stages[:number]).fingerprint == fingerprint:
                return parameters.stages[number].start
        return None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the mix to the file `path`, as JSON: whole and durable, or not at all.

        The file holds the parameters, not the order, which `load` computes again. The plans are not in it: save them
        too. If the same mix already lies there, nothing happens.

        Args:
            path: The file to write, such as "mix.json"; its folder must exist.

        Raises:
            AlreadyExistsError: Something else lies there.
            NotFoundError: The folder does not exist.
            StorageError: The file system refused (read-only, full).

        Example:
            >>> import tempfile, tundish as td
            >>> plans, file = [td.pack([8] * 9, 8), td.pack([8] * 9, 8)], tempfile.mkdtemp() + "/mix.json"
            >>> td.mix(plans, [2, 1]).save(file)
            >>> td.PackMix.load(file, plans).weights
            [2.0, 1.0]
        """
        file = as_absolute(path, "path")
        if not self._lies_at(file):
            text = {
                "format_version": FORMAT_VERSION,
                "fingerprint": self.fingerprint,
                **asdict(self._parameters),
            }
            _native.replace_file(file, (json.dumps(text, indent=2) + "\n").encode())

    def _lies_at(self, file: Path) -> bool:
        """Whether this mix lies there; an error if something else does."""
        if not os.path.lexists(file):
            return False
        try:
            if _read(file) == self._parameters:
                return True
        except (TundishError, OSError):
            pass
        raise AlreadyExistsError(
            errno.EEXIST, "is something else than this mix: choose another path, or remove it", str(file)
        )

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        plans: Sequence[Any] | Mapping[str, Any],
        *,
        share: bool = False,
        group: Any = None,
        progress: bool | None = None,
    ) -> Self:
        """Read a mix from its file, and compute its order again.

        Args:
            path: A file made by `save`.
            plans: The plans (or datasets) of the mix, in their order. The file has no names: a mapping gives them.
            share: As in `tundish.mix`.
            group: As in `tundish.mix`.
            progress: Show progress; by default on a terminal.

        Returns:
            The mix.

        Raises:
            NotFoundError: The file is missing.
            InvalidInputError: `path` is no regular file.
            PlanFormatError: The file is damaged, or of another version; the message names it.
            PlanMismatchError: The plans are not those of the mix.
            StorageError: The file system refused.
            TundishError: As `tundish.mix`.

        Example:
            >>> import tempfile, tundish as td
            >>> plans, file = [td.pack([8] * 9, 8), td.pack([8] * 9, 8)], tempfile.mkdtemp() + "/mix.json"
            >>> mix = td.mix(plans, [2, 1])
            >>> mix.save(file)
            >>> td.PackMix.load(file, plans)[:3] == mix[:3]
            True
        """

        def read() -> MixParameters:
            check_sharing(share, group)
            file, (_, given) = as_absolute(path, "path"), _as_plans(plans)
            parameters = _read(file)
            expected = [plan.fingerprint for plan in parameters.plans]
            found = [plan.fingerprint for plan in given]
            if len(found) != len(expected):
                raise PlanMismatchError(
                    f"{file} is a mix of {format_count(len(expected), 'plan')}, and {len(found)} are given: give "
                    "all of them, in the order in which they were mixed"
                )
            for number, (mine, theirs) in enumerate(zip(expected, found, strict=True)):
                if mine != theirs:
                    raise PlanMismatchError(
                        f"{file} was made with another plan {number}: its fingerprint is {mine}, that of the given one "
                        f"is {theirs}. Give the plans of the mix in their order, or make the mix again"
                    )
            return parameters

        parameters, packs = _agreed_order(read, share=share, group=group, progress=progress)
        names, found = _as_plans(plans)
        return cls(found, packs, parameters, names)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.plans, self.packs, self._parameters, self.names)


class PlanIdentity(NamedTuple):
    """A plan of a mix: its fingerprint, and the number of its packs."""

    fingerprint: str
    packs: int


class Stage(NamedTuple):
    """The weights that hold from the pack `start` of a mix on, one for each plan."""

    start: int
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MixParameters:
    """The parameters of a mix, as `tundish.mix` documents them.

    Attributes:
        plans: The plans.
        seed: The seed of the orders of the plans' packs.
        exhausted: What happens when a plan is finished.
        epochs: Epochs after which a plan is finished, or None.
        num_packs: Packs of the mix at most, or None.
        stages: The weights. The first stage starts at 0, and `PackMix.resume` adds one.
    """

    plans: tuple[PlanIdentity, ...]
    seed: int
    exhausted: str
    epochs: int | None
    num_packs: int | None
    stages: tuple[Stage, ...]

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits, a hash of all parameters."""
        text = json.dumps([ORDER_VERSION, asdict(self)], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def resumed(self, start: int, weights: tuple[float, ...]) -> MixParameters:
        """The same parameters, with these weights from pack `start` on."""
        kept = tuple(stage for stage in self.stages if stage.start < start)
        return replace(self, stages=(*kept, Stage(start, weights)))

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> Self:
        """The parameters that `asdict` made a dict of, after a way through JSON.

        Raises:
            KeyError, TypeError, ValueError: Something is missing or of another type.
        """
        given = {field.name: value[field.name] for field in fields(cls)}
        plans = tuple(PlanIdentity(str(fingerprint), int(packs)) for fingerprint, packs in given.pop("plans"))
        stages = tuple(
            Stage(int(start), tuple(map(float, weights))) for start, weights in given.pop("stages")
        )
        return cls(plans=plans, stages=stages, **given)


def _read(file: Path) -> MixParameters:
    """Read the parameters of a saved mix.

    Raises:
        InvalidInputError, NotFoundError, StorageError: As `read_regular_file`.
        PlanFormatError: The file is damaged, or of another version.
    """
    content = read_regular_file(file, "a mix, as PackMix.save writes it", LARGEST_FILE)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise PlanFormatError(f"{file} is not valid JSON: {error}; make the mix again") from error
    version = value.get("format_version") if isinstance(value, dict) else None
    if version != FORMAT_VERSION:
        raise PlanFormatError(
            f"{file} has the format version {version!r:.100}, and this version of tundish reads {FORMAT_VERSION}; "
            "make the mix again"
        )
    try:
        parameters = MixParameters.of_json(value)
        is_intact = parameters.fingerprint == value["fingerprint"]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise PlanFormatError(f"{file} does not describe a mix: {error!r}; make the mix again") from error
    if not is_intact:
        raise PlanFormatError(
            f"{file} is damaged or was edited: its fingerprint is another one; make the mix again"
        )
    return parameters


def _agreed_order(
    checked: Callable[[], MixParameters], *, share: Any, group: Any, progress: bool | None
) -> tuple[MixParameters, IntegerArray]:
    """The parameters of a mix, and its packs, numbered through all plans, (packs,).

    Args:
        checked: Checks the arguments and makes the parameters. With `share`, an error on one rank is raised on all.
        share: Whether the ranks of a node share one copy; the call is then collective over `group`.
        group: The process group.
        progress: Show progress; by default on a terminal.
    """
    if share is False:
        parameters = checked()
        return parameters, _order(parameters, progress)
    from tundish.distributed import agreed
    from tundish.shm import node_shared

    with agreed("checking what to mix", group=group):
        parameters = checked()
    return parameters, node_shared(
        lambda: _order(parameters, progress), key=f"mix {parameters.fingerprint}", group=group
    )


def _order(parameters: MixParameters, progress: bool | None) -> IntegerArray:
    packs: IntegerArray = np.empty(0, dtype=np.int32)
    with ProgressLine("mix", progress) as line:
        for stage in parameters.stages:
            request: _native.MixRequest = {
                "packs": [plan.packs for plan in parameters.plans],
                "weights": stage.weights,
                "seed": parameters.seed,
                "exhausted": parameters.exhausted,
                "epochs": parameters.epochs,
                "num_packs": parameters.num_packs,
                "beginning": packs[: stage.start],
            }
            packs = _native.mix_packs(request, line.callback)
    return packs


def _as_plans(plans: Any) -> tuple[list[str], list[PackPlan]]:
    """The names of the plans, and the plans, which are given themselves or as datasets that have them.

    Raises:
        InvalidTypeError: They are no list or mapping, a name is no text, or one is neither a plan nor a `PackedDataset`
            of a plan.
        InvalidInputError: There are none.
    """
    if not isinstance(plans, list | tuple | Mapping):
        raise InvalidTypeError(
            f"plans is {format_type(plans)}: give a list of plans, or of PackedDatasets, or a mapping of names to them"
        )
    if not plans:
        raise InvalidInputError("plans is empty: give at least one plan")
    is_named = isinstance(plans, Mapping)
    named = dict(plans) if is_named else {f"plan {number}": given for number, given in enumerate(plans)}
    found = []
    for number, (name, given) in enumerate(named.items()):
        if not isinstance(name, str):
            raise InvalidTypeError(f"plans has the key {name!r:.100}: a name of a plan is a text")
        plan = given if isinstance(given, PackPlan) else getattr(given, "plan", None)
        if not isinstance(plan, PackPlan):
            raise InvalidTypeError(
                f"plans[{name if is_named else number!r}] is {format_type(given)}: give a PackPlan, as pack returns "
                "it, or the PackedDataset of one"
            )
        found.append(plan)
    return list(named), found


def _as_weights(weights: Any, names: Sequence[str]) -> tuple[float, ...]:
    """`weights` as one float for each plan; the compiled module checks their values.

    Raises:
        InvalidTypeError: The weights are neither a sequence of numbers nor a mapping to them.
        InvalidInputError: There are not as many weights as plans, they have other names, or one is beyond every float.
    """
    if isinstance(weights, Mapping):
        if weights.keys() != set(names):
            raise InvalidInputError(
                f"weights are for {', '.join(map(repr, weights))}, and the plans are "
                f"{', '.join(map(repr, names))}: give one weight for each plan, by its name"
            )
        weights = [weights[name] for name in names]
    given = weights.tolist() if hasattr(weights, "tolist") else weights
    if not isinstance(given, list | tuple):
        raise InvalidTypeError(
            f"weights is {format_type(weights)}: give a list of numbers, one for each plan, or a mapping of the plans' "
            "names to them"
        )
    if len(given) != len(names):
        raise InvalidInputError(
            f"{format_count(len(given), 'weight')} for {format_count(len(names), 'plan')}: give one for each plan"
        )
    found = []
    for number, weight in enumerate(given):
        if isinstance(weight, bool) or not isinstance(weight, numbers.Real):
            raise InvalidTypeError(f"weights[{number}] is {weight!r:.100}: a weight is a number")
        try:
            found.append(float(weight))
        except OverflowError:
            raise InvalidInputError(
                f"weights[{number}] is larger than any float: give a smaller one"
            ) from None
    return tuple(found)
