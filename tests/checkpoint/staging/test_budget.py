"""The staging budget: never beyond its limit."""

from __future__ import annotations

import threading

import pytest

from tundish.checkpoint.buffers import StagingBudget
from tundish.errors import InvalidInputError


def test_a_save_waits_for_staging_memory_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    budget = StagingBudget(100)
    budget.take(70, "save one")
    budget.take(30, "save two")
    assert not caplog.records
    taken = threading.Event()

    def third() -> None:
        budget.take(60, "save three")
        taken.set()

    thread = threading.Thread(target=third)
    thread.start()
    budget.give_back(30)
    assert not taken.wait(0.2)
    budget.give_back(70)
    assert taken.wait(10)
    thread.join()
    assert "save three waits for the save before it" in caplog.text
    assert list(budget.stats().values()) == [60, 100, 100]


def test_a_save_larger_than_the_limit_is_refused() -> None:
    budget = StagingBudget(100)
    with pytest.raises(InvalidInputError, match=r"stages 1000 bytes .* staging_limit_bytes=100"):
        budget.take(1000, "a large save")
    assert budget.stats()["staging_in_use_bytes"] == 0


def test_without_a_limit_nothing_waits() -> None:
    budget = StagingBudget(None)
    for _ in range(10):
        budget.take(1 << 50, "a save")
    assert budget.stats()["staging_peak_bytes"] == 10 << 50


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "1GB"])
def test_bad_limits_are_refused(limit: object) -> None:
    with pytest.raises(InvalidInputError, match="staging_limit_bytes"):
        StagingBudget(limit)  # type: ignore[arg-type]
