"""Several loaders and iterations in a row: connections to the store, bad devices, resumed padding, StopIteration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.distributed.rank_processes import Line, outcome, run_job
from support.scatter.batches import EndsIteration

import tundish as td


def one_after_the_other(rank: int, line: Line) -> None:
    opened = 0
    clone = dist.PrefixStore.clone

    def counting_clone(store: Any) -> Any:
        nonlocal opened
        opened += 1
        return clone(store)

    dist.PrefixStore.clone = counting_clone
    for number in range(20):
        with td.DispatchLoader(range(10) if rank == 0 else None) as loader:
            assert list(loader) == list(range(rank, 10, 2)), number
    # One for the votes, and one for early exits.
    assert opened <= 2


@pytest.mark.skipif(not hasattr(dist.PrefixStore, "clone"), reason="this torch opens them in another way")
def test_loaders_share_connections_to_the_store(tmp_path: Path) -> None:
    run_job(one_after_the_other, 2, tmp_path)


def no_such_device(rank: int, line: Line) -> None:
    device = "nowhere" if rank == 1 else None
    kind, text, _ = outcome(lambda: td.DispatchLoader([1, 2] if rank == 0 else None, device=device))
    assert kind == ("InvalidInputError" if rank == 1 else "PeerFailedError"), text
    assert "device is 'nowhere': give a device of torch" in text


def test_a_bad_device_is_refused_when_the_loader_is_made(tmp_path: Path) -> None:
    run_job(no_such_device, 2, tmp_path)


def resumed_padding(rank: int, line: Line) -> None:
    def steps_of(loader: Any) -> list[tuple[int, bool]]:
        return [(batch, loader.is_padding) for batch in loader]

    def made(**options: Any) -> Any:
        return td.DispatchLoader(range(11) if rank == 0 else None, tail="pad", **options)

    with made() as loader:
        whole = steps_of(loader)
        assert whole[-1] == ((10, False) if rank == 0 else (10, True))
        states = [loader.state_dict() for _ in loader]
    for done, state in enumerate(states[:-1], 1):
        with made() as resumed:
            resumed.load_state_dict(state)
            assert steps_of(resumed) == whole[done:], done
        with made(skip_batches=done) as shorter:
            assert steps_of(shorter) == whole[done:], done


def test_the_padding_of_the_last_step_is_the_same_after_resuming(tmp_path: Path) -> None:
    run_job(resumed_padding, 2, tmp_path)


def ends_for_no_reason(rank: int, line: Line) -> None:
    for prefetch in (0, 1):
        for failing in (0, 1):
            # The source fails to flatten the second batch, or a receiver to rebuild it.
            batches = [1, 2, 3, EndsIteration(when_flattened=not failing), 5, 6]
            with td.DispatchLoader(batches if rank == 0 else None, prefetch=prefetch) as loader:
                kind, text, _ = outcome(lambda: list(loader))
            if rank == failing:
                assert kind == "NotPicklableError", (prefetch, kind, text)
            elif failing == 0:
                assert kind == "PeerFailedError" and "StopIteration" in text, (prefetch, kind, text)
            else:
                # The receiver has left the loop.
                assert kind in ("", "PeerLeftLoopError"), (prefetch, kind, text)
            dist.barrier()


def test_a_stop_iteration_from_a_batch_does_not_end_the_data(tmp_path: Path) -> None:
    run_job(ends_for_no_reason, 2, tmp_path)


def used_up(rank: int, line: Line) -> None:
    for prefetch in (0, 1):
        source = (number for number in range(5)) if rank == 0 else None
        with td.DispatchLoader(source, prefetch=prefetch, tail="short") as loader:
            assert [one for one in loader if one is not None] == list(range(rank, 5, 2))
            for _ in range(2):
                kind, text, _ = outcome(lambda: list(loader))
                assert kind == ("InvalidInputError" if rank == 0 else "PeerFailedError"), (prefetch, text)
                assert "give an iterable that starts again" in text, (prefetch, text)


def test_all_ranks_hear_of_an_iterator_that_is_used_up(tmp_path: Path) -> None:
    run_job(used_up, 2, tmp_path)
