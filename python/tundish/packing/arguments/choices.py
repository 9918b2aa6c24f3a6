"""Arguments that are True or False, or one of a few words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tundish.errors import InvalidInputError, InvalidTypeError

__all__ = ["check_choice", "check_flag", "check_sharing"]


def check_flag(value: Any, name: str) -> None:
    """Refuse a `value` that is neither True nor False."""
    if not isinstance(value, bool):
        raise InvalidTypeError(f"{name} must be True or False, not {value!r:.100}")


def check_choice(value: Any, name: str, choices: Sequence[str]) -> None:
    """Refuse a `value` that is none of the words in `choices`."""
    listed = ", ".join(map(repr, choices))
    if not isinstance(value, str):
        raise InvalidTypeError(f"{name} must be one of {listed}, not {value!r:.100}")
    if value not in choices:
        raise InvalidInputError(f"{name} is {value!r:.100}; it must be one of {listed}")


def check_sharing(share: Any, group: Any) -> None:
    """Refuse a `share` that is neither True nor False, and a `group` without it."""
    check_flag(share, "share")
    if group is not None and not share:
        raise InvalidInputError("group is given, and share is False: give share=True, or leave group out")
