"""`td.pack(share=True)` without a folder: the plan lies once a node in memory that its ranks share."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.distributed.rank_processes import Job, Line, outcome
from support.packing.plans import inode_of

import tundish as td
from tundish.packing import FIELDS

LENGTHS = np.random.default_rng(0).integers(0, 300, 20_000)


def share(**options: Any) -> td.PackPlan:
    options = {"lengths": LENGTHS, "max_length": 256, "seed": 4, **options}
    return td.pack(share=True, progress=False, **options)


def use_a_shared_plan(rank: int, line: Line) -> None:
    folder = Path(line.hear())
    plan = share()
    alone = td.pack(LENGTHS, 256, seed=4)
    assert plan.path is None
    assert plan.fingerprint == alone.fingerprint
    assert plan.metadata == alone.metadata
    for field in FIELDS:
        shared, own = getattr(plan, field), getattr(alone, field)
        assert np.array_equal(shared, own)
        assert shared.dtype == own.dtype
        assert not shared.flags.writeable
    assert plan[7] == alone[7]
    assert plan[-3:] == alone[-3:]
    assert plan.stats() == alone.stats()
    plan.verify()
    plan.save(folder / f"plan-{rank}")
    assert td.PackPlan.load(folder / f"plan-{rank}", lengths=LENGTHS)[7] == alone[7]
    message = pickle.dumps(plan)
    again = pickle.loads(message)
    assert again[7] == alone[7]
    assert len(message) < LENGTHS.nbytes + 4096
    line.say(inode_of(plan.indices), inode_of(again.indices))

    lengths = td.shm.node_shared(LENGTHS)
    light = share(lengths=lengths)
    small = pickle.dumps(light)
    assert len(small) < 4096
    assert pickle.loads(small).lengths[0].tolist() == LENGTHS.tolist()
    several = td.pack_datasets([LENGTHS, LENGTHS[:1000]], 128, share=True, progress=False)
    assert several.fingerprint == td.pack_datasets([LENGTHS, LENGTHS[:1000]], 128).fingerprint
    several.verify()
    whole = share(mode="best_fit", overlong="split", max_length=200)
    own = td.pack(LENGTHS, 200, seed=4, mode="best_fit", overlong="split")
    assert {name: column.tolist() for name, column in whole.arrays().items()} == {
        name: column.tolist() for name, column in own.arrays().items()
    }
    assert whole.piece_start is not None and pickle.loads(pickle.dumps(whole))[3] == own[3]
    whole.verify()
    empty = share(lengths=LENGTHS[:0])
    assert len(empty) == 0
    line.say(*outcome(lambda: share(cache_dir=folder / "cache" if rank == 1 else None)))
    line.say(*outcome(lambda: share(seed=rank)))
    line.say(share().fingerprint == plan.fingerprint)


@pytest.mark.parametrize("world", [1, 3])
def test_all_ranks_use_one_plan(world: int, tmp_path: Path) -> None:
    with Job(use_a_shared_plan, world, tmp_path) as job:
        job.tell_all(str(tmp_path))
        inodes = {inode for message in job.hear_all() for inode in message}
        assert len(inodes) == 1
        for mixed in ("memory and files", "different seeds"):
            heard = job.hear_all()
            if world > 1:
                assert [kind for kind, _, _ in heard] == ["PeerFailedError"] * world, mixed
                assert all("same arguments" in text for _, text, _ in heard)
        assert job.hear_all() == [(True,)] * world
        job.expect_end()


IMAGES = np.random.default_rng(1).integers(0, 4, len(LENGTHS))
OPTIONS: dict[str, dict[str, Any]] = {
    "costs": {"mode": "best_fit", "costs": [IMAGES, IMAGES[:3000]], "max_cost": 5},
    "leaving packs out": {"mode": "ordered", "multiple_of": 64},
    "repeating packs": {"mode": "hard", "multiple_of": 64, "remainder": "repeat"},
}


def compare_with_an_unshared_plan(_rank: int, line: Line) -> None:
    options = {"lengths": [LENGTHS, LENGTHS[:3000]], "max_length": 300, "seed": 4, **OPTIONS[line.hear()]}
    shared = td.pack_datasets(share=True, progress=False, **options)
    shared.verify(costs=options.get("costs"))
    line.say(plan_contents(shared) == plan_contents(td.pack_datasets(progress=False, **options)))


def plan_contents(plan: td.PackPlan) -> list[Any]:
    columns = {name: column.tolist() for name, column in plan.arrays().items()}
    return [columns, plan.metadata, plan.fingerprint, plan.stats(), plan.ledger()]


@pytest.mark.parametrize("name", OPTIONS)
def test_every_rank_has_the_plan_that_it_would_build_alone(name: str, tmp_path: Path) -> None:
    with Job(compare_with_an_unshared_plan, 2, tmp_path) as job:
        job.tell_all(name)
        assert job.hear_all() == [(True,)] * 2
        job.expect_end()


class Rows:
    """Samples whose tokens are their number."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> np.ndarray:
        return np.full(LENGTHS[index], index)


class Packs:
    """A dataset that says what a worker sees of a plan."""

    def __init__(self, plan: td.PackPlan) -> None:
        self.plan = plan
        self.dataset = td.PackedDataset(Rows(), plan)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> list[int | str]:
        return [int(self.dataset[index]["input_ids"].sum()), inode_of(self.plan.indices)]


# Each spawned worker imports torch anew.
@pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("forkserver", 2), ("spawn", 1)])
def test_workers_of_a_loader_use_the_same_plan(method: str, workers: int) -> None:
    from torch.utils.data import DataLoader

    plan = share()
    loader: Any = DataLoader(
        Packs(plan),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=method,  # type: ignore[arg-type]
    )
    here = Packs(plan)
    assert list(loader) == [here[index] for index in range(len(here))]
