"""Every example that a reader can copy runs: docstrings, README.md and docs/.

`support.pages` says what of a page runs, in a scratch folder a page. A docstring has one of its own.
"""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.distributed.programs import run
from support.pages import Block, assert_passes, blocks, run_console, run_page, run_python

import tundish as td

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]


class Finder(doctest.DocTestFinder):
    """Finds the docstrings of functions that a decorator wraps, too."""

    def _from_module(self, module: ModuleType | None, object: Any) -> bool:  # noqa: A002 (doctest's name)
        return super()._from_module(module, inspect.unwrap(object))  # type: ignore[misc]


def docstrings() -> list[doctest.DocTest]:
    names = [found.name for found in pkgutil.walk_packages(td.__path__, "tundish.")]
    modules = [td, *(importlib.import_module(name) for name in names if not name.endswith("__main__"))]
    finder = Finder()
    found = [example for module in modules for example in finder.find(module, module.__name__)]
    return [example for example in found if example.examples]


@pytest.fixture(autouse=True)
def scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    # Pages and docstrings may leave tensors, which others count, and a server.
    td.rtensor.clear_node()
    td.rtensor.serve().close()
    # And tundish's packing in TRL.
    if "trl.trainer.sft_trainer" in sys.modules:
        trainer, own = sys.modules["trl.trainer.sft_trainer"], sys.modules["trl.data_utils"]
        trainer.pack_dataset = own.pack_dataset  # type: ignore[attr-defined]


# peft asks transformers for it.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
# TRL 1.16 sets the option by the name that transformers 5.24 calls deprecated.
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")
# torch says so whenever its `load` is used in a job of one process.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
# torchdata calls a function that torch has deprecated.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_page(page: Path) -> None:
    run_page(page, run)


@pytest.mark.parametrize("example", docstrings(), ids=lambda example: example.name)
def test_docstring(example: doctest.DocTest) -> None:
    assert_passes(example)


def test_the_rtensor_guide_works_in_two_processes() -> None:
    guide = CHECKOUT / "docs" / "guides" / "rtensor.md"
    first = next(blocks(guide.read_text(encoding="utf-8"))).text
    here, there, back = re.split(
        r"^# In the (?:process that uses|first process) .*\n", first, flags=re.MULTILINE
    )
    names: dict[str, Any] = {}
    exec(here, names)
    begin = f"import tundish as td\nsent = {names['sent']!r}\n"
    ran = run(["-c", begin + there])
    assert (ran.stderr, ran.returncode) == ("", 0)
    exec(back, names)


def needs_example(value: object) -> bool:
    """Records, errors and classes of the compiled module need none."""
    if not inspect.isclass(value):
        return inspect.isfunction(value)
    is_record = hasattr(value, "_fields") or dataclasses.is_dataclass(value)
    is_compiled = not value.__dictoffset__ and not hasattr(value, "__slots__")
    return not (is_record or is_compiled or issubclass(value, Exception))


def has_example(value: object) -> bool:
    """A class has one, or a method of it."""
    documented = [value, *(vars(value).values() if inspect.isclass(value) else ())]
    return any("Example:" in (one.__doc__ or "") for one in documented)


@pytest.mark.parametrize(
    "part", ["checkpoint", "distributed", "packing", "rtensor", "scatter", "shm", "tree"]
)
def test_every_public_name_has_an_example(part: str) -> None:
    module = getattr(td, part)
    public = {name: getattr(module, name) for name in module.__all__}
    assert [name for name, value in public.items() if needs_example(value) and not has_example(value)] == []


def test_the_readme_has_python_examples() -> None:
    assert any(block.language == "python" for block in blocks(PAGES[0].read_text(encoding="utf-8")))


def test_each_change_of_a_script_is_at_most_five_lines() -> None:
    page = CHECKOUT / "docs" / "coming-from.md"
    changes = [block for block in blocks(page.read_text(encoding="utf-8")) if block.language == "diff"]
    assert len(changes) == 4
    for change in changes:
        signs = [line[0] for line in change.text.splitlines() if line]
        assert 0 < signs.count("+") <= 5 and signs.count("-") <= 5, change.text


def test_a_diff_is_run_before_and_after_its_change() -> None:
    change = Block("diff", " kept = 1\n\n-old = kept\n+new = kept\n", 1)
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    run_python(change.side("-"), Path("page.md"), before)
    run_python(change.side("+"), Path("page.md"), after)
    assert before["old"] == after["new"] == 1 and "new" not in before and "old" not in after


def test_an_example_with_other_output_fails() -> None:
    with pytest.raises(AssertionError, match="Expected"):
        run_python(Block("python", ">>> 1 + 1\n3\n", 1), Path("page.md"), {})


def test_a_command_that_fails_fails() -> None:
    with pytest.raises(AssertionError, match=r"page.md:7: \$ python"):
        run_console(Block("console", "$ python -c 'raise SystemExit(3)'\n", 7), Path("page.md"), run)
