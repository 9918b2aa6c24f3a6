"""The checks of `make lint` on the layout of the sources and on limits of time in tests find what they are for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGE = Path("python") / "tundish"


def check(script: str, folder: Path, *words: str) -> str:
    """What a check complains about."""
    command = [sys.executable, CHECKOUT / ".ci" / script, *words, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == (1 if done.stderr else 0)
    return done.stderr + done.stdout


def write(checkout: Path, path: str | Path, text: str) -> None:
    (checkout / path).parent.mkdir(parents=True, exist_ok=True)
    (checkout / path).write_text(text)


def test_the_checkout_keeps_the_rules() -> None:
    assert check("layout.py", CHECKOUT) == ""
    assert check("test_times.py", CHECKOUT / "tests") == ""


@pytest.mark.parametrize(("lines", "is_fine"), [(700, True), (701, False)])
def test_a_file_of_more_than_700_lines_is_reported(lines: int, is_fine: bool, tmp_path: Path) -> None:
    write(tmp_path, "rust/shm/src/lib.rs", "//\n" * lines)
    assert ("lib.rs: has 701 lines" not in check("layout.py", tmp_path)) == is_fine


@pytest.mark.parametrize(("files", "is_fine"), [(20, True), (21, False)])
def test_a_folder_of_more_than_20_source_files_is_reported(files: int, is_fine: bool, tmp_path: Path) -> None:
    for number in range(files):
        write(tmp_path, f"tests/shm/test_{number}.py", "")
    write(tmp_path, "tests/shm/notes.md", "")
    assert ("shm: has 21 source files" not in check("layout.py", tmp_path)) == is_fine


@pytest.mark.parametrize(
    ("importers", "is_fine"),
    [
        ({"one.py": "from tundish.part.helper import help"}, False),
        ({"one.py": "def call():\n    import tundish.part.helper"}, False),
        ({"one.py": "from tundish.part import helper"}, False),
        ({"one.py": "from tundish.part.helper import help", "two.py": "import tundish.part.helper"}, True),
        ({"part/__init__.py": "from tundish.part.helper import help"}, True),
        (
            {"__init__.py": "from tundish.part.helper import help", "one.py": "import tundish.part.helper"},
            True,
        ),
        ({}, True),
    ],
)
def test_a_module_with_a_single_importer_is_reported(
    importers: dict[str, str], is_fine: bool, tmp_path: Path
) -> None:
    for path in ("__init__.py", "part/__init__.py", "part/helper.py"):
        write(tmp_path, PACKAGE / path, "")
    for path, text in importers.items():
        write(tmp_path, PACKAGE / path, f"{text}\n")
    listed = check("layout.py", tmp_path, "--list")
    assert ("tundish.part.helper -> tundish.one  [NO REASON]" not in listed) == is_fine


def test_all_belongs_into_packages_and_public_modules(tmp_path: Path) -> None:
    for path in ("__init__.py", "errors.py", "integrations/transformers.py", "part/helper.py"):
        write(tmp_path, PACKAGE / path, '__all__ = ["help"]\n')
    lines = check("layout.py", tmp_path, "--list").splitlines()
    assert [line for line in lines if line.endswith("__all__")] == ["tundish.part.helper: __all__"]


@pytest.mark.parametrize(
    ("body", "is_fine"),
    [
        ("assert time.monotonic() - began < 1", False),
        ("took = time.perf_counter() - began\n    assert 0 < took <= 5, took", False),
        ("mine = time.monotonic()\n    yours = mine - began\n    assert 5 > yours", False),
        ("assert all(seconds < LIMIT for seconds in waits())", False),
        ("assert failed_at - began < LIMIT", False),
        ("assert sorted(waits)[1] < 0.1", False),
        ("assert time.monotonic() - began < 1  # time: ten times the promise", True),
        ("# time: ten times the promise\n    assert time.monotonic() - began < 1", True),
        ("assert failed_at - began < 2 * EXPLAINED", True),
        ("assert failed_at - began < PATIENCE", True),
        ("until = began + PATIENCE\n    assert time.monotonic() < until", True),
        ("assert time.monotonic() - began >= 1", True),
        ("assert size < 5", True),
        ("while time.monotonic() < until:\n        pass", True),
    ],
)
def test_a_limit_of_time_needs_a_reason(body: str, is_fine: bool, tmp_path: Path) -> None:
    write(tmp_path, "support/waiting.py", "PATIENCE = 60  # time: what comes at all comes within this\n")
    write(
        tmp_path,
        "test_x.py",
        "from support.waiting import PATIENCE\nLIMIT = 1\n\n# time: ten times the promise\nEXPLAINED = 10\n\n"
        f"def test_it():\n    {body}\n",
    )
    assert (check("test_times.py", tmp_path) == "") == is_fine


@pytest.mark.parametrize(
    ("body", "is_fine"),
    [
        ("assert!(begin.elapsed() < Duration::from_secs(1));", False),
        ('assert!(\n        begin.elapsed() <= LIMIT,\n        "late"\n    );', False),
        ("assert!((0.2..2.0).contains(&begin.elapsed().as_secs_f64()));", False),
        ('assert!(is_late && spent < Duration::from_millis(50), "{spent:?}");', False),
        ("// time: ten times the promise\n    assert!(begin.elapsed() < Duration::from_secs(1));", True),
        ("assert!(begin.elapsed() < PATIENCE);", True),
        ("assert!(begin.elapsed() >= LIMIT);", True),
        ("assert!(size < 5); while begin.elapsed() < LIMIT {}", True),
    ],
)
def test_a_limit_of_time_in_rust_needs_a_reason(body: str, is_fine: bool, tmp_path: Path) -> None:
    limits = "const LIMIT: Duration = SECOND;\n\n// time: far more than it takes\nconst PATIENCE: Duration = MINUTE;\n"
    write(tmp_path, "tests/it.rs", f"{limits}\n#[test]\nfn it() {{\n    {body}\n}}\n")
    assert (check("test_times.py", tmp_path) == "") == is_fine
