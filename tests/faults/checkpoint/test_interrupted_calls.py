"""Ctrl-C at any moment of handing a save over, or a second one while what was taken is given back: nothing is lost."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from support.distributed.ctrl_c import CtrlC, at_every_moment

from tundish import waiting
from tundish._native import staging_stats
from tundish.checkpoint import Checkpointer
from tundish.checkpoint import checkpointer as checkpointer_module
from tundish.checkpoint import save as saves
from tundish.checkpoint import submit as taking
from tundish.checkpoint.dcp import plan as dcp_plan
from tundish.checkpoint.dcp.plan import DcpPlan
from tundish.checkpoint.hf import file_image as images
from tundish.checkpoint.hf import stager as hf_plan
from tundish.checkpoint.hf.file_image import FileImage
from tundish.checkpoint.hf.stager import HfStager
from tundish.checkpoint.publish import finalizer as finalizing
from tundish.checkpoint.publish import save_queue as lane
from tundish.checkpoint.publish.save_queue import SaveQueue
from tundish.checkpoint.save import Save
from tundish.checkpoint.staging import budget, buffers
from tundish.checkpoint.staging import copies as staging
from tundish.checkpoint.staging.buffers import Buffer
from tundish.checkpoint.staging.copies import run_copies

TENSORS = {"w": torch.ones(1000)}


@pytest.fixture
def told() -> list[BaseException]:
    return []


@pytest.fixture
def checkpointer(told: list[BaseException], tmp_path: Path) -> Iterator[Checkpointer]:
    with Checkpointer(tmp_path / "root", keep_last=1, on_failure=told.append) as one:
        yield one


def test_a_save_that_is_interrupted_while_it_is_handed_over_goes_on(
    checkpointer: Checkpointer, told: list[BaseException]
) -> None:
    for number in itertools.count():
        ctrl_c = CtrlC(number, SaveQueue.submit)
        with contextlib.suppress(KeyboardInterrupt), ctrl_c:
            checkpointer.save_hf(number, TENSORS)
        checkpointer.wait(10)
        assert checkpointer.latest("hf") == checkpointer.path / f"hf-{number}", number
        assert checkpointer.stats()["staging"]["in_use"] == 0
        assert not told
        if not ctrl_c.came:
            break
    assert number > 1


RELEASES = {"hf": (HfStager.release, Buffer.release), "dcp": (DcpPlan.release, Buffer.release)}


@pytest.mark.parametrize("kind", RELEASES)
def test_a_second_ctrl_c_while_a_save_gives_back_what_it_took_costs_nothing(
    kind: str, checkpointer: Checkpointer, told: list[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_pressed = False

    def copies(*given: Any) -> Any:
        if is_pressed:
            raise KeyboardInterrupt
        return run_copies(*given)

    monkeypatch.setattr(f"tundish.checkpoint.{kind}.plan.run_copies", copies)
    save = getattr(checkpointer, f"save_{kind}")
    for number in itertools.count():
        is_pressed = True
        again = CtrlC(number, *RELEASES[kind])
        with pytest.raises(KeyboardInterrupt), again:
            save(number, TENSORS)
        checkpointer.wait(10)
        assert checkpointer.stats()["staging"]["in_use"] == staging_stats()["in_use"] == 0, number
        # Who pressed it was told by it.
        assert not told
        is_pressed = False
        assert save(number, TENSORS).result(10) == checkpointer.path / f"{kind}-{number}"
        if not again.came:
            break
    assert number > 1


RESERVATIONS = {
    "hf": (HfStager.reserve, FileImage.__init__, Buffer.__init__),
    "dcp": (DcpPlan.reserve, Buffer.__init__),
}


@pytest.mark.parametrize("kind", RESERVATIONS)
def test_a_save_that_is_interrupted_while_it_takes_memory_leaves_none_taken(
    kind: Literal["hf", "dcp"], checkpointer: Checkpointer, told: list[BaseException]
) -> None:
    # In a training loop the collector may not come by for long.
    gc.disable()
    try:
        for number in itertools.count():
            ctrl_c = CtrlC(number, *RESERVATIONS[kind])
            with contextlib.suppress(KeyboardInterrupt), ctrl_c:
                getattr(checkpointer, f"save_{kind}")(number, TENSORS)
            checkpointer.wait(10)
            assert checkpointer.stats()["staging"]["in_use"] == staging_stats()["in_use"] == 0, number
            assert not told
            if not ctrl_c.came:
                break
    finally:
        gc.enable()
    assert number > 1
    assert checkpointer.latest(kind) == checkpointer.path / f"{kind}-{number}"


# What the main thread goes through, and what of the standard library it waits in.
PLACES = (
    *(threading, concurrent.futures._base, contextlib),
    *(waiting, budget, buffers, checkpointer_module, finalizing, lane, saves, staging, taking),
    *(dcp_plan, hf_plan, images),
)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("kind", "how", "size"),
    [("hf", "eager", 4), ("hf", "lazy", 4), ("dcp", "eager", 4), ("dcp", "lazy", 4), ("hf", "eager", 1500)],
)
def test_ctrl_c_anywhere_in_a_save_harms_none_that_follows(
    kind: Literal["hf", "dcp"],
    how: str,
    size: int,
    checkpointer: Checkpointer,
    told: list[BaseException],
) -> None:
    # The larger one is copied by another thread, too.
    model = torch.nn.Linear(size, size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    options: dict[str, Any] = {"staging": how, "optimizer": optimizer} if how == "lazy" else {}
    for number, ctrl_c in at_every_moment(*PLACES):
        with ctrl_c:
            getattr(checkpointer, f"save_{kind}")(number, model.state_dict(), **options)
        # Nor does a step wait for what was given up.
        optimizer.step()
        checkpointer.wait(30)
        assert checkpointer.stats()["staging"]["in_use"] == staging_stats()["in_use"] == 0, number
        assert not told, number
    assert checkpointer.latest(kind) == checkpointer.path / f"{kind}-{number}"


USES: dict[str, Callable[[Checkpointer, Save], object]] = {
    "done": lambda _, save: (save.done(), save.progress()),
    "staged": lambda _, save: save.staged(30),
    "result": lambda _, save: save.result(30),
    "wait": lambda checkpointer, _: checkpointer.wait(30),
    "stats": lambda checkpointer, _: checkpointer.stats(),
}


@pytest.mark.parametrize("use", USES)
def test_ctrl_c_anywhere_in_the_use_of_a_save_under_way_does_not_hold_it_up(
    use: str, checkpointer: Checkpointer
) -> None:
    for number, ctrl_c in at_every_moment(*PLACES):
        save = checkpointer.save_hf(2 * number, TENSORS)
        with ctrl_c:
            USES[use](checkpointer, save)
        # Not of the same one, as whoever left its lock taken would give it back by waiting.
        following = checkpointer.save_hf(2 * number + 1, TENSORS)
        assert following.result(30) == checkpointer.path / f"hf-{2 * number + 1}"
        assert save.result(30) == checkpointer.path / f"hf-{2 * number}"


def test_a_root_is_let_go_of_though_ctrl_c_comes_anywhere_in_its_closing(tmp_path: Path) -> None:
    for number, ctrl_c in at_every_moment(contextlib, waiting, checkpointer_module, lane):
        checkpointer = Checkpointer(tmp_path / str(number), on_failure="raise")
        save = checkpointer.save_hf(1, TENSORS)
        with ctrl_c:
            checkpointer.close()
        checkpointer.close()
        assert save.done()
        # Whoever still had it would be waited for.
        Checkpointer(tmp_path / str(number), on_failure="raise").close()
