"""Lazy public names: a package imports a name's module when the name is first used (PEP 562).

Invariant: a name is an ordinary attribute of the package after its first use. Type checkers and editors do not read the
table of names but the imports that the package makes under `TYPE_CHECKING`.
"""

from __future__ import annotations

import sys

# Importing `typing` would take longer than the rest of `import tundish`; type checkers know this name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any


def lazily(
    package: str,
    names: Mapping[str, Sequence[str]],
    *,
    modules: Mapping[str, str] | None = None,
    requires: Mapping[str, str] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions `__getattr__` and `__dir__` of a package whose names are imported on first use.

    Args:
        package: Name of the package.
        names: The public names that each module defines, by the module's full name.
        modules: Further modules that are attributes of the package: the full name of each by its attribute. The
            sub-modules of the package that `names` lists are attributes already.
        requires: The optional package that an attribute needs, by the attribute. Where it is not installed, `dir()`
            leaves the attribute out, so that completion and `help` do not import it.

    Returns:
        The two functions, to be assigned at the top level of the package. `dir()` then lists public names only:
        those of the package's `__all__`, `modules`, and names such as `__version__`.
    """
    homes = {name: module for module, defined in names.items() for name in defined}
    found_modules = {module.rpartition(".")[2]: module for module in names} | dict(modules or {})

    def get(name: str) -> Any:
        from importlib import import_module

        if name in homes:
            value = getattr(import_module(homes[name]), name)
        elif name in found_modules:
            value = import_module(found_modules[name])
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        module = sys.modules[package]
        missing = {name for name, needed in (requires or {}).items() if not _is_installed(needed)}
        special = {name for name in (*vars(module), *homes) if name.startswith("__")}
        # `help` would list these two as functions of the package.
        special -= {"__dir__", "__getattr__"}
        return sorted({*module.__all__, *(modules or ())} - missing | special)

    return get, list_names


def _is_installed(package: str) -> bool:
    from importlib.util import find_spec

    try:
        return find_spec(package) is not None
    except ValueError:
        # A module of that name was put into `sys.modules` by hand.
        return True
