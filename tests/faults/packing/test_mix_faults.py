"""Mixes under kills, Ctrl-C and full disks."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from support.distributed.programs import run
from support.interrupts import wait_after_interrupt
from support.packing.small_disk import small_disk
from support.soak import chosen

import tundish as td
from tundish import _native
from tundish.errors import StorageError

PLANS = [td.pack(np.ones(packs, dtype=np.int8), 1) for packs in (300, 700)]
SAVE = """
import sys, numpy as np, tundish as td
plans = [td.pack(np.ones(packs, dtype=np.int8), 1) for packs in (300, 700)]
td.mix(plans, [1, 2], num_packs=2000).save(sys.argv[1] + "/mix.json")
"""


def test_killed_at_any_system_call_a_mix_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    assert _native.HAS_FAILPOINTS, "the compiled module has no failpoints: run the tests with `make test`"
    trace = tmp_path / "trace"
    (tmp_path / "whole").mkdir()
    ran = run(["-c", SAVE, tmp_path / "whole"], env=os.environ | {"TUNDISH_FAILPOINT_TRACE": str(trace)})
    assert ran.returncode == 0, ran.stderr
    hits = 2 * len(trace.read_text().splitlines())
    assert hits > 10
    expected = td.mix(PLANS, [1, 2], num_packs=2000)
    whole = 0
    for hit in chosen(range(hits)):
        folder = tmp_path / f"hit-{hit}"
        folder.mkdir()
        ran = run(["-c", SAVE, folder], env=os.environ | {"TUNDISH_FAILPOINT": f"kill {hit}"})
        assert ran.returncode == -signal.SIGKILL, (hit, ran.stderr)
        if (folder / "mix.json").exists():
            whole += 1
            assert np.array_equal(td.PackMix.load(folder / "mix.json", PLANS).packs, expected.packs)
        expected.save(folder / "mix.json")
        # The next file that is written there removes what the killed process left.
        expected.save(folder / "again.json")
        assert sorted(entry.name for entry in folder.iterdir()) == ["again.json", "mix.json"]
        assert np.array_equal(td.PackMix.load(folder / "mix.json", PLANS).packs, expected.packs)
    assert 0 < whole < hits


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    mix = td.mix(PLANS, [1, 2], num_packs=500_000)
    with small_disk(tmp_path / "disk", "size=4k") as disk:
        (disk / "other").write_bytes(bytes(4096))
        with pytest.raises(StorageError, match="mix") as caught:
            mix.save(disk / "mix.json")
        assert caught.value.errno == errno.ENOSPC
        assert [entry.name for entry in disk.iterdir()] == ["other"]
    with small_disk(tmp_path / "read-only", "ro") as disk, pytest.raises(StorageError) as caught:
        mix.save(disk / "mix.json")
    assert caught.value.errno == errno.EROFS


def test_ctrl_c_ends_a_mix_within_100_ms() -> None:
    plans = [td.pack([300_000], 1), td.pack([8_000_000], 1)]
    whole = td.mix(plans, [1, 1], num_packs=40_000_000)
    calls = {
        "mix": lambda: td.mix(plans, [1, 1], num_packs=400_000_000),
        "resume": lambda: whole.resume(weights=[1, 2], after=len(whole) - 1),
    }
    for name, call in calls.items():
        waits = [wait_after_interrupt(delay, call) for delay in (0.02, 0.05, 0.08)]
        # time: the shortest of several waits; the whole call takes many times as long
        assert min(waits) < 0.1, (name, waits)
