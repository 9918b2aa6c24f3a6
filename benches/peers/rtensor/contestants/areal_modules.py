"""Imports AReaL's remote tensors without the rest of it, with empty packages in place of its packages."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["areal"]

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
    root = Path(str(distribution("areal").locate_file("")))
    for name in _PACKAGES:
        if name not in sys.modules:
            package = ModuleType(name)
            package.__path__ = [str(root.joinpath(*name.split(".")))]
            sys.modules[name] = package
    return importlib.import_module(f"areal.{module}")
