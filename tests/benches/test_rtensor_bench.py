"""Contestants that fetch tensors are timed and compared."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.usefixtures("warm_programs")


def test_tensors_to_be_fetched_are_told_apart_and_read_whole(bench: SimpleNamespace) -> None:
    found = {case: bench.rtensor_tensors.make(case) for case in ("64 KB", "4 MB", "256 × 64 KB")}
    digests = {case: bench.rtensor_tensors.digest(tensors) for case, tensors in found.items()}
    assert len(set(digests.values())) == 3
    for tensors in found.values():
        bench.rtensor_tensors.read(tensors)
    many = found["256 × 64 KB"]
    assert bench.rtensor_tensors.digest([*many[1:], many[0]]) != digests["256 × 64 KB"]
    many[255].view(torch.uint8)[-1] = 0xFF
    with pytest.raises(RuntimeError, match="a byte that was not in it"):
        bench.rtensor_tensors.read(many)


def test_a_fetch_is_timed_and_compared(bench: SimpleNamespace) -> None:
    with bench.rtensor_processes.pair("ours", ["64 KB", "4 MB", "256 × 64 KB"]) as (_, consumer):
        consumer.ask("fetch", "64 KB")
        seconds, digest = consumer.ask("fetch", "256 × 64 KB")
        assert seconds > 0
        assert digest == bench.rtensor_tensors.digest(bench.rtensor_tensors.make("256 × 64 KB"))
        assert len(consumer.ask("beside", "4 MB", "64 KB", 5, 60.0)) == 5
        with pytest.raises(RuntimeError, match=r"(?s)no answer to fetch.*KeyError"):
            consumer.ask("fetch", "256 MB")


@pytest.mark.parametrize("contestant", ["sockets", "reading", "ours, from the buffer"])
def test_baselines_fetch_the_same_tensors(bench: SimpleNamespace, contestant: str) -> None:
    with bench.rtensor_processes.pair(contestant, ["64 KB", "256 × 64 KB"]) as (_, consumer):
        for case in ("64 KB", "256 × 64 KB"):
            for _ in range(2):
                _, digest = consumer.ask("fetch", case)
                assert digest == bench.rtensor_tensors.digest(bench.rtensor_tensors.make(case))
