"""The wheel that `make wheel` builds works where there is no Rust, and without torch as long as only plans are made."""

from __future__ import annotations

import email.message
import email.parser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
# Of the dependencies, those that a plan needs.
LINKED = ("numpy", "numpy.libs", "tqdm")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    maturin = Path(sysconfig.get_path("scripts")) / "maturin"
    subprocess.run(
        # In the profile and with the features that `make test` has built already.
        [maturin, "build", "--locked", "--features", "failpoints", "--out", folder],
        cwd=CHECKOUT,
        check=True,
        capture_output=True,
    )
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def clean_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment that holds the wheel, numpy and tqdm, and nothing else."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False, symlinks=True)
    programs = folder / "bin"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            programs / "python",
            "install",
            "--no-deps",
            "--no-index",
            wheel,
        ],
        check=True,
        capture_output=True,
    )
    (packages,) = folder.glob("lib/python*/site-packages")
    installed = Path(sysconfig.get_path("platlib"))
    for name in LINKED:
        if (installed / name).exists():
            (packages / name).symlink_to(installed / name)
    return programs


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.parser.BytesParser().parsebytes(archive.read(name))


def run(programs: Path, *command: str, folder: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "CARGO"))}
    environment["PATH"] = str(programs)
    assert shutil.which("cargo", path=environment["PATH"]) is None
    ran = subprocess.run(
        [programs / command[0], *command[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_one_wheel_serves_every_python_from_3_11_on(wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name


def test_the_wheel_contains_the_package_only(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    in_checkout = {
        path.relative_to(CHECKOUT / "python").as_posix()
        for pattern in ("*.py", "*.pyi", "py.typed")
        for path in (CHECKOUT / "python" / "tundish").rglob(pattern)
    }
    in_wheel = {name for name in names if name.startswith("tundish/")}
    assert in_wheel - in_checkout == {"tundish/_native.abi3.so"}
    assert in_checkout <= in_wheel
    assert {name.split("/")[0].split("-")[0] for name in names} == {"tundish"}
    assert not [
        name for name in names if re.search(r"(^|/)(tests?|conftest|test_\w+|\w+_test)(/|\.py$)", name)
    ]


def test_the_wheel_has_its_licence(wheel: Path, metadata: email.message.Message) -> None:
    assert (metadata["License-Expression"], metadata.get_all("License-File")) == ("Apache-2.0", ["LICENSE"])
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("licenses/LICENSE"))
        assert archive.read(name) == (CHECKOUT / "LICENSE").read_bytes()


def test_the_metadata_says_what_an_index_shows(metadata: email.message.Message) -> None:
    assert metadata["Requires-Python"] == ">=3.11"
    for field in ("Summary", "Keywords", "Author"):
        assert metadata[field], field
    classifiers = metadata.get_all("Classifier", [])
    for version in ("3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in classifiers
    assert "Typing :: Typed" in classifiers
    described = metadata.get_payload(decode=True)
    assert isinstance(described, bytes)
    assert described.strip() == (CHECKOUT / "README.md").read_bytes().strip()


def test_every_extra_that_is_named_exists(metadata: email.message.Message) -> None:
    places = [
        CHECKOUT / "README.md",
        *(CHECKOUT / "docs").rglob("*.md"),
        *(CHECKOUT / "examples").glob("*.py"),
    ]
    places += (CHECKOUT / "python").rglob("*.py")
    text = "".join(path.read_text(encoding="utf-8") for path in places)
    named = {extra for found in re.findall(r"tundish\[([a-z,]+)\]", text) for extra in found.split(",")}
    # Where a message names the extra of a missing package.
    named |= set(re.findall(r'\bmissing_extra\(\s*"(\w+)"', text))
    assert {"arrow", "hf", "plot"} <= named <= set(metadata.get_all("Provides-Extra", []))


def test_the_citation_has_the_version(metadata: email.message.Message) -> None:
    citation = (CHECKOUT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [metadata["Version"]]


def test_planning_works_without_rust_and_torch(clean_environment: Path, tmp_path: Path) -> None:
    script = """
import importlib.util
import sys
import tundish as td
assert importlib.util.find_spec("torch") is None
assert td.__file__.startswith(sys.prefix), td.__file__
td.pack([5, 3, 9], 4, seed=0, threads=2).save("plan")
plan = td.PackPlan.load("plan", lengths=[5, 3, 9])
plan.verify()
print(len(plan))
"""
    assert run(clean_environment, "python", "-c", script, folder=tmp_path) == "4\n"


def test_the_command_is_installed(clean_environment: Path, tmp_path: Path) -> None:
    import tundish

    assert tundish.__version__ in run(clean_environment, "tundish", "--version", folder=tmp_path)
