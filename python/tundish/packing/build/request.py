"""Checks the arguments of `pack` and `pack_datasets`.

Invariants: an argument that the mode does not use is refused, never ignored.
"""

from __future__ import annotations

from typing import Any

from tundish import _native
from tundish.errors import InvalidInputError, InvalidTypeError
from tundish.packing.arguments.integer_arrays import IntegerArray, as_cost_arrays, as_integer_array
from tundish.packing.arguments.integers import as_integer, as_threads

__all__ = ["DEFAULT_WINDOW", "MODES", "OVERLONG", "REMAINDERS", "pack_request"]

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


def pack_request(
    lengths: list[IntegerArray],
    max_length: Any,
    *,
    is_single: bool,
    mode: Any,
    seed: Any,
    order: Any,
    drop_last: Any,
    overlong: Any,
    window: Any,
    max_samples: Any,
    align: Any,
    costs: Any,
    max_cost: Any,
    multiple_of: Any,
    remainder: Any,
    global_pack: Any,
    threads: Any,
) -> _native.PackRequest:
    """The arguments of `pack` as the core takes them.

    Raises:
        InvalidTypeError: An argument is of the wrong type.
        InvalidInputError: An argument is out of range, or the mode does not use it.
    """
    modes = _as_modes(mode, None if is_single else len(lengths), global_pack)
    for name, flag in (("drop_last", drop_last), ("global_pack", global_pack)):
        if not isinstance(flag, bool) and not (name == "drop_last" and flag is None):
            raise InvalidTypeError(f"{name} must be True or False, not {flag!r}")
    if overlong is not None:
        _check_choice(overlong, "overlong", OVERLONG)
    tokens = as_integer(max_length, "max_length", 1, 2**63 - 1)
    aligned = as_integer(align, "align", 1, LARGEST_WHOLE_LENGTH)
    most = None if max_samples is None else as_integer(max_samples, "max_samples", 1, 2**63 - 1)
    opened = None if window is None else as_integer(window, "window", 1, LARGEST_WINDOW)
    _check_use(modes, drop_last, overlong, opened, most, aligned)
    limit = _as_cost_limit(costs, max_cost, modes, overlong)
    multiple = None if multiple_of is None else as_integer(multiple_of, "multiple_of", 1, LARGEST_MULTIPLE)
    _check_remainder(multiple, remainder, drop_last)
    if whole := [name for name in modes if name != "hard"]:
        _check_length(whole[0], tokens, aligned)
    if opened is None:
        opened = DEFAULT_WINDOW if "ordered" in modes else 1
    return {
        "lengths": lengths,
        "order": None if order is None else as_integer_array(order, "order"),
        "seed": None if seed is None else as_integer(seed, "seed", 0, 2**32 - 1),
        "max_length": tokens,
        "modes": modes,
        "drop_last": "hard" in modes and drop_last is not False,
        "overlong": overlong or "error",
        "window": opened,
        "max_samples": most,
        "align": aligned,
        "costs": None if costs is None else _as_cost_arrays(costs, lengths, modes, is_single),
        "max_cost": limit,
        "multiple_of": multiple,
        "remainder": remainder or "drop",
        "global_pack": global_pack,
        "threads": as_threads(threads),
    }


def _check_choice(value: Any, name: str, choices: tuple[str, ...]) -> None:
    listed = ", ".join(map(repr, choices))
    if not isinstance(value, str):
        raise InvalidTypeError(f"{name} must be one of {listed}, not {value!r}")
    if value not in choices:
        raise InvalidInputError(f"{name} is {value!r}; it must be one of {listed}")


def _as_modes(mode: Any, datasets: int | None, global_pack: Any) -> list[str]:
    """The mode of all datasets, or that of each; `datasets` is None where there may be one mode only."""
    if datasets is None or not isinstance(mode, list | tuple):
        _check_choice(mode, "mode", MODES)
        return [mode]
    for number, name in enumerate(mode):
        _check_choice(name, f"mode[{number}]", MODES)
    if len(mode) != datasets:
        raise InvalidInputError(
            f"mode has {len(mode)} entries for {datasets} datasets: give one mode for each, or one"
        )
    if len(set(mode)) <= 1:
        return [*mode[:1]] or ["hard"]
    if global_pack is True:
        raise InvalidInputError(
            "global_pack=True makes the datasets one, which has one mode: give one mode, or leave global_pack out"
        )
    return list(mode)


def _check_use(
    modes: list[str],
    drop_last: bool | None,
    overlong: str | None,
    window: int | None,
    most: int | None,
    align: int,
) -> None:
    """Refuse arguments that every mode would ignore."""
    if set(modes) == {"hard"}:
        given = [
            name
            for name, is_given in (
                ("overlong", overlong is not None),
                ("max_samples", most is not None),
                ("align", align != 1),
            )
            if is_given
        ]
        if given:
            raise InvalidInputError(
                f"mode 'hard' takes no {given[0]}: it cuts samples of any length where a pack is full. Leave "
                f"{given[0]} out, or choose mode='best_fit', 'ordered' or 'sequential', which pack whole samples"
            )
    named = f"mode {modes[0]!r}" if len(modes) == 1 else f"mode {modes}"
    if drop_last is not None and "hard" not in modes:
        raise InvalidInputError(
            f"{named} takes no drop_last: it packs whole samples, and no tail is left over. Leave drop_last "
            "out, or choose mode='hard'"
        )
    if window is not None and "ordered" not in modes:
        raise InvalidInputError(
            f"{named} takes no window: only mode='ordered' keeps a window of open packs. Leave window out, or "
            "choose mode='ordered'"
        )


def _as_cost_limit(costs: Any, max_cost: Any, modes: list[str], overlong: str | None) -> int:
    """The limit of costs; 0 without costs."""
    if (costs is None) != (max_cost is None):
        given, missing = ("costs", "max_cost") if max_cost is None else ("max_cost", "costs")
        raise InvalidInputError(
            f"{given} is given, and {missing} is not: a pack is limited by the costs of its samples and by what they "
            "may cost together"
        )
    if costs is None:
        return 0
    if set(modes) == {"hard"}:
        raise InvalidInputError(
            "mode 'hard' takes no costs: it cuts samples where a pack is full. Leave costs and max_cost out, or choose "
            "mode='best_fit', 'ordered' or 'sequential', which pack whole samples"
        )
    if overlong == "split":
        raise InvalidInputError(
            "costs are of whole samples, and overlong='split' cuts samples into parts whose costs are unknown: choose "
            "overlong='truncate' or 'drop', or leave costs and max_cost out"
        )
    return as_integer(max_cost, "max_cost", 0, 2**63 - 1)


def _as_cost_arrays(
    costs: Any, lengths: list[IntegerArray], modes: list[str], is_single: bool
) -> list[IntegerArray]:
    """The costs of each dataset; an empty array for a dataset of mode "hard" among others."""
    if len(modes) > 1 and isinstance(costs, list | tuple) and len(costs) == len(modes):
        for number, (name, column) in enumerate(zip(modes, costs, strict=True)):
            if (name == "hard") != (column is None):
                raise InvalidInputError(
                    f"costs[{number}] is for mode {name!r}: give None for datasets of mode 'hard', which have no "
                    "costs, and an array for each of the others"
                )
    arrays = as_cost_arrays(costs, single=is_single)
    if len(arrays) != len(lengths):
        raise InvalidInputError(f"costs are of {len(arrays)} datasets, and lengths of {len(lengths)}")
    for number, (of_costs, of_lengths) in enumerate(zip(arrays, lengths, strict=True)):
        expected = 0 if len(modes) > 1 and modes[number] == "hard" else len(of_lengths)
        if len(of_costs) != expected:
            raise InvalidInputError(
                f"dataset {number} has {len(of_costs)} costs for {len(of_lengths)} samples: give one cost for each"
            )
    return arrays


def _check_remainder(multiple: int | None, remainder: Any, drop_last: bool | None) -> None:
    if remainder is not None:
        _check_choice(remainder, "remainder", REMAINDERS)
        if multiple is None:
            raise InvalidInputError(
                f"remainder is {remainder!r}, and there is no multiple_of: give both, or leave remainder out"
            )
    if multiple is not None and drop_last is False and remainder != "repeat":
        raise InvalidInputError(
            f"drop_last=False keeps the tails, and multiple_of={multiple} would leave them out again: choose "
            "remainder='repeat', or leave drop_last out"
        )


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
