"""`td.loader` on several ranks, under a `DispatchLoader`, and beside Accelerate."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from accelerate import Accelerator, skip_first_batches
from support.distributed.rank_processes import Job, Line, outcome, run_job
from support.packing.loaders import PLAN, SAMPLES, SOURCES, all_tokens, assert_same_batches, stored, tokens_of

import tundish as td
from tundish.errors import InvalidInputError, LoaderHasNoDatasetError


def make(source: str = "plan", **options: Any) -> td.packing.PackLoader:
    samples, plan = SOURCES[source]
    return td.loader(samples, plan, **{"batch_size": 3, "seed": 2, **options})


def epochs_of(loader: Any) -> Iterator[Any]:
    """The batches of all epochs, without end."""
    return itertools.chain.from_iterable(itertools.repeat(loader))


class Missing(list[Any]):
    """Samples of which rank 1 cannot read the later ones."""

    def __getitem__(self, index: Any) -> Any:
        if index > 40 and dist.get_rank() == 1:
            raise ConnectionError("the bucket does not answer")
        return super().__getitem__(index)


def every_rank(rank: int, line: Line) -> None:
    world = dist.get_world_size()
    alone = all_tokens(make(batch_size=3 * world, rank=0, world_size=1))
    # The ranks are those of the job, and Accelerate splits nothing again.
    loader = Accelerator(cpu=True).prepare(make(num_items_in_batch=2))
    assert isinstance(loader, td.packing.PackLoader) and (loader.rank, loader.world_size) == (rank, world)
    batches = list(loader)
    line.say([(tokens_of(batch), batch["num_items_in_batch"]) for batch in batches])
    learned = [int((batch["labels"] != -100).sum()) for batch in batches]
    everywhere: list[Any] = [None] * world
    dist.all_gather_object(everywhere, learned)
    steps = list(map(sum, zip(*everywhere, strict=True)))
    for first in range(0, len(batches), 2):
        items = sum(steps[first : first + 2])
        assert [batch["num_items_in_batch"] for batch in batches[first : first + 2]] == [items] * len(
            batches[first : first + 2]
        )
    line.say(alone)
    # An error on one rank is raised on all, and no rank waits for it.
    broken = td.loader(Missing(SAMPLES), PLAN, batch_size=3, num_items_in_batch=True)
    line.say(outcome(lambda: list(broken)))


def test_ranks_share_each_step_and_its_denominator(tmp_path: Path) -> None:
    with Job(every_rank, 2, tmp_path) as job:
        given = [said for (said,) in job.hear_all()]
        (alone, _) = (said for (said,) in job.hear_all())
        assert [
            list(itertools.chain(*(tokens for tokens, _ in step))) for step in zip(*given, strict=True)
        ] == alone
        (first, second) = (said for (said,) in job.hear_all())
        assert (first[0], first[2], second[0]) == ("PeerFailedError", 1, "ConnectionError")
        job.expect_end()


def test_accelerate_finds_nothing_to_split_again() -> None:
    accelerator, loader = Accelerator(cpu=True), make()
    assert accelerator.prepare(loader) is loader
    for split in (accelerator.prepare_data_loader, skip_first_batches):
        with pytest.raises(LoaderHasNoDatasetError, match="each rank its own batches already"):
            split(loader)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("tail", ["drop", "pad", "short"])
@pytest.mark.parametrize(("prefetch", "taken"), [(1, 0), (1, 5), (0, 16), (2, 20), (1, 33)])
def test_a_dispatch_loader_goes_on_in_the_middle_of_an_epoch(
    source: str, tail: Any, prefetch: int, taken: int
) -> None:
    expected = list(itertools.islice(epochs_of(make(source)), 40))
    assert len(make(source)) == 16

    def dispatched() -> td.DispatchLoader[Any]:
        return td.DispatchLoader(make(source, world_size=1), tail=tail, prefetch=prefetch)

    with dispatched() as loader:
        assert loader.resumes_on_any_ranks
        given = list(itertools.islice(epochs_of(loader), taken))
        state = stored(loader.state_dict())
    assert_same_batches(given, expected[:taken])
    # A rank that is no source has no state of the source's loader.
    for other in (state, state | {"loader": None}):
        with dispatched() as again:
            again.load_state_dict(other)
            assert_same_batches(list(itertools.islice(epochs_of(again), 40 - taken)), expected[taken:])


def dispatched_ranks(rank: int, line: Line) -> None:
    world = dist.get_world_size()

    def dispatched() -> td.DispatchLoader[Any]:
        inner = make("mix", world_size=1, num_workers=1, batch_size=2) if rank == 0 else None
        return td.DispatchLoader(inner, tail="pad")

    state = line.hear()
    with dispatched() as loader:
        if state is not None:
            loader.load_state_dict(state)
        # Of 23 batches, the last step of two ranks has one: the state is that of the end of an epoch.
        batches = itertools.islice(epochs_of(loader), 23 // world + 1)
        given = [None if loader.is_padding else tokens_of(batch) for batch in batches]
        line.say((given, loader.state_dict()))


def test_a_dispatched_state_of_any_rank_serves_any_number_of_ranks(tmp_path: Path) -> None:
    expected = all_tokens(itertools.islice(epochs_of(make("mix", batch_size=2)), 4 * 23))

    def run(world: int, states: list[Any]) -> tuple[list[Any], list[Any]]:
        with Job(dispatched_ranks, world, tmp_path) as job:
            for rank in range(world):
                job.tell(rank, states[rank])
            said = [answer for (answer,) in job.hear_all()]
            job.expect_end()
        given = [tokens for step in zip(*(tokens for tokens, _ in said), strict=True) for tokens in step]
        return [tokens for tokens in given if tokens is not None], [state for _, state in said]

    first, states = run(2, [None, None])
    assert first == expected[: len(first)]
    for state in states:
        second, later = run(1, [state])
        assert second == expected[len(first) : len(first) + len(second)]
        third, _ = run(2, [later[0]] * 2)
        done = len(first) + len(second)
        assert third == expected[done : done + len(third)]


def test_a_dispatch_loader_refuses_a_loader_of_one_of_several_ranks() -> None:
    with pytest.raises(InvalidInputError, match=r"one of 2 parts of the data.*make it for one process, with"):
        td.DispatchLoader(make(rank=0, world_size=2))
    loader = make()
    next(iter(loader))
    with pytest.raises(InvalidInputError, match="at epoch 0 after 1 batches: load the state into the"):
        td.DispatchLoader(loader)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("taken", [0, 3, 8])
def test_a_dispatched_stream_goes_on_with_the_next_batch(workers: int, taken: int) -> None:
    def dispatched() -> td.DispatchLoader[Any]:
        stream = td.PackedStream(SAMPLES, 16)
        return td.DispatchLoader(td.loader(stream, batch_size=2, num_workers=workers))

    with dispatched() as loader:
        expected = list(loader)
    with dispatched() as loader:
        assert_same_batches(list(itertools.islice(loader, taken)), expected[:taken])
        state = loader.state_dict()
    with dispatched() as again:
        again.load_state_dict(state)
        assert_same_batches(list(again), expected[taken:])


def test_a_job_of_one_rank_needs_no_rank(tmp_path: Path) -> None:
    run_job(one_rank, 1, tmp_path)


def one_rank(rank: int, line: Line) -> None:
    assert (make().rank, make().world_size) == (0, 1)
