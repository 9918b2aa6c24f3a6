"""What an import loads: no torch for plans, and a missing extra says which `pip install` mends it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `script` in an interpreter of its own, where warnings are errors too."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "step",
    [
        "import tundish",
        "import tundish.errors, tundish.distributed, tundish.packing",
        "import tundish as td; td.pack([5, 3, 9], 4)",
        "import tundish as td; td.pack_datasets([[5, 3], [9]], 4, seed=1)",
        "import tundish as td; td.pack([5, 3, 9], 4, cache_dir='cache', threads=2).verify()",
        "import tundish as td; td.pack([5, 3, 9], 4).save('plan'); td.PackPlan.load('plan').stats()",
        "import tundish as td; list(td.PackedBatchSampler(td.pack([5, 3, 9], 4), 1))",
    ],
)
def test_plans_are_made_without_torch(step: str, tmp_path: Path) -> None:
    heavy = "torch", "transformers", "matplotlib", "pyarrow", "datasets"
    ran = run(f"{step}\nimport sys\nprint([name for name in {heavy} if name in sys.modules])", tmp_path)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("[]\n", "", 0)


def test_the_command_makes_plans_without_torch(tmp_path: Path) -> None:
    script = """
import sys
import numpy
from tundish.cli import main
numpy.save("lengths.npy", [5, 3, 9])
for arguments in (
    ["pack", "lengths.npy", "--max-length", "4", "--out", "plan"],
    ["plan", "show", "plan"],
    ["plan", "verify", "plan", "lengths.npy"],
):
    assert main(arguments) == 0, arguments
assert "torch" not in sys.modules
"""
    ran = run(script, tmp_path)
    assert ran.returncode == 0, ran.stderr


def test_a_plot_without_its_extra_names_the_install(tmp_path: Path) -> None:
    script = """
import sys
sys.modules["matplotlib"] = None
import tundish as td
try:
    td.pack([5, 3, 9], 4).plot("plan.png")
except ImportError as error:
    assert isinstance(error, td.TundishError)
    print(error)
"""
    ran = run(script, tmp_path)
    assert "pip install 'tundish[plot]'" in ran.stdout, ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_names_that_do_not_exist_are_refused() -> None:
    import tundish

    with pytest.raises(AttributeError, match="no attribute 'unpack'"):
        tundish.unpack  # noqa: B018
