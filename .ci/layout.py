"""Fails if the layout of the sources breaks a rule of CONTRIBUTING.md.

- A file has at most 700 lines, and a folder at most 20 source files, `__init__.py` and `mod.rs` among them.
- An internal Python module has no `__all__`.
- A Python module that only one other module imports is part of that module, unless it stands in `SINGLE_IMPORTER`. A
  module that only the `__init__` of its package imports is public, and does not count.

Run: python .ci/layout.py [--list] [CHECKOUT]; `--list` prints the modules with one importer, and those with `__all__`.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 700
MAX_FILES = 20
MAX_SINGLE_IMPORTER = 15
TREES = ("python/tundish", "rust", "tests", "benches", "examples", "fuzz/fuzz_targets", ".ci")
# The types of the compiled module stand in one file.
STUB = "python/tundish/_native.pyi"
# Modules whose names are public, besides the packages.
PUBLIC = ("tundish.errors", "tundish.integrations.")

# Modules with one importer, each with the reason why it is not part of that one.
SINGLE_IMPORTER: dict[str, str] = {
    "tundish.checkpoint.dcp.reader": "reads torch's records in place, apart from what a load checks",
    "tundish.checkpoint.hf.export": "one format of checkpoints",
    "tundish.checkpoint.hf.sidecars": "configs, code and tokenizer, apart from the weights",
    "tundish.checkpoint.publish": "the background half of a save",
    "tundish.packing.batches.attention": "imports FlexAttention, which takes a second",
    "tundish.packing.batches.stream_batches": "how far each worker of a stream is, apart from what a loader gives",
    "tundish.packing.sources.json_lines": "a format of files",
    "tundish.packing.sources.megatron": "a format of files",
    "tundish.scatter.prefetch": "the thread of a loader, its queue and its end",
    "tundish.shm.supervisor": "the processes of a pool, apart from its tasks",
}


def sources(checkout: Path) -> list[Path]:
    """All source files."""
    return [
        path
        for tree in TREES
        for path in sorted((checkout / tree).rglob("*"))
        if path.suffix in (".py", ".rs", ".pyi")
    ]


def modules(checkout: Path) -> dict[str, Path]:
    """The file of each Python module of the package, by its full name; a package has that of its `__init__`."""
    root = checkout / "python"
    found = {}
    for path in sorted((root / "tundish").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(tree: ast.AST, known: dict[str, Path]) -> Iterator[str]:
    """The modules that a module imports, also in functions and for type checkers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in known else node.module


def single_importers(checkout: Path) -> dict[str, str]:
    """Each module that only one other module imports, with that one."""
    known = modules(checkout)
    importers: dict[str, set[str]] = {name: set() for name in known}
    for name, path in known.items():
        for other in imported(ast.parse(path.read_text(encoding="utf-8")), known):
            if other in known and other != name:
                importers[other].add(name)
    found = {}
    for name, path in known.items():
        if path.name != "__init__.py" and len(importers[name]) == 1:
            (importer,) = importers[name]
            if known[importer].name != "__init__.py":
                found[name] = importer
    return found


def with_all(checkout: Path) -> list[str]:
    """The internal modules that define `__all__`."""
    return [
        name
        for name, path in modules(checkout).items()
        if path.name != "__init__.py"
        and not name.startswith(PUBLIC)
        and any(
            isinstance(node, ast.Assign) and any(ast.unparse(target) == "__all__" for target in node.targets)
            for node in ast.parse(path.read_text(encoding="utf-8")).body
        )
    ]


def problems(checkout: Path) -> Iterator[str]:
    """What breaks a rule, a line each."""
    files = sources(checkout)
    for path in files:
        lines = path.read_bytes().count(b"\n")
        if lines > MAX_LINES and path != checkout / STUB:
            yield f"{path}: has {lines} lines, and at most {MAX_LINES} are allowed: split it by ideas"
    for folder, count in Counter(path.parent for path in files).items():
        if count > MAX_FILES:
            yield f"{folder}: has {count} source files, and at most {MAX_FILES} are allowed: merge or group them"
    defined = with_all(checkout)
    yield from (f"{name}: is internal and has __all__: remove it" for name in defined)
    single = single_importers(checkout)
    for name in sorted(single.keys() - SINGLE_IMPORTER.keys()):
        yield f"{name}: only {single[name]} imports it: merge it into that, or give its reason in .ci/layout.py"
    for name in sorted(SINGLE_IMPORTER.keys() - single.keys()):
        yield f".ci/layout.py: {name} has not one importer any more: remove it from SINGLE_IMPORTER"
    if len(SINGLE_IMPORTER) > MAX_SINGLE_IMPORTER:
        yield f".ci/layout.py: SINGLE_IMPORTER has more than {MAX_SINGLE_IMPORTER} names"


if __name__ == "__main__":
    folder = Path(*[word for word in sys.argv[1:] if word != "--list"] or ["."])
    if "--list" in sys.argv:
        for module, importer in single_importers(folder).items():
            print(f"{module} -> {importer}  [{SINGLE_IMPORTER.get(module, 'NO REASON')}]")  # noqa: T201 (a command)
        for module in with_all(folder):
            print(f"{module}: __all__")  # noqa: T201
    sys.exit("\n".join(problems(folder)) or None)
