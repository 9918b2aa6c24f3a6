"""Jobs of torch.distributed without a controller: `drain` of a group, and a controller of a group's ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.distributed.rank_processes import Job, Line, outcome


def ranks_drain(rank: int, line: Line) -> None:
    import torch
    import torch.distributed as distributed

    from tundish import rtensor

    def gathered(value: Any) -> list[Any]:
        found: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(found, value)
        return found

    for step in range(3):
        mine = rtensor.remotize([torch.full((100,), rank), torch.full((50,), rank)])
        everybodys = gathered(mine)
        sums = [int(one[0].sum()) for one in rtensor.localize(everybodys)]
        assert sums == [0, 100, 200]
        del sums
        # Each names what another one owns; nobody anything; one what all of them own, and each what it kept.
        others = everybodys[(rank + 1) % 3][0]
        if step == 0:
            rtensor.drain(claim=others)
        elif step == 1:
            kept = others
            assert rtensor.keep(kept) == 1
            rtensor.drain()
        else:
            rtensor.drain(claim=[kept, *(one[0] for one in everybodys if rank == 0)])
        stats = rtensor.storage_stats(), rtensor.fetch_buffer_stats()
        line.say(stats[0]["num_tensors"], stats[1]["num_entries"])
    kind, text, _ = outcome(lambda: rtensor.localize(mine[0]))
    line.say(kind, "drained or removed" in text)


def test_ranks_drain_together(tmp_path: Path) -> None:
    with Job(ranks_drain, 3, tmp_path) as job:
        # Of two tensors a step one is claimed, but in the second step none; one of that goes with the third.
        for counts in ((1, 0), (3, 1), (3, 0)):
            assert job.hear_all() == [counts] * 3
        assert job.hear_all() == [("ShardGoneError", True)] * 3
        job.expect_end()


def one_claims_what_others_keep(rank: int, line: Line) -> None:
    import logging

    import torch
    import torch.distributed as distributed

    from tundish import rtensor

    warned: list[str] = []
    logging.getLogger("tundish.rtensor").addFilter(lambda record: bool(warned.append(record.getMessage())))
    handles: list[Any] = [None] * 3
    distributed.all_gather_object(handles, rtensor.remotize(torch.full((10,), rank)))
    rtensor.drain()
    rtensor.localize(handles)
    rtensor.keep(handles)
    # Claimed by nobody; the first by a rank that is neither its owner nor keeps it any more; and the others.
    for claims in ((None,) * 3, (None, None, handles[0]), (handles[1], None, handles[2]), (None,) * 3):
        rtensor.drain(claim=claims[rank])
        line.say(rtensor.storage_stats()["num_tensors"], rtensor.fetch_buffer_stats()["num_entries"])
    line.say(warned)


def test_kept_shards_end_when_any_rank_claims_them(tmp_path: Path) -> None:
    with Job(one_claims_what_others_keep, 3, tmp_path) as job:
        assert job.hear_all() == [(1, 2)] * 3
        assert job.hear_all() == [(0, 2), (1, 1), (1, 1)]
        assert job.hear_all() == [(0, 0)] * 3
        assert job.hear_all() == [(0, 0)] * 3
        # Kept shards are there on purpose.
        assert job.hear_all() == [([],)] * 3
        job.expect_end()


def ranks_fetch_ahead(rank: int, line: Line) -> None:
    import logging

    import torch
    import torch.distributed as distributed

    from tundish import rtensor

    handles: list[Any] = [None] * 2
    distributed.all_gather_object(handles, rtensor.remotize(torch.full((10,), rank)))
    rtensor.drain()

    class Fetch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            # As another thread does, just then.
            if "is drained" in record.getMessage():
                rtensor.localize(handles)

    logger, handler = logging.getLogger("tundish.rtensor"), Fetch()
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    rtensor.drain()
    logger.removeHandler(handler)
    line.say(rtensor.fetch_buffer_stats()["num_entries"])
    rtensor.drain()
    line.say(rtensor.fetch_buffer_stats()["num_entries"])


def test_fetches_during_a_drain_belong_to_the_next_step(tmp_path: Path) -> None:
    with Job(ranks_fetch_ahead, 2, tmp_path) as job:
        assert job.hear_all() == [(1,)] * 2
        assert job.hear_all() == [(0,)] * 2
        job.expect_end()


def one_fails(rank: int, line: Line) -> None:
    from tundish import rtensor

    rtensor.drain()
    if rank == 1:
        with rtensor.step():
            line.say(*outcome(rtensor.drain))
    else:
        line.say(*outcome(rtensor.drain))
    rtensor.drain()
    line.say("drained")


def test_all_ranks_raise_the_failure_of_one(tmp_path: Path) -> None:
    with Job(one_fails, 2, tmp_path) as job:
        kind, text, rank = job.hear(0)
        assert (kind, rank) == ("PeerFailedError", 1) and "step() of its own" in text
        assert job.hear(1)[0] == "InvalidInputError"
        assert job.hear_all() == [("drained",)] * 2
        job.expect_end()


def claims_of_an_owner_that_is_gone(rank: int, line: Line) -> None:
    import torch
    import torch.distributed as distributed

    from tundish import rtensor

    handles: list[Any] = [None] * 2
    gone = rtensor.TensorStore()
    gone.serve()
    distributed.all_gather_object(handles, gone.remotize(torch.ones(3)))
    gone.close()
    distributed.barrier()
    line.say(*outcome(lambda: rtensor.drain(claim=handles[1] if rank == 0 else None)))
    rtensor.drain()
    line.say("drained")


def test_all_ranks_hear_of_a_claim_that_its_owner_cannot_remove(tmp_path: Path) -> None:
    with Job(claims_of_an_owner_that_is_gone, 2, tmp_path) as job:
        (kind, text, _), (other_kind, other_text, named) = job.hear_all()
        assert kind not in ("", "PeerFailedError"), text
        assert (other_kind, named) == ("PeerFailedError", 0), other_text
        assert job.hear_all() == [("drained",)] * 2
        job.expect_end()


def ranks_are_controlled(rank: int, line: Line) -> None:
    import torch
    import torch.distributed as distributed

    from tundish import rtensor
    from tundish.rtensor import Controller

    handles: list[Any] = [None] * 2
    controller = Controller.from_group(role=("actor", "critic")[rank])
    line.say([(worker.role, worker.rank) for worker in controller.workers])
    distributed.all_gather_object(handles, rtensor.remotize(torch.full((10,), rank)))
    if rank == 0:
        with controller.step(claim=handles):
            distributed.barrier()
            rtensor.localize(handles)
            distributed.barrier()
    else:
        distributed.barrier()
        rtensor.localize(handles)
        distributed.barrier()
    distributed.barrier()
    line.say(rtensor.storage_stats()["num_tensors"], rtensor.fetch_buffer_stats()["num_entries"])
    controller.close()


def test_a_controller_of_a_group(tmp_path: Path) -> None:
    with Job(ranks_are_controlled, 2, tmp_path) as job:
        assert job.hear_all() == [([("actor", 0), ("critic", 1)],)] * 2
        assert job.hear_all() == [(0, 0)] * 2
        job.expect_end()


def who_serves_where(rank: int, line: Line) -> None:
    from tundish import rtensor
    from tundish.distributed import voter_of

    voter = voter_of(None)
    voter.vote(what="the first")
    before = voter.last_vote.number
    with rtensor.Controller.from_group(role=f"role {rank}") as controller:
        line.say([(worker.role, worker.rank) for worker in controller.workers])
        line.say(len({worker.addr for worker in controller.workers}), voter.last_vote.number - before)


def test_a_controller_of_a_group_takes_as_many_votes_however_many_ranks_there_are(tmp_path: Path) -> None:
    with Job(who_serves_where, 5, tmp_path) as job:
        assert job.hear_all() == [([(f"role {rank}", rank) for rank in range(5)],)] * 5
        assert job.hear_all() == [(5, 1)] * 5
        job.expect_end()


def one_cannot_serve(rank: int, line: Line) -> None:
    from tundish import rtensor
    from tundish.rtensor.tensor_store import TensorStore

    def address(_: TensorStore) -> str:
        raise OSError(24, "too many open files")

    if rank == 1:
        TensorStore.address = address  # type: ignore[method-assign]
    line.say(*outcome(rtensor.Controller.from_group))


def test_all_ranks_name_the_rank_that_cannot_serve(tmp_path: Path) -> None:
    with Job(one_cannot_serve, 3, tmp_path) as job:
        (first, text, named), (second, *_), (third, *_) = job.hear_all()
        assert (first, second, third, named) == ("PeerFailedError", "OSError", "PeerFailedError", 1)
        assert "too many open files" in text
        job.expect_end()
