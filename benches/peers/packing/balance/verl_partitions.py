"""Imports verl's partitions without the rest of verl, which they do not use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType

# In place of these packages and modules: empty ones, with the names that are imported from them.
_EMPTY: dict[str, tuple[str, ...]] = {
    "verl": (),
    "verl.utils": (),
    "verl.protocol": ("DataProto",),
    "verl.utils.device": ("get_device_name",),
    "verl.utils.tensordict_utils": (),
}


def balanced_partitions() -> Callable[..., list[list[int]]]:
    """verl's `get_seqlen_balanced_partitions`."""
    root = Path(str(distribution("verl").locate_file("")))
    for name, imported in _EMPTY.items():
        if name not in sys.modules:
            module = ModuleType(name)
            module.__path__ = [str(root.joinpath(*name.split(".")))]
            for attribute in imported:
                setattr(module, attribute, None)
            sys.modules[name] = module
    module = importlib.import_module("verl.utils.seqlen_balancing")
    function: Callable[..., list[list[int]]] = module.get_seqlen_balanced_partitions
    return function
