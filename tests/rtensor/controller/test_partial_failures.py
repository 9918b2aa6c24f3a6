"""Claims, keeps and ends of steps that fail or are interrupted half-way: nothing stays, and nobody loses anything."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

import pytest
from support.rtensor import peer_functions
from support.rtensor.peers import Peer
from support.waiting import until

from tundish import rtensor
from tundish.errors import DrainError, InvalidInputError, ShardGoneError, TransferError
from tundish.rtensor import Controller
from tundish.rtensor.tensor_store import default_store

pytestmark = pytest.mark.usefixtures("emptied")


def held(process: Peer) -> tuple[int, int]:
    """How many tensors a process stores, and how many it has fetched."""
    storage, buffer = process.call(peer_functions.stats)
    return storage["num_tensors"], buffer["num_entries"]


@pytest.mark.parametrize("is_claimed", [True, False], ids=["claimed", "fetched"])
def test_a_keep_that_failed_on_one_worker_ends_with_the_step(
    is_claimed: bool,
    owners: list[Peer],
    consumers: list[Peer],
    controller: Controller,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handles = owners[0].call(peer_functions.make, 2, 10)
    with controller.step(claim=handles if is_claimed else None):
        for consumer in consumers:
            consumer.call(peer_functions.sums, handles)
        keep_by_all_but_one(controller, handles, consumers[1], monkeypatch)
    assert [held(one) for one in consumers] == [(0, 0)] * len(consumers)
    assert held(owners[0]) == ((0 if is_claimed else 2), 0)
    controller.clear_batches(handles)


def test_a_keep_that_failed_ends_in_the_controllers_process_too(
    owners: list[Peer], consumers: list[Peer], controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = owners[0].call(peer_functions.make, 2, 10)
    with controller.step():
        rtensor.localize(handles)
        keep_by_all_but_one(controller, handles, consumers[1], monkeypatch)
    assert rtensor.fetch_buffer_stats()["num_entries"] == 0


def test_a_second_keep_that_failed_ends_with_the_step(
    owners: list[Peer], consumers: list[Peer], controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = owners[0].call(peer_functions.make, 2, 10)
    with controller.step(claim=handles):
        consumers[0].call(peer_functions.sums, handles)
        controller.keep(handles)
    with controller.step(claim=handles):
        keep_by_all_but_one(controller, handles, consumers[1], monkeypatch)
    assert held(owners[0]) == held(consumers[0]) == (0, 0)


def test_a_keep_that_failed_does_not_keep_fetches_of_the_next_step(
    owners: list[Peer], consumers: list[Peer], controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = owners[0].call(peer_functions.make, 2, 10)
    with controller.step():
        keep_by_all_but_one(controller, handles, consumers[1], monkeypatch)
    consumers[1].call(peer_functions.sums, handles)
    for _ in range(2):
        with controller.step():
            pass
    assert held(consumers[1]) == (0, 0)


def keep_by_all_but_one(
    controller: Controller, handles: Any, silent_one: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_all = controller._connections.send_all

    def ask_all_but_one(requests: Any) -> list[Any]:
        wanted = list(requests)
        if wanted and wanted[0][1].path == "/keep":
            silent = [worker.addr == silent_one.addr for worker, _ in wanted]
            assert any(silent)
            answers = iter(
                ask_all([one for one, is_silent in zip(wanted, silent, strict=True) if not is_silent])
            )
            return [TransferError("it is silent") if is_silent else next(answers) for is_silent in silent]
        return ask_all(wanted)

    with monkeypatch.context() as patch:
        patch.setattr(controller._connections, "send_all", ask_all_but_one)
        with pytest.raises(DrainError, match="what to keep"):
            controller.keep(handles)


def test_of_two_shards_of_one_name_the_one_that_is_not_kept_ends(
    owners: list[Peer], consumers: list[Peer], controller: Controller
) -> None:
    kept, other = (owner.call(peer_functions.store, "rewards", 10) for owner in owners)
    with controller.step(claim=[kept, other]):
        consumers[0].call(peer_functions.sums, [kept, other])
        controller.keep(kept)
    assert [held(owner) for owner in owners] == [(1, 0), (0, 0)]
    assert consumers[0].call(peer_functions.sums, [kept]) == [70]
    with controller.step(claim=kept):
        pass
    assert held(owners[0]) == held(consumers[0]) == (0, 0)


def claim_what_is_elsewhere(handles: Any) -> int:
    rtensor.localize(handles)
    with pytest.raises(ShardGoneError), rtensor.step(claim=handles):
        pass
    with rtensor.step():
        pass
    return int(rtensor.fetch_buffer_stats()["num_entries"])


def test_fetches_of_a_shard_that_could_not_be_claimed_end_with_their_step(
    owners: list[Peer], consumers: list[Peer]
) -> None:
    handles = owners[0].call(peer_functions.make, 2, 10)
    assert consumers[0].call(claim_what_is_elsewhere, handles) == 0


def test_drained_kept_entries_hide_no_leftover(
    owners: list[Peer], consumers: list[Peer], controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    kept = owners[0].call(peer_functions.make, 2, 10)
    with controller.step(claim=kept):
        consumers[1].call(peer_functions.sums, kept)
        controller.keep(kept)
    controller.clear_batches(kept)
    left = owners[0].call(peer_functions.make, 2, 10)
    with controller.step():
        consumers[1].call(peer_functions.sums_in_forgotten_step, left, 123_456)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "2 entries" in record.getMessage()
    consumers[1].call(peer_functions.end_forgotten_step, 123_456)


class Interrupted:
    """A `ShardStore` in which the next call of one method is interrupted."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._shards = default_store.shards

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            self._method = ""
            raise KeyboardInterrupt
        return getattr(self._shards, name)


def interrupted_at(method: str, handles: Any) -> tuple[int, int]:
    with pytest.MonkeyPatch.context() as patch:
        own = rtensor.remotize(rtensor.localize(handles))
        with contextlib.suppress(KeyboardInterrupt), rtensor.step(claim=own):
            rtensor.localize(handles)
            patch.setattr(default_store.steps, "_shards", Interrupted(method))
    with rtensor.step():
        pass
    return rtensor.storage_stats()["unclaimed_entries"], rtensor.fetch_buffer_stats()["num_entries"]


def test_the_next_step_drains_what_an_interrupted_end_left(owners: list[Peer], consumers: list[Peer]) -> None:
    handles = owners[0].call(peer_functions.make, 2, 10)
    # Its claims are undone.
    assert consumers[0].call(interrupted_at, "clear_buffer", handles) == (2, 0)


def interrupted_as_it_begins(handles: Any) -> int:
    own = rtensor.remotize(rtensor.localize(handles))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default_store.steps, "_shards", Interrupted("begin_step"))
        with pytest.raises(KeyboardInterrupt), rtensor.step(claim=own):
            pytest.fail("it began")
    unclaimed = int(rtensor.storage_stats()["unclaimed_entries"])
    with rtensor.step(claim=own):
        pass
    return unclaimed - rtensor.storage_stats()["num_tensors"] - rtensor.fetch_buffer_stats()["num_entries"]


def test_a_step_alone_that_is_interrupted_as_it_begins_claims_nothing(
    owners: list[Peer], consumers: list[Peer]
) -> None:
    handles = owners[0].call(peer_functions.make, 2, 10)
    assert consumers[0].call(interrupted_as_it_begins, handles) == 2


def test_a_shard_of_a_closed_controller_can_be_claimed_at_once(
    owners: list[Peer], controller: Controller
) -> None:
    handles, gone = owners[0].call(peer_functions.make, 2, 10), owners[0].call(peer_functions.make, 1, 10)
    owners[0].call(peer_functions.remove, [gone[0].shard_id])
    with Controller(controller.workers) as other:
        # In place of its own claims, of an owner that is slow to notice.
        step = other.step(claim=handles)
        step.__enter__()
        with pytest.raises(ShardGoneError, match=gone[0].shard_id), controller.step(claim=gone):
            pass
        noticing = threading.Timer(0.2, other.close)
        noticing.start()
        with controller.step(claim=handles):
            pass
        noticing.join()
    assert held(owners[0]) == (0, 0)
    del step


def test_a_controller_closed_within_a_step_gives_the_step_up(
    owners: list[Peer], consumers: list[Peer], controller: Controller
) -> None:
    handles = owners[0].call(peer_functions.make, 2, 10)
    with controller.step(claim=handles):
        consumers[0].call(peer_functions.sums, handles)
        controller.close()
    until(
        lambda: (
            (held(consumers[0]), owners[0].call(peer_functions.stats)[0]["unclaimed_entries"]) == ((0, 0), 2)
        ),
        "its step goes on",
    )
    with pytest.raises(InvalidInputError, match=r"is closed \(it was closed\)"):
        controller.stats()
