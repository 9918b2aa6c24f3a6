"""Runs what a reader can copy from a Markdown page, in the current folder.

A page is read from top to bottom. Its ```python blocks share their names, as a reader who types them in would; one with
a title, as in ```python title="train.py", is saved under that name instead. Blocks of prompts (`>>>`) are also compared
with what they print. Of its ```console blocks each line `$ tundish …` or `$ python …` is run and has to succeed. A
```diff block is run twice, before its change and after it.

Run: python -P pages.py PAGE ...
"""

from __future__ import annotations

import contextlib
import doctest
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

FENCE = re.compile(
    r'^(?P<indent> *)```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?[^\n]*\n(?P<text>.*?)^(?P=indent)```$',
    re.DOTALL | re.MULTILINE,
)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# What follows `python` on its command line, by the command of a page.
COMMANDS = {"tundish": ["-m", "tundish"], "python": []}
# Runs a command line of `python`, and returns its end.
Run = Callable[[Sequence[str]], Any]


class Block(NamedTuple):
    """One fenced block: its language, its text, the line of the page on which the text begins, and its title."""

    language: str
    text: str
    line: int
    title: str | None = None

    def side(self, sign: str) -> Block:
        """The code of a diff before its change ("-") or after it ("+"); a line of the other side is empty."""
        lines = [line[1:] if line[0] in (" ", sign) else "\n" for line in self.text.splitlines(keepends=True)]
        return Block("python", "".join(lines), self.line)


def blocks(page: str) -> Iterator[Block]:
    for found in FENCE.finditer(page):
        indent = found["indent"]
        text = "".join(line.removeprefix(indent) for line in found["text"].splitlines(keepends=True))
        yield Block(found["language"], text, page.count("\n", 0, found.start("text")) + 1, found["title"])


def run_python(block: Block, page: Path, names: dict[str, Any]) -> None:
    if block.text.lstrip().startswith(">>>"):
        example = doctest.DocTestParser().get_doctest(block.text, names, page.name, str(page), block.line - 1)
        # Names that the block binds are there for the blocks after it.
        example.globs = names
        assert_passes(example)
    else:
        # The page's own line numbers stand in a traceback.
        exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)


def run_console(block: Block, page: Path, run: Run) -> None:
    for offset, line in enumerate(block.text.replace("\\\n", "").splitlines()):
        command = shlex.split(line.removeprefix("$ "), comments=True)
        if line.startswith("$ ") and command[0] in COMMANDS:
            ran = run([*COMMANDS[command[0]], *command[1:]])
            assert ran.returncode == 0, f"{page}:{block.line + offset}: {line}\n{ran.stdout}{ran.stderr}"


def assert_passes(example: doctest.DocTest) -> None:
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=OPTIONS).run(example, out=report.append, clear_globs=False)
    assert result.failed == 0, "".join(report)


def run_page(page: Path, run: Run) -> None:
    # A module, as a script is one, so that classes of the page can be pickled.
    module = sys.modules["__page__"] = ModuleType("__page__")
    try:
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.title is not None:
                Path(block.title).write_text(block.text, encoding="utf-8")
            elif block.language == "diff":
                for sign in "-+":
                    run_python(block.side(sign), page, vars(module))
            elif block.language in ("python", "pycon"):
                run_python(block, page, vars(module))
            elif block.language == "console":
                run_console(block, page, run)
    finally:
        del sys.modules["__page__"]


def _run_python(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)


if __name__ == "__main__":
    for name in [os.path.abspath(word) for word in sys.argv[1:]]:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            run_page(Path(name), _run_python)
