"""Processes that create, attach, close and sweep under the same few names are killed at random, again and again.

With a fixed seed; 200 times under `make soak`. Living processes read what was written, no name of a living process is
lost, and in the end one sweep leaves nothing.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from support.shm.script_process import PROLOGUE, ScriptProcess
from support.soak import IS_SOAK

from tundish.shm import sweep

KILLS = 200 if IS_SOAK else 10
ACTORS = 3

# Runs until it is stopped. Every element of a segment is the same number; any other content is an error.
WORK = (
    PROLOGUE
    + """
import random, select, sys
from pathlib import Path
from tundish.errors import AlreadyExistsError, NotFoundError
draw = random.Random({seed})
held = {{}}
while not select.select([sys.stdin], [], [], 0)[0]:
    name = draw.choice("abc")
    move = draw.random()
    if name in held:
        one = held[name]
        assert len(set(one.array.tolist())) == 1, "torn"
        assert Path(f"/dev/shm/tundish-{{os.getuid()}}-{{name}}").exists(), "lost its name"
        if move < 0.5:
            held.pop(name).close()
            del one
    elif move < 0.4:
        try:
            held[name] = SharedArray.from_array(np.full(3000, draw.randrange(10**9)), name=name)
        except AlreadyExistsError:
            pass
    elif move < 0.8:
        try:
            held[name] = SharedArray.attach(name)
        except NotFoundError:
            pass
    elif move < 0.9:
        report = sweep()
        assert not report.failed, report.failed
        assert not {{x.name for x in report.removed}} & held.keys(), "swept what is held"
"""
)


@pytest.mark.timeout(120 + 5 * KILLS)
def test_random_kills_lose_no_living_segment_and_leave_no_dead_one(folder: Path) -> None:
    draw = random.Random(20261121)
    before = os.statvfs(folder).f_bfree
    left = 0
    scripts = [ScriptProcess() for _ in range(ACTORS)]
    for script in scripts:
        script.start(WORK.format(seed=draw.random()))
    try:
        for _ in range(KILLS):
            time.sleep(draw.uniform(0, 0.2))
            victim = draw.randrange(ACTORS)
            assert scripts[victim].process.poll() is None
            scripts[victim].kill()
            with scripts[victim]:
                left += len(sweep(dry_run=True).removed)
            scripts[victim] = ScriptProcess()
            scripts[victim].start(WORK.format(seed=draw.random()))
        for script in scripts:
            # It stops at its next line, without an unexpected error.
            script.start("pass")
            script.result()
    finally:
        for script in scripts:
            with script:
                script.kill()
    assert sweep().failed == ()
    assert list(folder.iterdir()) == []
    assert os.statvfs(folder).f_bfree == before
    assert left > KILLS / 20, "there was something to sweep"
