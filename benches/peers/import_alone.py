"""Imports one module of a package whose other requirements are not installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType
from typing import Any


def import_alone(package: str, module: str, empty: Mapping[str, Mapping[str, Any]]) -> ModuleType:
    """Import `module` of the installed `package`, with empty modules in place of others.

    Args:
        package: The name under which pip installed it.
        module: The module to import, which does not use what is replaced.
        empty: The modules to replace, parents first, each with the names that are imported from it.

    Raises:
        PackageNotFoundError: The package is not installed.
    """
    root = Path(str(distribution(package).locate_file("")))
    for name, imported in empty.items():
        if name not in sys.modules:
            replaced = ModuleType(name)
            replaced.__path__ = [str(root.joinpath(*name.split(".")))]
            for attribute, value in imported.items():
                setattr(replaced, attribute, value)
            sys.modules[name] = replaced
    return importlib.import_module(module)
