"""Mixes on disk and in other processes: saved, loaded, pickled and shared."""

from __future__ import annotations

import json
import os
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
from tundish.errors import (
    AlreadyExistsError,
    InvalidInputError,
    NotFoundError,
    PlanFormatError,
    PlanMismatchError,
)

PLANS = [plan_of(3000), plan_of(500), plan_of(1500)]


@pytest.fixture
def mix() -> td.PackMix:
    return td.mix(PLANS, [0.5, 0.3, 0.2], num_packs=9000, seed=5).resume(weights=[1, 2, 3], after=4000)


def test_a_saved_mix_is_computed_again(mix: td.PackMix, tmp_path: Path) -> None:
    mix.save(tmp_path / "mix.json")
    loaded = td.PackMix.load(tmp_path / "mix.json", PLANS)
    assert not loaded.packs.flags.writeable and not mix.packs.flags.writeable
    assert loaded.packs.dtype == np.int32 and np.array_equal(loaded.packs, mix.packs)
    for name in ("weights", "seed", "exhausted", "epochs", "num_packs", "fingerprint"):
        assert getattr(loaded, name) == getattr(mix, name), name
    assert loaded.stats() == mix.stats() and loaded[4000:4100] == mix[4000:4100]
    assert loaded.resume(weights=[1, 1, 1], after=7000)[:] == mix.resume(weights=[1, 1, 1], after=7000)[:]


def test_a_mix_is_saved_twice_and_never_over_another(mix: td.PackMix, tmp_path: Path) -> None:
    file = tmp_path / "mix.json"
    mix.save(file)
    before = file.stat().st_mtime_ns
    mix.save(file)
    assert file.stat().st_mtime_ns == before
    with pytest.raises(AlreadyExistsError, match=r"mix\.json"):
        td.mix(PLANS, [1, 1, 1]).save(file)
    with pytest.raises(AlreadyExistsError):
        mix.save(tmp_path)
    with pytest.raises(NotFoundError):
        mix.save(tmp_path / "missing" / "mix.json")
    assert [entry.name for entry in tmp_path.iterdir()] == ["mix.json"]


def test_an_empty_mix_is_saved(tmp_path: Path) -> None:
    empty = td.mix(PLANS, [1, 1, 1]).resume(weights=[1, 1, 1], after=0)
    empty.save(tmp_path / "mix.json")
    assert td.PackMix.load(tmp_path / "mix.json", PLANS)[:] == empty[:]


def edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def apply(file: Path) -> None:
        value = json.loads(file.read_text())
        change(value)
        file.write_text(json.dumps(value))

    return apply


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (lambda file: file.unlink(), NotFoundError, "mix.json"),
        (lambda file: file.write_text("{"), PlanFormatError, "not valid JSON"),
        (lambda file: file.write_text("[" * 100_000), PlanFormatError, "not valid JSON"),
        (lambda file: file.write_bytes(b"\xff\xfe"), PlanFormatError, "not valid JSON"),
        (lambda file: file.write_text("[1]"), PlanFormatError, "format version None"),
        (edit(lambda value: value.update(format_version=3)), PlanFormatError, "format version 3"),
        (edit(lambda value: value.pop("stages")), PlanFormatError, "does not describe a mix.*stages"),
        (edit(lambda value: value.update(stages=[])), PlanFormatError, "was edited"),
        (edit(lambda value: value.update(plans=3)), PlanFormatError, "does not describe a mix"),
        (edit(lambda value: value["stages"][0].__setitem__(0, -3)), PlanFormatError, "was edited"),
        (edit(lambda value: value.update(seed=6)), PlanFormatError, "was edited"),
    ],
)
def test_a_damaged_file_is_refused(
    mix: td.PackMix, tmp_path: Path, damage: Any, kind: type[Exception], message: str
) -> None:
    mix.save(tmp_path / "mix.json")
    damage(tmp_path / "mix.json")
    with pytest.raises(kind, match=message) as caught:
        td.PackMix.load(tmp_path / "mix.json", PLANS)
    assert str(tmp_path / "mix.json") in str(caught.value)


def test_no_flipped_byte_gives_another_mix(tmp_path: Path) -> None:
    plans = [plan_of(9), plan_of(5)]
    mix = td.mix(plans, [2, 1], num_packs=20, seed=7).resume(weights=[1, 2], after=6)
    file = tmp_path / "mix.json"
    mix.save(file)
    good = file.read_bytes()
    refused = 0
    for position in range(len(good)):
        for flip in (0x01, 0x10, 0xFF):
            file.write_bytes(good[:position] + bytes([good[position] ^ flip]) + good[position + 1 :])
            error = None
            try:
                loaded = td.PackMix.load(file, plans)
            except (PlanFormatError, PlanMismatchError) as caught:
                error = caught
            if error is None:
                # White space between values.
                assert loaded.fingerprint == mix.fingerprint and loaded[:] == mix[:]
            else:
                assert str(file) in str(error)
                refused += 1
    assert refused > 2 * len(good)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero")):
        with pytest.raises(InvalidInputError, match="regular file"):
            td.PackMix.load(path, PLANS)


def test_other_plans_are_refused(mix: td.PackMix, tmp_path: Path) -> None:
    mix.save(tmp_path / "mix.json")
    with pytest.raises(PlanMismatchError, match="mix of 3 plans, and 2 are given"):
        td.PackMix.load(tmp_path / "mix.json", PLANS[:2])
    with pytest.raises(PlanMismatchError, match="made with another plan 0"):
        td.PackMix.load(tmp_path / "mix.json", PLANS[::-1])


def seen_by_a_worker(mix: td.PackMix) -> tuple[list[Any], str]:
    return mix[::50], inode_of(np.asarray(mix.packs))


def test_two_spawned_processes_map_one_mix(mix: td.PackMix) -> None:
    shared = mix.resume(weights=[3, 2, 1], after=5000, share=True)
    assert len(pickle.dumps(shared)) < len(pickle.dumps(shared.plans)) + 3000
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        seen = [task.result(timeout=60) for task in [pool.submit(seen_by_a_worker, shared) for _ in range(2)]]
    assert seen == [(shared[::50], inode_of(np.asarray(shared.packs)))] * 2


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
