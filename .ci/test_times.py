"""Lists the assertions of the tests that a slow machine could fail, and fails if one of them gives no reason.

Such an assertion says that something took less than some time. A machine of half the speed under full load has to pass
it too. A promise of time gets ten times its room, or the test looks at what was *not* waited for. The reason is a
comment `# time: …`, at the end of the assertion or on the line before it, or at the definition of the limit.

An assertion of Python is found by `<` or `<=` with a time on the smaller side: an expression with a clock of `time` in
it, or a name like `seconds`, `took`, `waits` or `failed_at`, or one that was assigned from such an expression. In Rust,
it is an `assert!` in which `elapsed()` is less than something, or something is less than a `Duration`.

Run: python .ci/test_times.py [--list] [FOLDER ...]
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

CLOCKS = {
    "monotonic",
    "monotonic_ns",
    "perf_counter",
    "perf_counter_ns",
    "process_time",
    "thread_time",
    "time_ns",
}
TIME_NAMES = re.compile(r"(^|_)(at|duration|elapsed|seconds|took|latency|waits)$")
REASON = re.compile(r"(?:#|//).*\btime: (\S.*)")

RUST_ASSERT = re.compile(r"\bassert!\(.*?\);", re.DOTALL)
# A range has its limit before the time.
RUST_LIMIT = re.compile(
    r"(?:elapsed\(\)(?:\.as_\w+\(\))? <=?|<=?(?= Duration::from)) (?P<limit>[^,;&|]+)|\.contains\(&\w+\.elapsed\(\)"
)


class Source:
    """A file of tests: its lines, its syntax, and the assignments of each name."""

    def __init__(self, path: Path, root: Path) -> None:
        self.root = root
        self.lines = path.read_text(encoding="utf-8").splitlines()
        self.tree = ast.parse("\n".join(self.lines))
        self.assignments: dict[str, list[ast.Assign]] = {}
        # The module from which a name comes.
        self.homes: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        self.assignments.setdefault(target.id, []).append(node)
            elif isinstance(node, ast.ImportFrom):
                self.homes |= {alias.asname or alias.name: str(node.module) for alias in node.names}

    def reason_at(self, line: int) -> str | None:
        """The reason in this line or the one before."""
        found = (REASON.search(self.lines[number]) for number in (line - 1, line - 2))
        return next((match[1] for match in found if match), None)

    def reason_of(self, limit: ast.AST, seen: frozenset[str] = frozenset()) -> str | None:
        """The reason at the definition of a name in a limit, also in the helper module that defines it."""
        for node in ast.walk(limit):
            if not isinstance(node, ast.Name) or node.id in seen:
                continue
            for assignment in self.assignments.get(node.id, []):
                reason = self.reason_at(assignment.lineno) or self.reason_of(
                    assignment.value, seen | {node.id}
                )
                if reason is not None:
                    return reason
            home = self.root / f"{self.homes.get(node.id, '').replace('.', '/')}.py"
            if home.is_file():
                reason = source(home, self.root).reason_of(ast.Name(node.id))
                if reason is not None:
                    return reason
        return None


@functools.cache
def source(path: Path, root: Path) -> Source:
    """A file, parsed once."""
    return Source(path, root)


def is_time(node: ast.AST, known: set[str]) -> bool:
    """Whether an expression is a time, or has one in it."""
    for part in ast.walk(node):
        name = part.id if isinstance(part, ast.Name) else part.attr if isinstance(part, ast.Attribute) else ""
        if name in CLOCKS or name in known or (TIME_NAMES.search(name) and not name.isupper()):
            return True
    return False


def assigned_times(tree: ast.AST) -> set[str]:
    """The names that are assigned from clocks."""
    found: set[str] = set()
    before = -1
    while before != len(found):
        before = len(found)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and is_time(node.value, found):
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def limits(tree: ast.AST) -> Iterator[tuple[int, ast.AST]]:
    """The lines of the assertions of a function that something took less than some time, with that limit."""
    known = assigned_times(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assert):
            continue
        for comparison in ast.walk(node.test):
            if isinstance(comparison, ast.Compare):
                sides = [comparison.left, *comparison.comparators]
                for operator, left, right in zip(comparison.ops, sides, sides[1:], strict=False):
                    smaller, larger = (
                        (left, right) if isinstance(operator, ast.Lt | ast.LtE) else (right, left)
                    )
                    if isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE) and is_time(smaller, known):
                        yield comparison.lineno, larger


def comparisons(path: Path, root: Path) -> Iterator[tuple[int, str, str | None]]:
    """The line, the text and the reason of each limit of time in a file."""
    file = source(path, root)
    for function in file.tree.body:
        if isinstance(function, ast.FunctionDef | ast.ClassDef):
            for line, limit in limits(function):
                yield line, file.lines[line - 1].strip(), file.reason_at(line) or file.reason_of(limit)


def rust_assertions(path: Path) -> Iterator[tuple[int, str, str | None]]:
    """The line, the text and the reason of each limit of time in a file of Rust."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for assertion in RUST_ASSERT.finditer(text):
        found = RUST_LIMIT.search(assertion[0])
        if found is None:
            continue
        first = text.count("\n", 0, assertion.start())
        number = text.count("\n", 0, assertion.start() + found.start())
        # Also at the definition of a constant in the limit.
        names = "|".join(re.findall(r"\b[A-Z_]{2,}\b", found["limit"] or ""))
        defined = [at for at, line in enumerate(lines) if names and re.search(rf"\bconst ({names}):", line)]
        places = [lines[at] for one in (number, first, *defined) for at in (one, one - 1) if at >= 0]
        yield number + 1, lines[number].strip(), next((m[1] for m in map(REASON.search, places) if m), None)


if __name__ == "__main__":
    folders = [Path(word) for word in sys.argv[1:] if word != "--list"] or [Path("tests"), Path("rust")]
    missing = []
    for folder in folders:
        found = [
            (file, limit) for file in sorted(folder.rglob("*.py")) for limit in comparisons(file, folder)
        ]
        found += [(file, limit) for file in sorted(folder.rglob("*.rs")) for limit in rust_assertions(file)]
        for file, (line, text, reason) in found:
            if "--list" in sys.argv:
                print(f"{file}:{line}: {text}  [{reason or 'NO REASON'}]")  # noqa: T201 (a command)
            if reason is None:
                missing.append(f"{file}:{line}: {text}")
    if missing:
        sys.exit(
            "\n".join(
                [*missing, "these limits of time have no reason: write a comment `time: …` beside them"]
            )
        )
