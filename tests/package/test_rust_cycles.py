"""`.ci/rust_cycles.py` finds circles among the modules of a crate, and the crates have none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
LIB = "mod shapes;\nmod colors;\npub use colors::{Blue, Red};\n"


def check(crates: Path) -> subprocess.CompletedProcess[str]:
    script = CHECKOUT / ".ci" / "rust_cycles.py"
    return subprocess.run([sys.executable, script, crates], capture_output=True, text=True, check=False)


def make_crate(folder: Path, shapes: str, *, name: str = "paint", file: str = "shapes.rs") -> None:
    """A crate whose `colors` imports `shapes`, and whose `shapes` has this text in this file."""
    for path, text in {"lib.rs": LIB, "colors.rs": "use crate::shapes::Circle;\n", file: shapes}.items():
        target = folder / name / "src" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


@pytest.mark.parametrize("file", ["shapes.rs", "shapes/mod.rs", "shapes/round/circle.rs"])
@pytest.mark.parametrize(
    "use",
    [
        "use crate::colors::Red;",
        "pub(crate) use crate::{\n    shapes::{Circle, Square},\n    colors::{Red, Blue},\n};",
        "use crate::Red;",
        "fn paint() { crate::colors::paint() }",
    ],
)
def test_a_circle_is_reported(tmp_path: Path, use: str, file: str) -> None:
    make_crate(tmp_path, use, file=file)
    make_crate(tmp_path, use, file=file, name="varnish")
    checked = check(tmp_path)
    assert checked.returncode == 1
    first, second = checked.stderr.splitlines()
    circles = "colors -> shapes -> colors", "shapes -> colors -> shapes"
    assert first.startswith(str(tmp_path / "paint" / "src" / "lib.rs")) and first.endswith(circles)
    assert second.startswith(str(tmp_path / "varnish" / "src" / "lib.rs")) and second.endswith(circles)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("shapes.rs", "//! Used by [`Red`](crate::Red).\nuse crate::shapes::round;\nuse std::colors::Red;"),
        ("shapes.rs", "fn draw() {}\n\n#[cfg(test)]\nmod tests {\n    use crate::colors::Red;\n}\n"),
        ("shapes/shapes_tests.rs", "use crate::colors::Red;"),
        ("shapes.rs", "use crate::{shapes::{colors, Circle}};"),
    ],
)
def test_comments_and_unit_tests_may_name_every_module(tmp_path: Path, file: str, text: str) -> None:
    make_crate(tmp_path, text, file=file)
    checked = check(tmp_path)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_crates_have_no_circles() -> None:
    assert len(list((CHECKOUT / "rust").glob("*/src/lib.rs"))) >= 6
    checked = check(CHECKOUT / "rust")
    assert (checked.returncode, checked.stderr) == (0, "")
