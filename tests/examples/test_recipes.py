"""The recipes in `examples/` and the quickstart run, and go on after a kill as if nothing had happened."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.distributed.programs import PIPE, Program, run, started_ranks
from support.pages import blocks

CHECKOUT = Path(__file__).parents[2]
EXAMPLES = CHECKOUT / "examples"
DEMO = {"train_packed.py", "python_corpus.py"}
RECIPES = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in DEMO)
# Processes of the tests begin others by fork servers, and users' by fork, which imports nothing again.
AS_USERS = (
    "import multiprocessing, runpy, sys; multiprocessing.set_start_method('fork', force=True); "
    "sys.stdout.reconfigure(line_buffering=True); sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
# The step after which the run began, a step, and its loss.
SAVED = re.compile(r"after (\d+): step (\d+), loss (\S+)")


def program(script: str, ranks: int, *options: object) -> contextlib.AbstractContextManager[list[Program]]:
    """A recipe on so many ranks, or without torchrun if there are none; killed at the end of the block."""
    words = ["-c", AS_USERS, EXAMPLES / script, *options]
    return started_ranks(words, ranks, stdout=PIPE) if ranks else started(words)


@contextlib.contextmanager
def started(words: Sequence[object]) -> Iterator[list[Program]]:
    alone = Program(words, stdout=PIPE)
    try:
        yield [alone]
    finally:
        alone.kill()


def finish(
    running: contextlib.AbstractContextManager[list[Program]], pattern: re.Pattern[str]
) -> list[tuple[str, ...]]:
    """What all ranks say in lines of the pattern, up to their end."""
    with running as ranks:
        said = [rank.communicate(timeout=110)[0] for rank in ranks]
        assert [rank.wait() for rank in ranks] == [0] * len(ranks)
    return [found.groups() for one in said for found in pattern.finditer(one)]


def kill_at(running: contextlib.AbstractContextManager[list[Program]], part: str) -> None:
    """Kill all ranks as soon as the first prints a line with this part."""
    with running as ranks:
        assert ranks[0].stdout is not None
        assert any(part in line for line in ranks[0].stdout), "the program ended by itself"
    for rank in ranks:
        rank.wait()
        assert rank.stdout is not None
        rank.stdout.close()


@pytest.mark.parametrize(
    ("script", "ranks"),
    [("pretrain_fsdp2.py", 2), ("stream_resume.py", 0), ("vlm_scatter.py", 2), ("lora_checkpoints.py", 0)],
)
def test_a_killed_run_goes_on_as_one_that_was_not(script: str, ranks: int, tmp_path: Path) -> None:
    whole = finish(program(script, ranks, "--out", tmp_path / "whole", "--steps", 50), SAVED)
    assert {step for _, step, _ in whole} == {"10", "20", "30", "40", "50"}
    killed = "--out", tmp_path / "killed", "--steps", 50
    # By the third save, the first is published: the third waits for it.
    kill_at(program(script, ranks, *killed), "step 30")
    resumed = finish(program(script, ranks, *killed), SAVED)
    assert int(resumed[0][0]) in (10, 20, 30)
    expected = {(step, loss) for _, step, loss in whole if int(step) > int(resumed[0][0])}
    assert {(step, loss) for _, step, loss in resumed} == expected


def test_fsdp2_goes_on_with_fewer_ranks_and_its_export_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    finish(program("pretrain_fsdp2.py", 2, "--out", tmp_path / "run", "--steps", 20), SAVED)
    resumed = finish(program("pretrain_fsdp2.py", 1, "--out", tmp_path / "run", "--steps", 30), SAVED)
    assert [(after, step) for after, step, _ in resumed] == [("20", "30")]
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf-30")


def test_the_stream_goes_on_with_more_ranks(tmp_path: Path) -> None:
    finish(program("stream_resume.py", 0, "--out", tmp_path / "run", "--steps", 20), SAVED)
    resumed = finish(program("stream_resume.py", 2, "--out", tmp_path / "run", "--steps", 30), SAVED)
    assert [(after, step) for after, step, _ in resumed] == [("20", "30")]


def test_trl_learns_and_goes_on(tmp_path: Path) -> None:
    end = re.compile(r"loss (\S+) -> (\S+) at step (\d+)")
    ((first, last, step),) = finish(program("sft_trl.py", 0, "--out", tmp_path / "run", "--steps", 40), end)
    assert float(last) < float(first) and step == "40"
    ((first, later, step),) = finish(program("sft_trl.py", 0, "--out", tmp_path / "run", "--steps", 50), end)
    assert float(later) < float(first) and step == "50"
    assert (tmp_path / "run" / "hf-50").is_dir()


def test_rewards_rise_and_no_tensor_is_left() -> None:
    said = finish(program("rl_step.py", 0), re.compile(r"reward (\S+)|(\d+) tensors left"))
    rewards = [float(reward) for reward, _ in said[:-1]]
    assert rewards[-1] > rewards[0] + 0.2
    assert said[-1][1] == "0"


@pytest.mark.parametrize("script", RECIPES)
def test_a_recipe_is_short_and_listed(script: str) -> None:
    assert 40 <= (EXAMPLES / script).read_text().count("\n") <= 80
    assert f"(../examples/{script})" in (CHECKOUT / "docs" / "recipes.md").read_text()


def test_the_quickstart_goes_on_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (CHECKOUT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    scripts = {block.title: block.text for block in blocks(page) if block.title}
    assert sorted(scripts) == ["make_data.py", "train.py"]
    assert scripts["train.py"].count("\n") < 40
    monkeypatch.chdir(tmp_path)
    for name, text in scripts.items():
        Path(name).write_text(text)
    run(["make_data.py"], check=True)

    words = ["-c", AS_USERS, "train.py"]
    saved = re.compile(r"(?:after step|step) (\d+)(?: of \d+, loss (\S+))?")
    (_, *whole) = finish(started(words), saved)
    Path("checkpoints").rename("whole")
    kill_at(started(words), "step 80 of")
    (begun, *resumed) = finish(started(words), saved)
    # By the fourth save, the second is published.
    assert int(begun[0]) in (40, 60, 80)
    assert resumed == [line for line in whole if int(line[0]) > int(begun[0])]
    assert len(resumed) > 3
