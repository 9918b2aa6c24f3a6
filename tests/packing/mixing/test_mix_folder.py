"""Mixes on disk and in other processes: saved, mapped, pickled and shared."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.distributed.rank_processes import Job, Line, outcome
from support.packing.plans import inode_of
from support.packing.samplers import plan_of

import tundish as td
from tundish.errors import AlreadyExistsError, NotFoundError, PlanFormatError, PlanMismatchError

PLANS = [plan_of(3000), plan_of(500), plan_of(1500)]


@pytest.fixture
def mix() -> td.PackMix:
    return td.mix(PLANS, [0.5, 0.3, 0.2], num_packs=9000, seed=5).resume(weights=[1, 2, 3], after=4000)


def test_a_saved_mix_is_mapped(mix: td.PackMix, tmp_path: Path) -> None:
    mix.save(tmp_path / "mix")
    loaded = td.PackMix.load(tmp_path / "mix", PLANS)
    assert isinstance(loaded.packs, np.memmap) and not loaded.packs.flags.writeable
    assert not mix.packs.flags.writeable
    assert loaded.packs.dtype == np.int32 and np.array_equal(loaded.packs, mix.packs)
    for name in ("weights", "seed", "exhausted", "epochs", "num_packs", "fingerprint"):
        assert getattr(loaded, name) == getattr(mix, name), name
    assert loaded.stats() == mix.stats() and loaded[4000:4100] == mix[4000:4100]
    assert np.array_equal(np.load(tmp_path / "mix" / "packs.npy"), mix.packs)
    assert loaded.resume(weights=[1, 1, 1], after=7000)[:] == mix.resume(weights=[1, 1, 1], after=7000)[:]
    # Once mapped, it stays.
    for file in (tmp_path / "mix").iterdir():
        file.unlink()
    assert np.array_equal(loaded.packs, mix.packs)


def test_a_mix_is_saved_twice_and_never_over_another(mix: td.PackMix, tmp_path: Path) -> None:
    mix.save(tmp_path / "mix")
    before = (tmp_path / "mix").stat().st_mtime_ns
    mix.save(tmp_path / "mix")
    assert (tmp_path / "mix").stat().st_mtime_ns == before
    with pytest.raises(AlreadyExistsError, match="mix"):
        td.mix(PLANS, [1, 1, 1]).save(tmp_path / "mix")
    with pytest.raises(NotFoundError):
        mix.save(tmp_path / "missing" / "mix")
    assert [entry.name for entry in tmp_path.iterdir()] == ["mix"]


def test_an_empty_mix_is_saved(tmp_path: Path) -> None:
    empty = td.mix(PLANS, [1, 1, 1]).resume(weights=[1, 1, 1], after=0)
    empty.save(tmp_path / "mix")
    assert td.PackMix.load(tmp_path / "mix", PLANS)[:] == empty[:]


def edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        value = json.loads((folder / "mix.json").read_text())
        change(value)
        (folder / "mix.json").write_text(json.dumps(value))

    return apply


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (lambda folder: (folder / "mix.json").unlink(), NotFoundError, "mix.json"),
        (lambda folder: (folder / "packs.npy").unlink(), NotFoundError, "packs.npy"),
        (lambda folder: (folder / "mix.json").write_text("{"), PlanFormatError, "not valid JSON"),
        (lambda folder: (folder / "mix.json").write_text("[" * 100_000), PlanFormatError, "not valid JSON"),
        (lambda folder: (folder / "mix.json").write_bytes(b"\xff\xfe"), PlanFormatError, "not valid JSON"),
        (lambda folder: (folder / "mix.json").write_text("[1]"), PlanFormatError, "format version None"),
        (edit(lambda value: value.update(format_version=2)), PlanFormatError, "format version 2"),
        (edit(lambda value: value.pop("stages")), PlanFormatError, "does not describe a mix.*stages"),
        (edit(lambda value: value.update(stages=[])), PlanFormatError, "was edited"),
        (edit(lambda value: value.update(plans=3)), PlanFormatError, "does not describe a mix"),
        (edit(lambda value: value["stages"][0].update(start=-3)), PlanFormatError, "was edited"),
        (edit(lambda value: value.update(seed=6)), PlanFormatError, "was edited"),
        (edit(lambda value: value.update(packs=8999)), PlanFormatError, r"packs.npy .*\(8999,\)"),
        (lambda folder: truncate(folder / "packs.npy", 100), PlanFormatError, "packs.npy is damaged"),
        (lambda folder: truncate(folder / "packs.npy", 0), PlanFormatError, "packs.npy is damaged"),
        (lambda folder: truncate(folder / "packs.npy", 30_000), PlanFormatError, "packs.npy is damaged"),
        (lambda folder: truncate(folder / "packs.npy", 40_000), PlanFormatError, "is too long"),
        (lambda folder: np.save(folder / "packs.npy", np.zeros(9000)), PlanFormatError, "packs.npy"),
        (lambda folder: np.save(folder / "packs.npy", np.zeros(9000, "i8")), PlanFormatError, "int64"),
        (lambda folder: np.save(folder / "packs.npy", np.zeros((9000, 1), "i4")), PlanFormatError, "shape"),
        (
            lambda folder: np.save(folder / "packs.npy", np.array([None]), allow_pickle=True),
            PlanFormatError,
            "packs.npy is damaged",
        ),
    ],
)
def test_a_damaged_folder_is_refused(
    mix: td.PackMix, tmp_path: Path, damage: Any, kind: type[Exception], message: str
) -> None:
    mix.save(tmp_path / "mix")
    damage(tmp_path / "mix")
    with pytest.raises(kind, match=message):
        td.PackMix.load(tmp_path / "mix", PLANS)


def truncate(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def test_other_plans_are_refused(mix: td.PackMix, tmp_path: Path) -> None:
    mix.save(tmp_path / "mix")
    with pytest.raises(PlanMismatchError, match="mix of 3 plans, and 2 are given"):
        td.PackMix.load(tmp_path / "mix", PLANS[:2])
    with pytest.raises(PlanMismatchError, match="made with another plan 0"):
        td.PackMix.load(tmp_path / "mix", PLANS[::-1])
    with pytest.raises(NotFoundError, match=r"nothing.mix\.json.* does not exist"):
        td.PackMix.load(tmp_path / "nothing", PLANS)


def test_a_mix_that_names_no_pack_is_refused_when_it_is_read(mix: td.PackMix, tmp_path: Path) -> None:
    mix.save(tmp_path / "mix")
    packs = np.array(mix.packs)
    packs[17], packs[5000] = -1, 5000
    np.save(tmp_path / "mix" / "packs.npy", packs)
    damaged = td.PackMix.load(tmp_path / "mix", PLANS)
    assert damaged[16] == mix[16]
    for call in (
        lambda: damaged[17],
        lambda: damaged.lookup([5000]),
        damaged.stats,
        lambda: damaged.resume(weights=[1, 1, 1], after=5001),
    ):
        with pytest.raises((PlanFormatError, PlanMismatchError), match="damaged, make it again"):
            call()


def seen_by_a_worker(mix: td.PackMix) -> tuple[list[Any], str]:
    return mix[::50], inode_of(np.asarray(mix.packs))


@pytest.mark.parametrize("where", ["file", "shared memory"])
def test_two_spawned_processes_map_one_mix(mix: td.PackMix, tmp_path: Path, where: str) -> None:
    if where == "file":
        mix.save(tmp_path / "mix")
        for number, plan in enumerate(PLANS):
            plan.save(tmp_path / f"plan-{number}")
        plans = [td.PackPlan.load(tmp_path / f"plan-{number}") for number in range(3)]
        mapped = td.PackMix.load(tmp_path / "mix", plans)
        assert len(pickle.dumps(mapped)) < 4000
    else:
        mapped = mix.resume(weights=[3, 2, 1], after=5000, share=True)
        assert len(pickle.dumps(mapped)) < len(pickle.dumps(mapped.plans)) + 3000
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        seen = [task.result(timeout=60) for task in [pool.submit(seen_by_a_worker, mapped) for _ in range(2)]]
    assert seen == [(mapped[::50], inode_of(np.asarray(mapped.packs)))] * 2


def test_a_mix_in_memory_is_pickled(mix: td.PackMix) -> None:
    again = pickle.loads(pickle.dumps(mix))
    assert again[:] == mix[:] and again.stats() == mix.stats() and again.fingerprint == mix.fingerprint


def share_a_mix(rank: int, line: Line) -> None:
    mix = td.mix(PLANS, [1, 2, 3], num_packs=500, seed=1, share=True, progress=False)
    assert mix[:] == td.mix(PLANS, [1, 2, 3], num_packs=500, seed=1)[:]
    assert not mix.packs.flags.writeable
    changed = mix.resume(weights=[3, 2, 1], after=100, share=True)
    assert changed[:] == mix.resume(weights=[3, 2, 1], after=100)[:]
    line.say(inode_of(np.asarray(mix.packs)), inode_of(np.asarray(changed.packs)))
    line.say(*outcome(lambda: td.mix(PLANS, [1, 2, 3], seed=rank, share=True)))
    line.say(*outcome(lambda: td.mix(PLANS, [1, 2, 3] if rank else [1, 2], share=True)))
    line.say(*outcome(lambda: td.mix(PLANS, [1, -2, 3], share=True)))


def test_ranks_share_one_mix_or_all_raise(tmp_path: Path) -> None:
    with Job(share_a_mix, 2, tmp_path) as job:
        assert len(set(job.hear_all())) == 1
        kinds = [[kind for kind, _, _ in job.hear_all()] for _ in range(3)]
        assert kinds[0] == ["PeerFailedError"] * 2
        assert kinds[1] == ["InvalidInputError", "PeerFailedError"]
        assert kinds[2] == ["InvalidInputError", "PeerFailedError"]
        job.expect_end()
