"""The paths through the code in CONTRIBUTING.md name files and functions that exist."""

from __future__ import annotations

import importlib
import re
from functools import reduce
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
_SECTION = (
    (CHECKOUT / "CONTRIBUTING.md")
    .read_text(encoding="utf-8")
    .partition("## Paths through")[2]
    .partition("\n## ")[0]
)
# The file and the text of each step, by path.
PATHS = {
    title: re.findall(r"^\d+\. `([^`]+)`: ((?:.|\n +)+)", steps, re.MULTILINE)
    for title, steps in re.findall(r"^(An? \w+).*:\n\n((?:\d+\. .*\n| +.*\n)+)", _SECTION, re.MULTILINE)
}


def test_a_path_has_at_most_twelve_files_and_none_twice() -> None:
    assert PATHS
    for path, steps in PATHS.items():
        files = [file for file, _ in steps]
        assert 5 < len(files) <= 12, path
        assert len(set(files)) == len(files), path


@pytest.mark.parametrize("path", PATHS)
def test_the_names_of_a_path_exist(path: str) -> None:
    for file, text in PATHS[path]:
        names = re.findall(r"`([\w.]+)`", text)
        assert names
        if file.endswith(".rs"):
            source = (CHECKOUT / file).read_text(encoding="utf-8")
            assert all(re.search(rf"fn {name}\b|\.{name}\(", source) for name in names), (file, names)
            continue
        module = importlib.import_module("tundish." + file.removesuffix(".py").replace("/", "."))
        source = (CHECKOUT / "python" / "tundish" / file).read_text(encoding="utf-8")
        first, *others = names
        assert reduce(getattr, first.split("."), module).__module__ == module.__name__
        # The others are defined there too, or called.
        for name in others:
            assert re.search(rf"(def |\.){name.rpartition('.')[2]}\b", source), (file, name)
