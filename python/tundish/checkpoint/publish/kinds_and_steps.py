"""The kinds and steps by which callers name checkpoints: their types, and the checks of such arguments."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from tundish.errors import InvalidInputError

__all__ = ["KINDS", "Kind", "check_kind", "check_step", "format_steps", "plain_step"]

Kind = Literal["hf", "dcp"]
KINDS: tuple[Kind, ...] = ("hf", "dcp")
_SHOWN_STEPS = 10


def check_kind(kind: object) -> Kind:
    """Check that `kind` is "hf" or "dcp"."""
    for known in KINDS:
        if kind == known:
            return known
    raise InvalidInputError(f"kind is {kind!r}: give 'hf' or 'dcp'")


def plain_step(step: Any) -> Any:
    """Turn an integer of numpy into one of Python; return anything else as it is."""
    return int(step) if isinstance(step, np.integer) else step


def check_step(step: object) -> int:
    """Check that `step` is a whole number of at least 0."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 1 << 63:
        # Shortened: a state dict that was given in its place would take megabytes.
        raise InvalidInputError(f"step is {reprlib.repr(step)}: give a whole number of at least 0")
    return step


def format_steps(steps: Sequence[int]) -> str:
    """Ascending steps for a message, the newest ones if they are many."""
    shown = ", ".join(map(str, steps[-_SHOWN_STEPS:])) or "none"
    return f"steps there: {'…, ' if len(steps) > _SHOWN_STEPS else ''}{shown}"
