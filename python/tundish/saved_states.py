"""Checks the form of a state that a loader, a sampler or a stream is to load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tundish.errors import StateMismatchError, format_type


def check_state(state: Any, kind: str, version: int, keys: Iterable[str] = ()) -> None:
    """Refuse what is no state of this kind and version, and a state that lacks one of `keys`.

    Raises:
        StateMismatchError: The message says what was found.
    """
    if not isinstance(state, Mapping) or state.get("kind") != kind:
        if not isinstance(state, Mapping):
            found = f"it is {format_type(state)}"
        elif "kind" in state:
            found = f"its 'kind' is {state['kind']!r:.100}"
        else:
            found = f"it has no 'kind' (keys: {', '.join(map(str, state)) or 'none':.200})"
        raise StateMismatchError(
            f"this is not the state of a {kind}: {found}; pass what its state_dict() returned"
        )
    found_version = state.get("version")
    # True equals 1.
    if isinstance(found_version, bool) or found_version != version:
        raise StateMismatchError(
            f"the state has version {found_version!r:.100}, this release of tundish reads {version}: load it with the "
            "release that saved it"
        )
    if missing := [key for key in keys if key not in state]:
        raise StateMismatchError(f"the state of the {kind} lacks {', '.join(missing)}: it was cut or edited")
