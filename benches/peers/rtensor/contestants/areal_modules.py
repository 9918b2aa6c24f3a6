"""AReaL's remote tensors without the rest of it."""

from __future__ import annotations

from typing import Any

from import_alone import import_alone

_PACKAGES = (
    "areal",
    "areal.infra",
    "areal.infra.rpc",
    "areal.infra.rpc.guard",
    "areal.infra.utils",
    "areal.utils",
)


def areal(module: str) -> Any:
    """A module of AReaL, by its name within it."""
    return import_alone("areal", f"areal.{module}", {name: {} for name in _PACKAGES})
