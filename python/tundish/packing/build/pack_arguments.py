"""`PackArguments`: the arguments of `pack` and `pack_datasets` that determine a plan, and their checks.

Invariants: an argument that the mode does not use is refused, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tundish import _native
from tundish.errors import InvalidInputError
from tundish.packing.arguments import (
    IntegerArray,
    as_cost_arrays,
    as_integer,
    as_integer_array,
    as_length_arrays,
    as_optional_integer,
    as_threads,
    check_choice,
    check_flag,
)

__all__ = ["MODES", "PackArguments"]

MODES = ("hard", "best_fit", "ordered", "sequential")
OVERLONG = ("error", "split", "truncate", "drop")
REMAINDERS = ("drop", "repeat")
DEFAULT_WINDOW = 64
# Each sample is compared with that many packs.
LARGEST_WINDOW = 2**16
# The modes of whole samples count the samples of each length, up to `max_length`.
LARGEST_WHOLE_LENGTH = 2**28
# So many packs are remembered while a plan is made.
LARGEST_MULTIPLE = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PackArguments:
    """The arguments of `pack` and `pack_datasets`, as the caller gave them.

    Attributes:
        is_single: Whether they are those of `pack`, which has one dataset.
    """

    lengths: Any
    is_single: bool
    max_length: Any
    mode: Any
    seed: Any = None
    order: Any = None
    drop_last: Any = None
    overlong: Any = None
    window: Any = None
    max_samples: Any = None
    align: Any = 1
    costs: Any = None
    max_cost: Any = None
    multiple_of: Any = None
    remainder: Any = None
    global_pack: Any = False
    threads: Any = None

    def checked(self) -> _native.PackRequest:
        """The arguments as the compiled module takes them.

        Raises:
            InvalidTypeError: An argument is of the wrong type.
            InvalidInputError: An argument is out of range, or the mode does not use it.
        """
        if self.is_single:
            lengths = [as_integer_array(self.lengths, "lengths")]
        else:
            lengths = as_length_arrays(self.lengths, single=False)
        modes = self._modes(len(lengths))
        if self.drop_last is not None:
            check_flag(self.drop_last, "drop_last")
        check_flag(self.global_pack, "global_pack")
        if self.overlong is not None:
            check_choice(self.overlong, "overlong", OVERLONG)
        max_length = as_integer(self.max_length, "max_length", 1, 2**63 - 1)
        align = as_integer(self.align, "align", 1, LARGEST_WHOLE_LENGTH)
        window = DEFAULT_WINDOW if "ordered" in modes else 1
        if self.window is not None:
            window = as_integer(self.window, "window", 1, LARGEST_WINDOW)
        request: _native.PackRequest = {
            "lengths": lengths,
            "order": None if self.order is None else as_integer_array(self.order, "order"),
            "seed": as_optional_integer(self.seed, "seed", 0, 2**32 - 1),
            "max_length": max_length,
            "modes": modes,
            "drop_last": "hard" in modes and self.drop_last is not False,
            "overlong": self.overlong or "error",
            "window": window,
            "max_samples": as_optional_integer(self.max_samples, "max_samples", 1, 2**63 - 1),
            "align": align,
            "costs": None,
            "max_cost": 0,
            "multiple_of": as_optional_integer(self.multiple_of, "multiple_of", 1, LARGEST_MULTIPLE),
            "remainder": self.remainder or "drop",
            "global_pack": self.global_pack,
            "threads": as_threads(self.threads),
        }
        self._check_use(modes)
        self._check_remainder()
        if whole := [mode for mode in modes if mode != "hard"]:
            _check_length(whole[0], max_length, align)
        if self.costs is not None:
            request["max_cost"] = as_integer(self.max_cost, "max_cost", 0, 2**63 - 1)
            request["costs"] = self._cost_arrays(lengths, modes)
        return request

    def _modes(self, datasets: int) -> list[str]:
        """The mode of all datasets, or that of each."""
        mode = self.mode
        if self.is_single or not isinstance(mode, list | tuple):
            check_choice(mode, "mode", MODES)
            return [mode]
        for number, name in enumerate(mode):
            check_choice(name, f"mode[{number}]", MODES)
        if len(mode) != datasets:
            raise InvalidInputError(
                f"mode has {len(mode)} entries for {datasets} datasets: give one mode for each, or one"
            )
        if len(set(mode)) <= 1:
            return [*mode[:1]] or ["hard"]
        if self.global_pack is True:
            raise InvalidInputError(
                "global_pack=True makes the datasets one, which has one mode: give one mode, or leave global_pack out"
            )
        return list(mode)

    def _check_use(self, modes: list[str]) -> None:
        """Refuse arguments that every mode would ignore, and costs without a limit."""
        named = f"mode {modes[0]!r}" if len(modes) == 1 else f"mode {modes}"
        if self.drop_last is not None and "hard" not in modes:
            raise InvalidInputError(
                f"{named} takes no drop_last: it packs whole samples, and no tail is left over. Leave drop_last "
                "out, or choose mode='hard'"
            )
        if self.window is not None and "ordered" not in modes:
            raise InvalidInputError(
                f"{named} takes no window: only mode='ordered' keeps a window of open packs. Leave window out, or "
                "choose mode='ordered'"
            )
        if (self.costs is None) != (self.max_cost is None):
            given, missing = ("costs", "max_cost") if self.max_cost is None else ("max_cost", "costs")
            raise InvalidInputError(
                f"{given} is given, and {missing} is not: a pack is limited by the costs of its samples and by what "
                "they may cost together"
            )
        if set(modes) == {"hard"}:
            are_given = {
                "overlong": self.overlong is not None,
                "max_samples": self.max_samples is not None,
                "align": self.align != 1,
                "costs": self.costs is not None,
            }
            for name in (name for name, is_given in are_given.items() if is_given):
                raise InvalidInputError(
                    f"mode 'hard' takes no {name}: it cuts samples of any length where a pack is full. Leave {name} "
                    "out, or choose mode='best_fit', 'ordered' or 'sequential', which pack whole samples"
                )
        if self.costs is not None and self.overlong == "split":
            raise InvalidInputError(
                "costs are of whole samples, and overlong='split' cuts samples into parts whose costs are unknown: "
                "choose overlong='truncate' or 'drop', or leave costs and max_cost out"
            )

    def _check_remainder(self) -> None:
        if self.remainder is not None:
            check_choice(self.remainder, "remainder", REMAINDERS)
            if self.multiple_of is None:
                raise InvalidInputError(
                    f"remainder is {self.remainder!r}, and there is no multiple_of: give both, or leave remainder out"
                )
        if self.multiple_of is not None and self.drop_last is False and self.remainder != "repeat":
            raise InvalidInputError(
                f"drop_last=False keeps the tails, and multiple_of={self.multiple_of} would leave them out again: "
                "choose remainder='repeat', or leave drop_last out"
            )

    def _cost_arrays(self, lengths: list[IntegerArray], modes: list[str]) -> list[IntegerArray]:
        """The costs of each dataset; an empty array for a dataset of mode "hard" among others."""
        costs = self.costs
        if len(modes) > 1 and isinstance(costs, list | tuple) and len(costs) == len(modes):
            for number, (mode, column) in enumerate(zip(modes, costs, strict=True)):
                if (mode == "hard") != (column is None):
                    raise InvalidInputError(
                        f"costs[{number}] is for mode {mode!r}: give None for datasets of mode 'hard', which have no "
                        "costs, and an array for each of the others"
                    )
        arrays = as_cost_arrays(costs, single=self.is_single)
        if len(arrays) != len(lengths):
            raise InvalidInputError(f"costs are of {len(arrays)} datasets, and lengths of {len(lengths)}")
        for number, (of_costs, of_lengths) in enumerate(zip(arrays, lengths, strict=True)):
            expected = 0 if len(modes) > 1 and modes[number] == "hard" else len(of_lengths)
            if len(of_costs) != expected:
                raise InvalidInputError(
                    f"dataset {number} has {len(of_costs)} costs for {len(of_lengths)} samples: give one cost for each"
                )
        return arrays


def _check_length(mode: str, max_length: int, align: int) -> None:
    """Refuse a `max_length` that hard packing alone can have, or that is no multiple of `align`."""
    if max_length > LARGEST_WHOLE_LENGTH:
        raise InvalidInputError(
            f"max_length is {max_length}; in mode {mode!r} it must be in 1 … {LARGEST_WHOLE_LENGTH} (2**28), because "
            "the samples of each length are counted. Choose a smaller one, or mode='hard'"
        )
    if rest := max_length % align:
        around = (max_length - rest, max_length - rest + align)
        fitting = [length for length in around if 0 < length <= LARGEST_WHOLE_LENGTH]
        raise InvalidInputError(
            f"max_length is {max_length}, which is no multiple of align={align}: choose "
            f"{' or '.join(map(str, fitting))}, or another align"
        )
