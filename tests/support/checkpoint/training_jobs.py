"""Ranks that train a sharded model and save both kinds of checkpoints at every step, to be killed or to fail.

Batches are drawn from the number of their step. So the weights after so many steps are known bit by bit, however often
the training was interrupted, and on how many ranks it went on. `check` says what must hold of a root at any
moment, and `check_next_start` what the next start makes of it.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from support.checkpoint import failpoints as failpoints

KEPT = 2
SHARD_BYTES = 4096


class Training:
    """A model, sharded over the ranks where there are several, and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = (torch.nn.Linear(24, 24), torch.nn.Linear(24, 24), torch.nn.Linear(24, 7))
        self.model = torch.nn.Sequential(*layers)
        if distributed.is_initialized():
            fully_shard(self.model)
        # Its steps are few operations, and torch plans each for DTensors in every new process.
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)
        # torch makes the states of an optimizer by a step, which counts: here once and for all.
        self.state()

    def step(self, number: int) -> None:
        # The same batch on all ranks: the mean of equal gradients is each of them, to the last bit.
        batch = torch.randn(4, 24, generator=torch.Generator().manual_seed(number))
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def weights(self) -> dict[str, torch.Tensor]:
        """EagerCopy, of a model that is not sharded."""
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}


def resume(checkpointer: Any, training: Training) -> int:
    """Collective: go on where the newest DCP checkpoint left off; the step it is of, 0 for none."""
    from tundish.errors import NotFoundError

    state = training.state()
    try:
        extra, rank_extras = checkpointer.load_dcp(state)
    except NotFoundError:
        return 0
    assert rank_extras == {0: {"rank": 0}, 1: {"rank": 1}}
    training.load(state)
    return int(extra["step"])


def save_hf(checkpointer: Any, training: Training, step: int, rank: int) -> Any:
    return checkpointer.save_hf(step, training.model, shard_bytes=SHARD_BYTES)


def save_dcp(checkpointer: Any, training: Training, step: int, rank: int) -> Any:
    extra, rank_extra = {"step": step}, {"rank": rank}
    return checkpointer.save_dcp(step, training.state(), extra=extra, rank_extra=rank_extra)


def hidden(root: Path) -> list[str]:
    """The hidden entries of a root, except its lock."""
    return [name for name in os.listdir(root) if name.startswith(".") and name != ".owner"]


def train(rank: int, line: Any) -> None:
    """Says where it resumes and what is left over there, then trains and saves until it is killed.

    With `steps`, that many and the last one again. When something fails, it says what, and ends.
    """
    order = line.hear()
    failpoints.arm(order.get("failpoints", {}))
    from tundish.checkpoint import Checkpointer

    root = Path(order["root"])
    recorded = RecordedPublications(root)
    training = Training()
    try:
        with Checkpointer(
            root,
            keep_last=KEPT,
            on_failure="raise",
            timeout=60,
            on_published=[recorded.published] if rank == 0 else [],
        ) as checkpointer:
            step = resume(checkpointer, training)
            if rank == 0:
                recorded.discarding(step)
            checkpointer.discard_after(step)
            line.say("resumed", step, hidden(root) if rank == 0 else [])
            last = step + order["steps"] if "steps" in order else sys.maxsize
            while step < last:
                step += 1
                training.step(step)
                save_hf(checkpointer, training, step, rank)
                save_dcp(checkpointer, training, step, rank)
            checkpointer.wait()
            checkpointer.save_hf(step, training.model, shard_bytes=SHARD_BYTES, overwrite=True)
    except BaseException as error:
        line.say("failed", f"{type(error).__name__}: {error}")
    else:
        line.say("done", step)


def train_through_failures(rank: int, line: Any) -> None:
    """Trains to the step `last` whatever fails, and says what came of every call: its name and its error, "" for none.

    Where a start fails, there is a second one.
    """
    order = line.hear()
    failpoints.arm(order.get("failpoints", {}))
    from tundish.checkpoint import Checkpointer

    root = Path(order["root"])
    recorded = RecordedPublications(root)
    came_of: dict[str, str] = {}

    def call(what: str, function: Callable[[], Any]) -> Any:
        came_of[what] = ""
        try:
            return function()
        except BaseException as error:
            came_of[what] = f"{type(error).__name__}: {error}"
            return None

    def go_on() -> None:
        training = Training()
        with Checkpointer(
            root,
            keep_last=KEPT,
            on_failure=lambda error: None,
            timeout=60,
            on_published=[recorded.published] if rank == 0 else [],
        ) as checkpointer:
            step = resume(checkpointer, training)
            if rank == 0:
                recorded.discarding(step)
            checkpointer.discard_after(step)
            saves = {}
            for number in range(step + 1, order["last"] + 1):
                training.step(number)
                for kind, begin in (("hf", save_hf), ("dcp", save_dcp)):
                    what = f"{kind}-{number}"
                    saves[what] = call(what, partial(begin, checkpointer, training, number, rank))
            for what, save in saves.items():
                if save is not None:
                    call(what, save.result)

    call("the first start", go_on)
    if came_of["the first start"]:
        call("the second start", go_on)
    line.say("done", came_of)


def prepare(root: Path, folder: Path) -> None:
    """A root with steps 2 and 3 of both kinds, and what a dead owner left: a newer export, and work half done."""
    from support.distributed.rank_processes import Job
    from tundish.checkpoint import Checkpointer

    root.parent.mkdir()
    with Job(train, 2, folder) as job:
        job.tell_all({"root": str(root), "steps": 3})
        job.hear_all()
        assert job.hear_all() == [("done", 3), ("done", 3)]
        job.expect_end()
    with Checkpointer(
        root, on_failure="raise", on_published=[RecordedPublications(root).published]
    ) as checkpointer:
        checkpointer.save_hf(4, expected(4), blocking=True)
    for leftover in (".hf-9.incomplete", ".dcp-1.removed-0"):
        (root / leftover).mkdir()
        (root / leftover / "file").write_bytes(b"half")


class RecordedPublications:
    """The first rank's reports about a root, in order. They survive its death."""

    def __init__(self, root: Path) -> None:
        self._path = root.with_name("publications")
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)

    def published(self, path: Path) -> None:
        os.write(self._file, f"{path.name}\n".encode())

    def discarding(self, step: int) -> None:
        os.write(self._file, f"discarding-{step}\n".encode())

    def newest(self) -> dict[str, int]:
        """By kind, the newest step that was published and cannot have been set aside since."""
        found: dict[str, int] = {}
        for word in self._path.read_text().split():
            what, _, number = word.partition("-")
            if what == "discarding":
                found = {kind: step for kind, step in found.items() if step <= int(number)}
            else:
                found[what] = int(number)
        return found


@functools.cache
def _reference() -> Iterator[dict[str, torch.Tensor]]:
    training = Training()

    def go_on() -> Iterator[dict[str, torch.Tensor]]:
        number = 0
        while True:
            yield training.weights()
            number += 1
            training.step(number)

    return go_on()


_known: list[dict[str, torch.Tensor]] = []


def expected(step: int) -> dict[str, torch.Tensor]:
    """The weights after so many steps."""
    while len(_known) <= step:
        _known.append(next(_reference()))
    return _known[step]


def assert_weights(found: dict[str, torch.Tensor], step: int, what: object) -> None:
    wanted = expected(step)
    assert found.keys() == wanted.keys(), what
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), f"{what}: {name} is not what it was at step {step}"


def check(root: Path) -> dict[str, int]:
    """Check a root after any kill. Returns the newest step of each kind."""
    from safetensors.torch import load_file

    from tundish.checkpoint import load_dcp, open_readonly

    recorded = RecordedPublications(root).newest()
    if not root.exists():
        assert not recorded
        return {}
    readonly = open_readonly(root)
    visible = {name for name in os.listdir(root) if re.fullmatch(r"(hf|dcp)-\d+", name)}
    assert visible == {checkpoint.path.name for checkpoint in readonly.list()}, "what is visible is whole"
    newest: dict[str, int] = {}
    for checkpoint in readonly.list():
        readonly.verify(checkpoint.path)
        if checkpoint.kind == "hf":
            files = checkpoint.path.glob("*.safetensors")
            weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        else:
            state = {"model": Training().weights()}
            extra, rank_extras = load_dcp(state, checkpoint.path, verify=False)
            assert extra == checkpoint.extra == {"step": checkpoint.step}
            assert rank_extras == {0: {"rank": 0}, 1: {"rank": 1}}
            weights = state["model"]
        assert_weights(weights, checkpoint.step, checkpoint.path.name)
        newest[checkpoint.kind] = max(newest.get(checkpoint.kind, 0), checkpoint.step)
    for kind, step in recorded.items():
        assert newest.get(kind, -1) >= step, f"{kind}-{step} was published, and the newest is {newest}"
        assert (root / f"{kind}-latest").is_symlink()
    for kind in ("hf", "dcp"):
        pointer = root / f"{kind}-latest"
        if pointer.is_symlink():
            assert os.readlink(pointer) in visible, f"{pointer.name} leads to {os.readlink(pointer)}"
    return newest


def check_links(root: Path) -> None:
    """The links of a root that was opened say what the folders say."""
    from tundish.checkpoint import open_readonly

    published = open_readonly(root).list()
    for kind in ("hf", "dcp"):
        steps = [one.step for one in published if one.kind == kind]
        pointer = root / f"{kind}-latest"
        assert (os.readlink(pointer) if steps else "") == (f"{kind}-{steps[-1]}" if steps else "")
        assert pointer.is_symlink() == bool(steps)


def check_next_start(root: Path) -> None:
    """The next start, here in one process: it cleans up, resumes at the newest step, and saves the next one."""
    from tundish.checkpoint import Checkpointer

    newest = check(root)
    training = Training()
    with Checkpointer(root, on_failure="raise") as checkpointer:
        assert hidden(root) == []
        check_links(root)
        state = training.state()
        step = 0
        if checkpointer.latest("dcp") is not None:
            extra, _ = checkpointer.load_dcp(state)
            training.load(state)
            step = extra["step"]
        assert step == newest.get("dcp", 0)
        assert_weights(training.weights(), step, "what was resumed")
        checkpointer.discard_after(step)
        training.step(step + 1)
        checkpointer.save_hf(step + 1, training.model, blocking=True)
        state = training.state()
        checkpointer.save_dcp(step + 1, state, extra={"step": step + 1}, blocking=True)
        for kind in ("hf", "dcp"):
            assert checkpointer.latest(kind) == root / f"{kind}-{step + 1}"
            checkpointer.verify(root / f"{kind}-latest")
    loaded = Training()
    state = loaded.state()
    with Checkpointer(root, on_failure="raise") as checkpointer:
        checkpointer.load_dcp(state)
    loaded.load(state)
    assert_weights(loaded.weights(), step + 1, "what the next start saved")
