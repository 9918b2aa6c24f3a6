"""Files have at most 700 lines, and folders at most 20 source files, `__init__.py` and `mod.rs` among them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
TREES = ("python/tundish", "rust", "tests", "benches", "examples", "fuzz/fuzz_targets")
SOURCES = [
    path for tree in TREES for path in (CHECKOUT / tree).rglob("*") if path.suffix in (".py", ".rs", ".pyi")
]
# The types of the compiled module stand in one file.
STUB = CHECKOUT / "python" / "tundish" / "_native.pyi"


def test_no_file_is_longer_than_700_lines() -> None:
    lines = {path: path.read_bytes().count(b"\n") for path in SOURCES if path != STUB}
    assert lines and {path: count for path, count in lines.items() if count > 700} == {}


def test_no_folder_has_more_than_20_source_files() -> None:
    counts = Counter(path.parent for path in SOURCES)
    assert counts and {folder: count for folder, count in counts.items() if count > 20} == {}
