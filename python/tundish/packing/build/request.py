"""Checks the arguments of `pack` and `pack_datasets`.

Invariants: an argument that the mode does not use is refused, never ignored.
"""

from __future__ import annotations

from typing import Any

from tundish import _native
from tundish.errors import InvalidInputError, InvalidTypeError
from tundish.packing.arguments.integer_arrays import IntegerArray, as_integer_array, as_length_arrays
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
    _check_choice(mode, "mode", MODES)
    for name, flag in (("drop_last", drop_last), ("global_pack", global_pack)):
        if not isinstance(flag, bool) and not (name == "drop_last" and flag is None):
            raise InvalidTypeError(f"{name} must be True or False, not {flag!r}")
    if overlong is not None:
        _check_choice(overlong, "overlong", OVERLONG)
    tokens = as_integer(max_length, "max_length", 1, 2**63 - 1)
    aligned = as_integer(align, "align", 1, LARGEST_WHOLE_LENGTH)
    most = None if max_samples is None else as_integer(max_samples, "max_samples", 1, 2**63 - 1)
    opened = None if window is None else as_integer(window, "window", 1, LARGEST_WINDOW)
    _check_use(mode, drop_last, overlong, opened, most, aligned)
    limit = _as_cost_limit(costs, max_cost, mode, overlong)
    multiple = None if multiple_of is None else as_integer(multiple_of, "multiple_of", 1, LARGEST_MULTIPLE)
    _check_remainder(multiple, remainder, drop_last)
    if mode != "hard":
        _check_length(mode, tokens, aligned)
    if opened is None:
        opened = DEFAULT_WINDOW if mode == "ordered" else 1
    return {
        "lengths": lengths,
        "order": None if order is None else as_integer_array(order, "order"),
        "seed": None if seed is None else as_integer(seed, "seed", 0, 2**32 - 1),
        "max_length": tokens,
        "mode": mode,
        "drop_last": mode == "hard" and drop_last is not False,
        "overlong": overlong or "error",
        "window": opened,
        "max_samples": most,
        "align": aligned,
        "costs": None if costs is None else _as_cost_arrays(costs, lengths, is_single),
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


def _check_use(
    mode: str, drop_last: bool | None, overlong: str | None, window: int | None, most: int | None, align: int
) -> None:
    """Refuse arguments that the mode would ignore."""
    if mode == "hard":
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
    elif drop_last is not None:
        raise InvalidInputError(
            f"mode {mode!r} takes no drop_last: it packs whole samples, and no tail is left over. Leave drop_last "
            "out, or choose mode='hard'"
        )
    if window is not None and mode != "ordered":
        raise InvalidInputError(
            f"mode {mode!r} takes no window: only mode='ordered' keeps a window of open packs. Leave window out, or "
            "choose mode='ordered'"
        )


def _as_cost_limit(costs: Any, max_cost: Any, mode: str, overlong: str | None) -> int:
    """The limit of costs; 0 without costs."""
    if (costs is None) != (max_cost is None):
        given, missing = ("costs", "max_cost") if max_cost is None else ("max_cost", "costs")
        raise InvalidInputError(
            f"{given} is given, and {missing} is not: a pack is limited by the costs of its samples and by what they "
            "may cost together"
        )
    if costs is None:
        return 0
    if mode == "hard":
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


def _as_cost_arrays(costs: Any, lengths: list[IntegerArray], is_single: bool) -> list[IntegerArray]:
    arrays = as_length_arrays(costs, single=is_single, name="costs")
    if len(arrays) != len(lengths):
        raise InvalidInputError(f"costs are of {len(arrays)} datasets, and lengths of {len(lengths)}")
    for number, (of_costs, of_lengths) in enumerate(zip(arrays, lengths, strict=True)):
        if len(of_costs) != len(of_lengths):
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
