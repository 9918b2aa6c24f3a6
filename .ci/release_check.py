"""Installs the wheel and the source distribution into clean environments, and uses them there as a new user would.

Each environment has one Python and one torch. `tests/package/smoke.py` uses every part, also without torch; with the
newest torch, the examples of the pages for newcomers run as well. The Pythons are those on PATH and those of pyenv. pip
gets torch and the other packages as it is configured, for example by `PIP_FIND_LINKS`; a CUDA build of torch, of some
gigabytes, is used only with `--cuda`. An environment that cannot be had is skipped, and its reason is printed.

Run: python .ci/release_check.py [--cuda] [FOLDER OF THE DISTRIBUTIONS]
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
# What pip is asked for, by name. The newest one has the extra that the pages need.
TORCHES = {"no torch": None, "torch 2.6": "torch==2.6.*", "the newest torch": "torch"}
WITHOUT_TORCH = ("msgpack", "numpy", "tqdm")
PAGES = ("README.md", "docs/quickstart.md")
# Seconds that pip may take to find out whether a torch can be had, and everything else.
ASKING, WORKING = 300, 3600


class Unavailable(Exception):
    """Something cannot be had on this machine; the message says what."""


class Check(NamedTuple):
    """A row of the summary."""

    what: str
    outcome: str
    seconds: float


def call(*words: str | Path, timeout: float = WORKING, **environment: str) -> str:
    """Run a command apart from the environment that this script runs in; returns what it printed."""
    # A build from the source distribution has a folder of its own: its files have dates of 2006, and cargo would take
    # an older build in a shared one for theirs.
    left_out = ("PYTHON", "VIRTUAL_ENV", "CONDA", "PYENV_VERSION", "TUNDISH", "CARGO_TARGET_DIR")
    settings = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    ran = subprocess.run(
        words,
        env=settings | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=timeout,
    )
    if ran.returncode != 0:
        raise subprocess.CalledProcessError(ran.returncode, [str(word) for word in words], ran.stdout)
    return ran.stdout


def find_python(version: str) -> Path:
    """An interpreter of this version."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = shutil.which(f"python{version}")
    for path in (on_path, *sorted(pyenv.glob(f"{version}.*/bin/python{version}"), reverse=True)):
        # One on PATH may be a script of pyenv that starts no interpreter.
        if path is not None:
            try:
                call(path, "-c", "import ensurepip, venv")
            except (OSError, subprocess.CalledProcessError):
                continue
            return Path(path)
    raise Unavailable(f"no Python {version} with venv is on PATH or in pyenv")


def make_environment(python: Path, folder: Path) -> Path:
    """A new environment; returns its interpreter."""
    call(python, "-m", "venv", folder)
    made = folder / "bin" / "python"
    call(made, "-m", "pip", "install", "--quiet", "--upgrade", "pip>=24")
    return made


def install_torch(python: Path, wanted: str, *, may_be_cuda: bool) -> None:
    """Install torch with pip, or raise `Unavailable`."""
    # The constraint of a checkout is for its newest torch.
    unset = {"PIP_CONSTRAINT": ""} if "==" in wanted else {}
    install = (python, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", wanted)
    try:
        report = json.loads(call(*install, "--dry-run", "--report", "-", timeout=ASKING, **unset))
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"pip finds no {wanted}: {last_line(error.stdout)}") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"pip did not find {wanted} within {ASKING} s") from None
    found = {one["metadata"]["name"]: one["metadata"]["version"] for one in report["install"]}
    if not may_be_cuda and any(name.startswith(("nvidia-", "cuda-")) for name in found):
        raise Unavailable(
            f"pip finds a CUDA build alone, torch {found['torch']}: use --cuda, or point pip to a CPU build"
        )
    call(*install, **unset)


def check_wheel(python: Path, wheel: Path, torch: str | None, *, may_be_cuda: bool) -> str:
    """Install the wheel, use every part and run the pages. Return the versions that were used."""
    if torch is None:
        call(python, "-m", "pip", "install", "--quiet", *WITHOUT_TORCH)
        call(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
        return last_line(call(python, CHECKOUT / "tests" / "package" / "smoke.py"))
    install_torch(python, torch, may_be_cuda=may_be_cuda)
    is_newest = torch == "torch"
    constraint = {} if is_newest else {"PIP_CONSTRAINT": ""}
    call(
        python, "-m", "pip", "install", "--quiet", f"{wheel}[examples]" if is_newest else wheel, **constraint
    )
    used = [last_line(call(python, CHECKOUT / "tests" / "package" / "smoke.py"))]
    version = call(python, "-c", "import torch; print(torch.__version__)").strip()
    for page in PAGES if is_newest else ():
        began = time.monotonic()
        call(python, "-P", CHECKOUT / "tests" / "support" / "pages.py", CHECKOUT / page)
        used.append(f"{page} runs in {time.monotonic() - began:.0f} s")
    return f"torch {version}: {'; '.join(used)}"


def check_source(python: Path, source: Path) -> str:
    """Build from the source distribution, as pip does where no wheel fits."""
    call(python, "-m", "pip", "install", "--quiet", *WITHOUT_TORCH)
    # The profile of the tests is the one that builds fastest.
    call(python, "-m", "pip", "install", "--quiet", "--no-deps", source, MATURIN_PEP517_ARGS="--profile dev")
    return last_line(call(python, CHECKOUT / "tests" / "package" / "smoke.py"))


def last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def checks(distributions: Path, *, may_be_cuda: bool) -> Iterator[Check]:
    """Run all checks; an outcome begins with "passed", "skipped" or "FAILED"."""
    (wheel,) = distributions.glob(f"tundish-*-cp311-abi3-manylinux_2_28_{platform.machine()}.whl")
    (source,) = distributions.glob("tundish-*.tar.gz")
    rows = [(version, name) for version in PYTHONS for name in TORCHES]
    for version, name in [*rows, (PYTHONS[0], "from source")]:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="tundish-release-") as folder:
            try:
                python = make_environment(find_python(version), Path(folder) / "env")
                if name == "from source":
                    used = check_source(python, source)
                else:
                    used = check_wheel(python, wheel, TORCHES[name], may_be_cuda=may_be_cuda)
                outcome = f"passed: {used}"
            except Unavailable as reason:
                outcome = f"skipped: {reason}"
            except subprocess.CalledProcessError as error:
                outcome = f"FAILED: {' '.join(error.cmd)}\n{error.stdout}"
            except subprocess.TimeoutExpired as error:
                outcome = f"FAILED: {error}"
        yield Check(f"Python {version}, {name}", outcome, time.monotonic() - began)


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--cuda"]
    done = []
    for check in checks(Path(words[0] if words else "dist").resolve(), may_be_cuda="--cuda" in sys.argv):
        print(f"{check.what} ({check.seconds:.0f} s): {check.outcome}", flush=True)  # noqa: T201 (a command)
        done.append(check.outcome.partition(":")[0])
    counts = {outcome: done.count(outcome) for outcome in ("passed", "FAILED", "skipped")}
    print(", ".join(f"{count} {outcome.lower()}" for outcome, count in counts.items()))  # noqa: T201
    sys.exit(counts["FAILED"] > 0 or counts["passed"] == 0)


if __name__ == "__main__":
    main()
