"""The pages of the site: each public name has an entry in the reference, and the words of all pages are few."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import tundish as td

CHECKOUT = Path(__file__).resolve().parents[2]
REFERENCE = CHECKOUT / "docs" / "reference"
PARTS = ("checkpoint", "distributed", "errors", "hf", "packing", "rtensor", "scatter", "shm", "tree")


def public_names() -> Iterator[str]:
    """The shortest path of each public name: `tundish.pack`, and not `tundish.packing.pack`."""
    yield from (f"tundish.{name}" for name in td.__all__ if not isinstance(getattr(td, name), ModuleType))
    for part in PARTS:
        module = getattr(td, part)
        for name in module.__all__:
            if getattr(td, name, None) is not getattr(module, name):
                yield f"tundish.{part}.{name}"


def entries() -> list[str]:
    pages = [page.read_text(encoding="utf-8") for page in sorted(REFERENCE.glob("*.md"))]
    return [name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)]


def test_each_public_name_has_one_entry_in_the_reference() -> None:
    assert sorted(entries()) == sorted(public_names())


def test_entries_are_names_that_users_write() -> None:
    for name in entries():
        first, *others = name.split(".")
        value = importlib.import_module(first)
        for one in others:
            value = getattr(value, one)


def words(checkout: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CHECKOUT / ".ci" / "words.py"), "--list", str(checkout)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_pages_of_the_checkout_are_short() -> None:
    assert words(CHECKOUT).stderr == ""


@pytest.mark.parametrize(
    ("pages", "problem"),
    [
        ({"long.md": "word " * 2200}, ""),
        ({"long.md": "word " * 2201}, "long.md: has 2201 words"),
        ({"deep/long.md": "word " * 2201}, "long.md: has 2201 words"),
        ({"reference/long.md": "word " * 2201}, ""),
        ({"code.md": "word\n```python\n" + "code " * 2201 + "\n```\n<!--" + "note " * 2201 + "-->"}, ""),
        ({f"{number}.md": "word " * 2200 for number in range(10)}, ""),
        ({f"{number}.md": "word " * 2001 for number in range(11)}, "all pages have 22011 words"),
    ],
)
def test_too_many_words_are_reported(pages: dict[str, str], problem: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("")
    for name, text in pages.items():
        path = tmp_path / "docs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = words(tmp_path)
    assert problem in done.stderr and bool(done.stderr) == bool(problem) == bool(done.returncode)
