"""`rank_extra` is read on demand and equals what was saved, or raises."""

from __future__ import annotations

import copy
import fcntl
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.checkpoint.checkpoint_roots import add_manifest_checksum
from support.checkpoint.dcp_states import new_planner, run, save
from support.distributed.rank_processes import Line, outcome
from torch import distributed

from tundish._native import write_small_file
from tundish.checkpoint import load_dcp
from tundish.checkpoint.dcp.rank_extra import to_json

SAVERS = 6
# One rank had nothing to remember.
EXPECTED: dict[int, Any] = {
    rank: None if rank == 3 else {"rank": rank, "seen": (rank,)} for rank in range(SAVERS)
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint as six ranks save it."""
    planner = new_planner()
    save(planner, {"note": "text"}, tmp_path / "saved")
    return as_many_save(tmp_path / "saved")


def as_many_save(folder: Path, more: str = "") -> Path:
    manifest = json.loads((folder / "tundish.json").read_text())
    del manifest["checksum"]
    manifest["world_size"] = SAVERS
    manifest["files"] = [one for one in manifest["files"] if not one["name"].startswith("rank_extra")]
    for rank, value in EXPECTED.items():
        if value is not None:
            name = f"rank_extra-{rank:05d}.json"
            (folder / name).unlink(missing_ok=True)
            facts = write_small_file(folder, name, to_json(more or value, "rank_extra"))
            manifest["files"].append({"name": name, "size": facts.size, "checksum": facts.checksum})
    (folder / "tundish.json").write_text(add_manifest_checksum(json.dumps(manifest)))
    return folder


def assert_reads_as_a_dict(rank_extras: Any) -> None:
    assert rank_extras == EXPECTED
    assert ({}, rank_extras) == ({}, EXPECTED)
    assert rank_extras != EXPECTED | {0: None}
    assert (len(rank_extras), list(rank_extras)) == (SAVERS, list(range(SAVERS)))
    assert dict(rank_extras.items()) == EXPECTED
    # Asked again it is the same object.
    assert rank_extras[4] is rank_extras[4]
    assert 5 in rank_extras and 6 not in rank_extras and "5" not in rank_extras
    assert (rank_extras.get(6), rank_extras.get(6, "none")) == (None, "none")
    with pytest.raises(KeyError):
        rank_extras[6]
    for other in (pickle.loads(pickle.dumps(rank_extras)), copy.deepcopy(rank_extras)):
        assert type(other) is dict
        assert other == EXPECTED
        assert other[4] is not rank_extras[4]
    assert "6 ranks" in repr(rank_extras)


def test_one_process_reads_all_rank_extras(folder: Path) -> None:
    _, rank_extras = load_dcp({}, folder)
    assert_reads_as_a_dict(rank_extras)
    shutil.rmtree(folder)
    assert_reads_as_a_dict(rank_extras)


def look_up(rank: int, line: Line) -> None:
    (folder,) = line.hear()
    kept, removed, replaced, damaged = (folder.with_name(f"{folder.name}-{number}") for number in range(4))
    if rank == 0:
        for copied in (kept, removed, replaced, damaged):
            shutil.copytree(folder, copied)
    distributed.barrier()
    loaded = {path: load_dcp({}, path)[1] for path in (kept, removed, replaced, damaged)}
    distributed.barrier()
    if rank == 0:
        # A reader that locks the manifest holds up nobody.
        with (kept / "tundish.json").open("rb") as manifest:
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(removed)
        as_many_save(replaced, "the next save's")
        for path in damaged.glob("rank_extra-*"):
            path.write_bytes(path.read_bytes().replace(b"seen", b"sEEn"))
    distributed.barrier()
    assert_reads_as_a_dict(loaded[kept])
    told = {}
    for path, rank_extras in loaded.items():
        told[path.name] = {one: outcome(lambda: rank_extras[one]) for one in rank_extras}  # noqa: B023
        for one, (kind, _, _) in told[path.name].items():
            assert kind or rank_extras[one] == EXPECTED[one]
    assert outcome(lambda: dict(loaded[removed]))[0] == "NotFoundError"
    assert outcome(lambda: pickle.dumps(loaded[removed]))[0] == "NotFoundError"
    assert outcome(lambda: loaded[removed].get(4 + (rank == 0)))[0] == "NotFoundError"
    line.say([told[path.name] for path in (removed, replaced, damaged)])


def test_later_access_gives_saved_values_or_an_error(folder: Path, tmp_path: Path) -> None:
    for rank, ((removed, replaced, damaged),) in enumerate(run(look_up, 2, tmp_path / "job", folder)):
        # The first rank's, its own, and that there was nothing.
        here = {0, rank, 3}
        for told, kind, said in (
            (removed, "NotFoundError", "was removed"),
            (replaced, "NotFoundError", "was replaced"),
            (damaged, "CorruptCheckpointError", "has the checksum"),
        ):
            assert {one for one, (failed, _, _) in told.items() if not failed} == here, told
            for one in set(told) - here:
                assert told[one][0] == kind
                assert said in told[one][1]
                assert "dict(rank_extras)" in told[one][1] or kind == "CorruptCheckpointError"


def load_what_is_damaged(rank: int, line: Line) -> None:
    (folder,) = line.hear()
    line.say(outcome(lambda: load_dcp({}, folder, verify=False)))


@pytest.mark.parametrize("content", [b'{"rank": 1, "seen": [1]} ', b"["])
def test_a_damaged_rank_extra_fails_the_load_on_all_ranks(
    folder: Path, tmp_path: Path, content: bytes
) -> None:
    name = "rank_extra-00001.json"
    manifest = json.loads((folder / "tundish.json").read_text())
    del manifest["checksum"]
    (size,) = (one["size"] for one in manifest["files"] if one["name"] == name)
    (folder / name).write_bytes(content.ljust(size)[:size])
    (first, second) = run(load_what_is_damaged, 2, tmp_path / "job", folder)
    assert first[0][0] == "PeerFailedError" and name in first[0][1]
    assert second[0][0] == "CorruptCheckpointError" and name in second[0][1]
