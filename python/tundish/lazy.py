"""Public names that a package imports only when they are asked for.

Owns the `__getattr__` and `__dir__` of such packages (PEP 562). What always holds: a name is looked for where the
package's table says that it is defined, once, and is an ordinary attribute of the package from then on. Type
checkers and editors do not read the table but the imports that the package makes under `TYPE_CHECKING`.
"""

from __future__ import annotations

import sys

# Type checkers know the name; to import it would take longer than the rest of `import tundish`.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

__all__ = ["lazily"]


def lazily(
    package: str, names_of: Mapping[str, Sequence[str]], extras: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions `__getattr__` and `__dir__` of `package`.

    `names_of` has the public names by the module that defines them; the modules themselves are attributes too.
    `extras` has what some of these need that need not be installed: where it is not they are found and not listed, for
    who lists names (`help`, a completion) then asks for all of them.
    """
    homes = {name: module for module, names in names_of.items() for name in names}
    modules = {module.rpartition(".")[2]: module for module in names_of}

    def get(name: str) -> Any:
        from importlib import import_module

        if name in homes:
            value = getattr(import_module(homes[name]), name)
        elif name in modules:
            value = import_module(modules[name])
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        missing = {
            module.rpartition(".")[2] for module, needed in (extras or {}).items() if not _is_there(needed)
        }
        return sorted({*vars(sys.modules[package]), *homes, *modules} - missing)

    return get, listed


def _is_there(package: str) -> bool:
    from importlib.util import find_spec

    try:
        return find_spec(package) is not None
    except ValueError:
        # Somebody put a module of that name there by hand.
        return True
