"""Imports: plans load no torch, and a missing extra names the `pip install` that adds it."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `script` in an interpreter of its own, where warnings are errors too."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script], cwd=folder, capture_output=True, text=True, check=False
    )


def test_planning_does_not_import_torch(tmp_path: Path) -> None:
    script = """
import sys
import tundish as td

def check(what):
    heavy = "torch", "transformers", "matplotlib", "pyarrow", "datasets"
    found = [name for name in heavy if name in sys.modules]
    assert not found, (what, found)

check("tundish")
import tundish.errors, tundish.distributed, tundish.packing, tundish.scatter
check("its parts")
for number, step in enumerate((
    lambda: td.pack([5, 3, 9], 4),
    lambda: td.pack_datasets([[5, 3], [9]], 4, seed=1),
    lambda: td.pack([5, 3, 9], 4, cache_dir="cache", threads=2).verify(),
    lambda: td.pack([5, 3, 9], 4, share=True).verify(),
    lambda: (td.shm.node_shared([5, 3, 9], path="arrays"), td.distributed.node_group()),
    lambda: (td.pack([5, 3, 9], 4).save("plan"), td.PackPlan.load("plan").stats()),
    lambda: list(td.PackedBatchSampler(td.pack([5, 3, 9], 4), 1)),
    lambda: td.mix([td.pack([5, 3, 9], 4)], [1], share=True).save("mix"),
)):
    step()
    check(number)
"""
    ran = run(script, tmp_path)
    assert (ran.stderr, ran.returncode) == ("", 0)


def test_the_first_plan_of_a_process_imports_nothing_that_ctrl_c_could_break(tmp_path: Path) -> None:
    script = """
import sys
import numpy
import tundish as td
import tundish._native

def interrupt(frame, event, argument):
    # Any error in numpy becomes a panic when the bindings look up its names.
    if "numpy/lib/_version" in frame.f_code.co_filename:
        raise KeyboardInterrupt

sys.settrace(interrupt)
plan = td.pack(numpy.arange(9), 3)
sys.settrace(None)
print(len(plan))
"""
    ran = run(script, tmp_path)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("12\n", "", 0)


def test_the_plan_commands_do_not_import_torch(tmp_path: Path) -> None:
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


def test_plot_without_matplotlib_names_the_pip_command(tmp_path: Path) -> None:
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


def test_help_and_completion_need_no_optional_package(tmp_path: Path) -> None:
    script = """
import sys
sys.modules['transformers'] = None
import inspect, pydoc, rlcompleter, tundish
assert rlcompleter.Completer({'td': tundish}).complete('td.', 0)
inspect.getmembers(tundish)
pydoc.render_doc(tundish)
from tundish import *
"""
    ran = run(script, tmp_path)
    assert (ran.stderr, ran.returncode) == ("", 0)


@pytest.mark.parametrize("package", ["tundish", "tundish.packing", "tundish.shm"])
def test_only_public_names_are_listed(package: str, tmp_path: Path) -> None:
    """By `dir`, completion and `help`, also when all parts are imported."""
    script = f"""
import inspect, pydoc, re
import {package} as package
inspect.getmembers(package)
listed = {{name for name in dir(package) if not name.startswith("__")}}
assert listed - {{"hf"}} == set(package.__all__), listed
text = pydoc.plain(pydoc.render_doc(package))
functions = re.findall(r"^    (\\w+)\\(", text.partition("\\nFUNCTIONS\\n")[2], re.MULTILINE)
assert functions, text
assert set(functions) <= set(package.__all__), functions
"""
    ran = run(script, tmp_path)
    assert ran.returncode == 0, ran.stderr


def test_td_hf_is_listed_only_where_transformers_is_installed(tmp_path: Path) -> None:
    script = """
import sys
import tundish
assert "hf" in dir(tundish)
sys.modules["transformers"] = None
assert "hf" not in dir(tundish)
# Each name needs its own framework alone.
assert callable(tundish.hf.pack_dataset)
try:
    tundish.hf.TundishTrainerMixin
except ImportError as error:
    print(error)
"""
    ran = run(script, tmp_path)
    assert "pip install 'tundish[hf]'" in ran.stdout, ran.stderr


@pytest.mark.parametrize(
    ("step", "loaded"),
    [
        ("import tundish", ["tundish", "tundish.lazy"]),
        ("import tundish.packing", ["tundish", "tundish.lazy", "tundish.packing"]),
        ("import tundish; tundish.TundishError", ["tundish", "tundish.errors", "tundish.lazy"]),
    ],
)
def test_a_part_is_imported_on_first_use(step: str, loaded: list[str], tmp_path: Path) -> None:
    heavy = "numpy", "typing", "importlib.metadata"
    ran = run(
        "import sys\nbefore = set(sys.modules)\n"
        f"{step}\n"
        f"print(sorted(name for name in sys.modules if name.startswith('tundish')) == {loaded})\n"
        f"print([name for name in {heavy} if name in sys.modules and name not in before])",
        tmp_path,
    )
    light = "[]" if "Error" not in step else "['typing']"
    assert (ran.stdout, ran.stderr) == (f"True\n{light}\n", "")


@pytest.mark.parametrize("package", ["tundish", "tundish.packing"])
def test_every_public_name_is_found_and_listed(package: str, tmp_path: Path) -> None:
    script = f"""
import {package} as package
assert set(package.__all__) <= set(dir(package)), dir(package)
for name in package.__all__:
    assert getattr(package, name) is getattr(package, name)
    assert name in vars(package), name
from {package} import *
assert pack is package.pack and PackPlan.__name__ == "PackPlan"
"""
    ran = run(script, tmp_path)
    assert (ran.stderr, ran.returncode) == ("", 0)


def test_the_public_names_of_distributed() -> None:
    import tundish.distributed

    public = "agreed build_once_per_node is_local_rank0 local_rank local_world_size node_group vote"
    assert tundish.distributed.__all__ == public.split()


def test_type_checking_imports_match_the_lazy_table() -> None:
    """The imports under TYPE_CHECKING, which nothing runs, against the table, which no checker reads."""
    for package in ("tundish", "tundish.packing", "tundish.integrations.hf"):
        module = importlib.import_module(package)
        assert module.__file__ is not None
        tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
        (block,) = (node for node in tree.body if isinstance(node, ast.If))
        for statement in block.body:
            assert isinstance(statement, ast.ImportFrom) and statement.module is not None
            for alias in statement.names:
                found = getattr(module, alias.asname or alias.name)
                if isinstance(found, ModuleType):
                    assert found.__name__ == f"{statement.module}.{alias.name}"
                else:
                    assert found is getattr(importlib.import_module(statement.module), alias.name)
        named = {alias.asname or alias.name for statement in block.body for alias in statement.names}  # type: ignore[attr-defined]
        assert named - {"__version__", "hf"} == set(module.__all__)


def test_unknown_names_raise_attribute_error() -> None:
    import tundish

    with pytest.raises(AttributeError, match="no attribute 'unpack'"):
        tundish.unpack  # noqa: B018
    with pytest.raises(ImportError, match="unpack"):
        from tundish.packing import unpack  # noqa: F401
