"""Fails if the top-level modules of a crate import each other in a circle: rustc allows it.

Reads `crate::name`, except in comments and unit tests. A name that `lib.rs` re-exports counts as its module.

Run: python .ci/rust_cycles.py [FOLDER OF CRATES]
"""

from __future__ import annotations

import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

USE = re.compile(r"\bcrate::(?:(\w+)|\{([^;]*)\})")
UNIT_TESTS = re.compile(r"^#\[cfg\(test\)\]\s+mod \w+ \{", re.MULTILINE)


def code(file: Path) -> str:
    """The text of a file without comments and without the unit tests at its end."""
    return re.sub(r"//.*", "", UNIT_TESTS.split(file.read_text(encoding="utf-8"))[0])


def names_used(text: str) -> set[str]:
    """The names after `crate::` in a text; of a group, those at its first level."""
    names = set()
    for name, group in USE.findall(text):
        while "{" in group:
            group = re.sub(r"\{[^{}]*\}", "", group)
        names |= {name} if name else set(re.findall(r"(?:^|,)\s*(\w+)", group))
    return names


def imports(crate: Path) -> dict[str, set[str]]:
    """For each top-level module of the crate in this folder, the ones that it imports."""
    root = code(crate / "lib.rs")
    modules = set(re.findall(r"\bmod (\w+)", root))
    module_of = {module: module for module in modules}
    for module, exported in re.findall(r"\bpub use (?:self::)?(\w+)::([^;]*);", root):
        module_of |= dict.fromkeys(re.findall(r"\w+", exported), module)
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for file in crate.rglob("*.rs"):
        module = file.relative_to(crate).parts[0].removesuffix(".rs")
        if module in modules and not file.stem.endswith("tests"):
            used = {module_of[name] for name in names_used(code(file)) if name in module_of} - {module}
            graph[module] |= used
    return graph


if __name__ == "__main__":
    found = []
    for lib in sorted(Path(*sys.argv[1:] or ["rust"]).glob("*/src/lib.rs")):
        try:
            TopologicalSorter(imports(lib.parent)).prepare()
        except CycleError as error:
            # The sorter lists a module before the one that imports it.
            found.append(
                f"{lib}: modules import each other in a circle: {' -> '.join(reversed(error.args[1]))}"
            )
    sys.exit("\n".join(found) or None)
