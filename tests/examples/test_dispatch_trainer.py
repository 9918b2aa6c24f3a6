"""`dispatch_trainer.py`: ranks train on what one reads, and other ones go on within the epoch."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from support.distributed.rank_processes import Job, Line


def example(rank: int, line: Line) -> None:
    folder, options = line.hear()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(dist.get_world_size())}
    sys.path.insert(0, str(Path(__file__).parent))
    import contextlib
    import io

    import dispatch_trainer

    seen: list[int] = []
    given = dispatch_trainer.Sentences.__iter__

    def counted(self: dispatch_trainer.Sentences) -> object:
        for number, batch in enumerate(given(self)):
            # Which sentence a row is can be told from its number in the last place.
            batch["labels"][:, -1] = number % dispatch_trainer.VOCABULARY
            yield batch

    def step(self: object, model: object, inputs: dict[str, object], *rest: object) -> object:
        seen.append(int(inputs["labels"][0, -1]))  # type: ignore[index]
        return trained(self, model, inputs, *rest)

    dispatch_trainer.Sentences.__iter__ = counted
    trained = dispatch_trainer.DispatchTrainer.training_step
    dispatch_trainer.DispatchTrainer.training_step = step
    sys.argv = ["dispatch_trainer.py", "--out", folder, *options]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        dispatch_trainer.main()
    line.say(said.getvalue(), seen)


def train(world: int, options: list[str], folder: Path) -> tuple[str, list[list[int]]]:
    """The output of the first rank, and the sentences that each rank trained on."""
    store = folder / "-".join([str(world), *options])
    store.mkdir()
    with Job(example, world, store) as job:
        job.tell_all((str(folder / "out"), options))
        (said, first), *others = job.hear_all()
        job.expect_end()
    return said, [first, *(seen for _, seen in others)]


@pytest.mark.filterwarnings("default")
def test_two_ranks_train_and_three_resume(tmp_path: Path) -> None:
    came = []
    for world, options in ((2, ["--steps", "10"]), (3, ["--steps", "16", "--resume"])):
        said, seen = train(world, options, tmp_path)
        came.append(seen)
        match = re.search(r"loss (\S+) -> (\S+)", said)
        assert match, said
        assert float(match[2]) < float(match[1])
    assert "epoch 0, 38 of its 100 batches used" in said
    # Each sentence once, over both runs, and each rank its own.
    assert came == [
        [list(range(rank, 20, 2)) for rank in range(2)],
        [list(range(20 + rank, 38, 3)) for rank in range(3)],
    ]


@pytest.mark.filterwarnings("default")
def test_resuming_at_the_end_of_an_epoch_starts_the_next(tmp_path: Path) -> None:
    said, _ = train(2, ["--steps", "50"], tmp_path)
    assert "epoch 0, 100 of its 100 batches used" in said
    said, came = train(2, ["--steps", "110", "--resume"], tmp_path)
    assert "epoch 2, 20 of its 100 batches used" in said
    first = [list(range(rank, 100, 2)) for rank in range(2)]
    assert came == [[n % 64 for n in [*numbers, *numbers[:10]]] for numbers in first]
