"""`Checkpointer.save` and `resume` on several ranks: killed, and on other numbers of ranks."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoint.dcp_states import World, assert_same, whole
from support.checkpoint.sharded_models import SMALL
from support.distributed.rank_processes import Job, Line, outcome
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import tundish as td
from tundish.checkpoint import Checkpointer, session


class Ranked:
    """A loader whose state belongs to its rank."""

    def __init__(self, rank: int) -> None:
        self.state: Any = {"rank": rank, "given": 0}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Common(Ranked):
    resumes_on_any_ranks = True


class Net(nn.Module):
    """Tied and frozen weights, and more than one module to shard."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 10)
        self.middle = nn.Linear(10, 10)
        self.frozen = nn.Linear(10, 10)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(10, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.frozen(torch.tanh(self.middle(self.embedding(tokens)))))
        return logits


class Training:
    def __init__(self, layout: str, optimizer: str) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Net()
        if distributed.is_initialized() and layout == "fsdp":
            fully_shard(self.model)
        elif distributed.is_initialized() and layout == "ddp":
            self.model = DistributedDataParallel(self.model)
        matrices = [one for one in self.model.parameters() if one.ndim == 2 and one.requires_grad]
        others = [one for one in self.model.parameters() if one.ndim < 2 and one.requires_grad]
        groups: list[dict[str, Any]] = [{"params": []}, {"params": matrices}, {"params": others, "lr": 0.02}]
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(groups, lr=0.01)
            if optimizer == "AdamW"
            else torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        )
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0)

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def step(self, number: int) -> float:
        # The same batch on all ranks: the mean of equal gradients is each of them, to the last bit.
        tokens = torch.randint(13, (8,), generator=torch.Generator().manual_seed(number))
        loss = nn.functional.cross_entropy(self.model(tokens), tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step(loss.item())
        return loss.item()


def train(rank: int, line: Line) -> None:
    """Resumes, says where, trains and saves each step; says the losses, or waits to be killed."""
    root, layout, optimizer, last, is_killed = line.hear()
    training = Training(layout, optimizer)
    with Checkpointer(root, on_failure="raise", timeout=60, keep_last=2) as checkpointer:
        start = checkpointer.resume(**training.objects)
        check_placements(training.optimizer)
        losses = {}
        for step in range(start + 1, last + 1):
            losses[step] = training.step(step)
            save = checkpointer.save(step, **training.objects)
        if is_killed:
            save.result()
            line.say(start, losses)
            line.hear()
    line.say(start, losses)


def check_placements(optimizer: torch.optim.Optimizer) -> None:
    """No rank holds the whole of a state whose parameter is sharded."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(parameter, DTensor) and name != "step":
                assert isinstance(value, DTensor)
                assert value.placements == parameter.placements


def train_on(
    folder: Path, size: int, order: Sequence[Any], *, is_killed: bool = False
) -> tuple[int, dict[int, float]]:
    with Job(train, size, folder) as job:
        job.tell_all([*order, is_killed])
        told = job.hear_all()
        assert all(one == told[0] for one in told)
        if is_killed:
            for rank in range(size):
                job.signal(rank, signal.SIGKILL)
        else:
            job.expect_end()
    start, losses = told[0]
    return start, losses


@pytest.mark.parametrize(("layout", "optimizer"), [("fsdp", "AdamW"), ("fsdp", "SGD"), ("ddp", "AdamW")])
def test_a_killed_job_goes_on_with_the_same_losses_on_other_numbers_of_ranks(
    tmp_path: Path, layout: str, optimizer: str
) -> None:
    _, expected = train_on(tmp_path, 2, (tmp_path / "whole", layout, optimizer, 8))
    _, alone = train_on(tmp_path, 1, (tmp_path / "alone", layout, optimizer, 8))
    assert alone == expected, "the number of ranks changes no loss here"
    root, found = tmp_path / "root", {}
    for size, last, first in ((2, 2, 0), (2, 4, 2), (1, 6, 4), (2, 8, 6)):
        start, losses = train_on(tmp_path, size, (root, layout, optimizer, last), is_killed=last < 8)
        assert start == first
        found |= losses
    assert found == expected


def go_on_in_a_layout(rank: int, line: Line) -> None:
    root, layout = line.hear()
    world, resumed = World(layout), World(layout, seed=9)
    world.train(2)
    with Checkpointer(root, on_failure="raise", timeout=60) as checkpointer:
        checkpointer.save(2, model=world.model, optimizer=world.optimizer)
        world.train(2)
        checkpointer.resume(model=resumed.model, optimizer=resumed.optimizer)
    check_placements(resumed.optimizer)
    resumed.train(2)
    assert_same(whole(resumed.state()), whole(world.state()))


@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "tp", "both"])
def test_models_of_all_layouts_go_on(tmp_path: Path, layout: str) -> None:
    """Most with a fused optimizer, which keeps its number of steps where the parameters are."""
    with Job(go_on_in_a_layout, 2, tmp_path) as job:
        job.tell_all((tmp_path / "root", layout))
        job.expect_end()


def save_llama(rank: int, line: Line) -> None:
    root, is_tied = line.hear()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=is_tied))
    fully_shard(model)
    with Checkpointer(root, on_failure="raise", timeout=60) as checkpointer:
        checkpointer.save(1, model=model, hf=True)


def resume_llama(rank: int, line: Line) -> None:
    root, is_tied = line.hear()
    model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=is_tied))
    fully_shard(model)
    with Checkpointer(root, on_failure="raise", timeout=60) as checkpointer:
        line.say(outcome(lambda: checkpointer.resume(model=model))[1])
        # All ranks take part, whether or not it was refused.
        head = model.lm_head.weight.full_tensor()  # type: ignore[operator]  # a DTensor
        line.say(head.detach())


@pytest.mark.parametrize(("is_tied", "becomes_tied"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("size", [1, 2])
def test_sharded_tied_weights(tmp_path: Path, is_tied: bool, becomes_tied: bool, size: int) -> None:
    root = tmp_path / "root"
    with Job(save_llama, 2, tmp_path) as job:
        job.tell_all((root, is_tied))
        job.expect_end()
    exported = AutoModelForCausalLM.from_pretrained(root / "hf-1").lm_head.weight
    with Job(resume_llama, size, tmp_path) as job:
        job.tell_all((root, becomes_tied))
        errors = [error for (error,) in job.hear_all()]
        heads = [head for (head,) in job.hear_all()]
        job.expect_end()
    is_refused = becomes_tied and not is_tied
    names = "'model.model.embed_tokens.weight' and 'model.lm_head.weight' are one tensor here"
    assert [names in error for error in errors] == [is_refused] * size
    assert [torch.equal(head, exported) for head in heads] == [not is_refused] * size


def draw(rank: int, line: Line) -> None:
    root, is_saver, loader_kind = line.hear()
    model, loader = nn.Linear(2, 2), (Common if loader_kind == "common" else Ranked)(rank)
    torch.manual_seed(100 + rank)
    with Checkpointer(root, on_failure="raise", timeout=60) as checkpointer:
        if is_saver:
            checkpointer.save(1, model=model, loader=loader)
            line.say("", torch.rand(()).item(), loader.state)
        else:
            error = outcome(lambda: checkpointer.resume(model=model, loader=loader))
            line.say(error[1], torch.rand(()).item(), loader.state)


def draws_of(folder: Path, size: int, *order: Any) -> list[Any]:
    with Job(draw, size, folder) as job:
        job.tell_all(order)
        told = job.hear_all()
        job.expect_end()
    return told


def test_each_rank_takes_over_its_own_random_numbers_and_its_own_loader(tmp_path: Path) -> None:
    saved = draws_of(tmp_path, 2, tmp_path / "root", True, "ranked")
    assert saved[0][1] != saved[1][1]
    assert draws_of(tmp_path, 2, tmp_path / "root", False, "ranked") == saved


@pytest.mark.parametrize(("saves", "loads"), [(2, 1), (1, 2), (2, 3)])
def test_on_another_number_of_ranks_each_has_random_numbers_of_its_own(
    tmp_path: Path, saves: int, loads: int
) -> None:
    saved = draws_of(tmp_path, saves, tmp_path / "root", True, "common")
    found = draws_of(tmp_path, loads, tmp_path / "root", False, "common")
    numbers = [number for _, number, _ in saved + found]
    assert len(set(numbers)) == saves + loads
    assert [(error, state) for error, _, state in found] == [("", saved[0][2])] * loads
    assert draws_of(tmp_path, loads, tmp_path / "root", False, "common") == found


def test_a_loader_that_belongs_to_its_rank_is_refused_on_another_number_of_ranks(tmp_path: Path) -> None:
    draws_of(tmp_path, 2, tmp_path / "root", True, "ranked")
    ((error, _, state),) = draws_of(tmp_path, 1, tmp_path / "root", False, "ranked")
    assert (
        "loader is a Ranked, whose state belongs to one of the 2 ranks that saved it, and here are 1" in error
    )
    assert "resume on 2, or use td.loader with a plan or a mix, or td.DispatchLoader" in error
    assert state == {"rank": 0, "given": 0}


def dispatch(rank: int, line: Line) -> None:
    root, steps = line.hear()
    model = nn.Linear(2, 2)
    batches = [torch.tensor([number]) for number in range(12)] if rank == 0 else None
    with (
        td.DispatchLoader(batches) as loader,
        Checkpointer(root, on_failure="raise", timeout=60) as checkpointer,
    ):
        start = checkpointer.resume(model=model, loader=loader)
        found = []
        for batch in loader:
            found.append(int(batch))
            if len(found) == steps:
                break
        checkpointer.save(start + 1, model=model, loader=loader)
        line.say(found)


def test_a_dispatch_loader_goes_on_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    found = []
    for size, steps in ((2, 2), (1, 3), (2, 2)):
        with Job(dispatch, size, tmp_path) as job:
            job.tell_all((tmp_path / "root", steps))
            found += [
                number for step in zip(*(told[0] for told in job.hear_all()), strict=True) for number in step
            ]
            job.expect_end()
    assert found == list(range(11))


def read_packs(rank: int, line: Line) -> None:
    root, size, steps = line.hear()
    samples = [[number] * 4 for number in range(48)]
    loader = td.loader(samples, td.pack([4] * 48, 8), batch_size=4 // size, seed=7)
    model = nn.Linear(2, 2)
    with Checkpointer(root, on_failure="raise", timeout=60) as checkpointer:
        start = checkpointer.resume(model=model, loader=loader)
        batches = [batch["input_ids"].flatten().tolist() for batch in itertools.islice(loader, steps)]
        checkpointer.save(start + 1, model=model, loader=loader)
    line.say(batches)


def global_batches(folder: Path, root: Path, size: int, steps: int) -> list[list[int]]:
    """The samples of each step, on all ranks together."""
    with Job(read_packs, size, folder) as job:
        job.tell_all((root, size, steps))
        told = [batches for (batches,) in job.hear_all()]
        job.expect_end()
    return [sorted(number for batch in step for number in batch) for step in zip(*told, strict=True)]


def test_packs_go_on_at_the_next_global_batch_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    expected = global_batches(tmp_path, tmp_path / "whole", 1, 6)
    assert sorted(number for step in expected for number in step) == [one // 4 for one in range(192)]
    found = []
    for size in (2, 1, 2):
        found += global_batches(tmp_path, tmp_path / "root", size, 2)
    assert found == expected


def fail_on_one_rank(rank: int, line: Line) -> None:
    (root,) = line.hear()
    model = nn.Linear(2, 2)

    class Failing(Ranked):
        def load_state_dict(self, state: Any) -> None:
            raise ValueError("the file of samples is gone")

    mine: dict[str, Any] = {} if rank == 0 else {"scaler": object()}
    with Checkpointer(root, on_failure="raise", timeout=60) as checkpointer:
        told = [
            outcome(lambda: checkpointer.save(1, model=model, **mine)),
            outcome(lambda: checkpointer.save(1, model=model, hf=rank == 1)),
        ]
        checkpointer.save(2, model=model, loader=Ranked(rank))
        loader = (Ranked if rank == 0 else Failing)(rank)
        told.append(outcome(lambda: checkpointer.resume(model=model, **mine)))
        told.append(outcome(lambda: checkpointer.resume(model=model if rank == 0 else None, loader=loader)))
        told.append(outcome(lambda: checkpointer.resume(model=model, loader=loader)))
        loader = Ranked(rank)
        checkpointer.resume(model=model, loader=loader)
    line.say(told)


def test_an_error_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    with Job(fail_on_one_rank, 2, tmp_path) as job:
        job.tell_all((tmp_path / "root",))
        (first,), (second,) = job.hear_all()
        job.expect_end()
    assert [kind for kind, _, _ in first] == ["PeerFailedError"] * 5
    assert [kind for kind, _, _ in second] == [
        "InvalidTypeError",
        "PeerFailedError",
        "InvalidTypeError",
        "StateMismatchError",
        "ValueError",
    ]
    for (_, theirs, _), (_, text, _) in zip(first, second, strict=True):
        assert text in theirs or "hf True" in text
    assert not (tmp_path / "root" / "dcp-1").exists()


def save_on_the_first_rank_alone(rank: int, line: Line) -> None:
    (root,) = line.hear()
    model = nn.Linear(2, 2)
    with Checkpointer(root, on_failure="raise", timeout=2) as checkpointer:
        calls = {
            "save(step=100)": lambda: checkpointer.save(100, model=model),
            "save_hf(step=100)": lambda: checkpointer.save_hf(100, model),
            "save_dcp(step=100)": lambda: checkpointer.save_dcp(100, model.state_dict()),
            "resume()": lambda: checkpointer.resume(model=model),
            "discard_after(3)": lambda: checkpointer.discard_after(3),
        }
        # One takes longer than the other, after which both are in step.
        told = {name: outcome(call) for name, call in calls.items()} if rank == 0 else {}
        line.say(told)
        line.hear()


def test_ranks_that_do_not_call_are_named_with_the_call(tmp_path: Path) -> None:
    with Job(save_on_the_first_rank_alone, 2, tmp_path) as job:
        job.tell_all((tmp_path / "root",))
        ((told,), _) = job.hear_all()
        job.tell_all()
        job.expect_end()
    assert len(told) == 5
    for call, (kind, text, ranks) in told.items():
        assert (kind, ranks) == ("VoteTimeoutError", (1,))
        assert text.startswith(f"rank 1 never called {call}, within 2 s of rank 0: all ranks make this call")
        assert "Checkpointer(timeout=…)" in text


def wait_for_earlier_saves(rank: int, line: Line) -> None:
    """The callbacks of rank 0 take longer than a call waits for ranks that do not make it."""
    (root,) = line.hear()
    session.CALL_SECONDS = 1.0

    def hold(path: Path) -> None:
        if rank == 0 and path.name == "dcp-1":
            line.hear()

    model = nn.Linear(2, 2)
    with Checkpointer(root, on_failure="raise", on_published=[hold]) as checkpointer:
        checkpointer.save(1, model=model)
        checkpointer.save(2, model=model)
        line.say("saving")
        line.say(outcome(lambda: checkpointer.save(3, model=model)))


def test_a_rank_that_waits_for_its_earlier_saves_is_not_called_absent(tmp_path: Path) -> None:
    with Job(wait_for_earlier_saves, 2, tmp_path, fresh=True) as job:
        job.tell_all((tmp_path / "root",))
        assert job.hear_all() == [("saving",), ("saving",)]
        # Longer than the limit of a call.
        assert not any(job.says(1) for _ in range(20))
        job.tell(0)
        assert job.hear_all() == [(("", "", None),)] * 2
        job.expect_end()
