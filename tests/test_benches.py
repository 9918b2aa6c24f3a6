"""The bench's reference forms are right, agree with tundish, and a bench without its peers fails.

The peers that come from the package index are not needed here; the files of benches/peers are loaded as they lie.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tundish as td

PEERS = Path(__file__).resolve().parents[1] / "benches" / "peers"
MODULES = {
    "measure": "measure",
    "report": "report",
    "distributions": "packing.distributions",
    "numpy_forms": "packing.numpy_forms",
    "processes": "checkpoint.processes",
    "state": "checkpoint.state",
    "contestants": "shm.contestants",
    "pools": "shm.processes",
    "rtensor_actors": "rtensor.actors",
    "rtensor_tensors": "rtensor.tensors",
    "scatter_batches": "scatter.batches",
    "scatter_cases": "scatter.cases",
    "scatter_network": "scatter.network",
    "scatter_nodes": "scatter.nodes_case",
    "scatter_overlap": "scatter.overlap_case",
    "scatter_tree": "scatter.tree_case",
    "timing": "shm.timing",
    "two_queues": "shm.contestants.two_queues",
    "two_queue_pool": "shm.two_queue_pool",
}
ROOMS = ("checkpoint", "measure", "packing", "report", "rtensor", "scatter", "shm")


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The bench's modules that need no peer; their plain names leave sys.modules again."""
    sys.path.insert(0, str(PEERS))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(path) for name, path in MODULES.items()})
    finally:
        sys.path.remove(str(PEERS))
        for name in [name for name in sys.modules if name.partition(".")[0] in ROOMS]:
            del sys.modules[name]


def token_by_token(lengths: list[int], order: list[int], max_length: int) -> dict[str, list[int]]:
    """The hard plan from one list entry a token."""
    tokens = [(place, offset) for place, sample in enumerate(order) for offset in range(lengths[sample])]
    plan: dict[str, list[int]] = {
        name: []
        for name in ("dataset_id", "indices", "indices_cu_len", "start_offset", "end_offset", "longest")
    }
    for begin in range(0, len(tokens) - max_length + 1, max_length):
        pack = tokens[begin : begin + max_length]
        places = range(pack[0][0], pack[-1][0] + 1)
        plan["dataset_id"].append(0)
        plan["indices"] += [order[place] for place in places]
        plan["indices_cu_len"].append(len(plan["indices"]))
        plan["start_offset"].append(pack[0][1])
        plan["end_offset"].append(pack[-1][1] + 1)
        plan["longest"].append(max(sum(place == own for own, _ in pack) for place in places))
    return plan


@pytest.mark.parametrize("max_length", [1, 2, 7, 64])
@pytest.mark.parametrize("longest", [1, 3, 50])
def test_forms_agree_with_each_other_and_with_pack(
    bench: SimpleNamespace, max_length: int, longest: int
) -> None:
    generator = np.random.default_rng(max_length * 1000 + longest)
    for samples in (1, 2, 40):
        lengths = generator.integers(0, longest + 1, samples).astype(np.int32)
        order = generator.permutation(samples)
        expected = token_by_token(lengths.tolist(), order.tolist(), max_length)
        for form in (bench.numpy_forms.chunked, bench.numpy_forms.vectorised):
            arrays = form(lengths, order, max_length)
            assert {field: arrays[field].tolist() for field in bench.numpy_forms.FIELDS} == expected
            assert {array.dtype for array in arrays.values()} == {np.dtype(np.int64)}
        arrays = td.pack(lengths, max_length, order=order).arrays()
        assert {field: arrays[field].tolist() for field in bench.numpy_forms.FIELDS} == expected


def test_forms_agree_over_several_chunks(bench: SimpleNamespace) -> None:
    samples = 3 * bench.numpy_forms.PACKS_IN_A_CHUNK
    lengths = bench.distributions.draw_lengths(samples, bench.distributions.TEXT)
    order = bench.distributions.draw_order(samples)
    expected = bench.numpy_forms.chunked(lengths, order, 900)
    assert expected["dataset_id"].size > 2 * bench.numpy_forms.PACKS_IN_A_CHUNK
    for arrays in (
        bench.numpy_forms.vectorised(lengths, order, 900),
        td.pack(lengths, 900, order=order).arrays(),
    ):
        for field in bench.numpy_forms.FIELDS:
            np.testing.assert_array_equal(arrays[field], expected[field])


def test_look_up_agrees_on_published_arrays(bench: SimpleNamespace, tmp_path: Path) -> None:
    lengths = bench.distributions.draw_lengths(500, bench.distributions.CHAT)
    order = bench.distributions.draw_order(500)
    plan = td.pack(lengths, 1000, order=order)
    bench.numpy_forms.publish(plan.arrays(), tmp_path / "plan")
    pack_ids = np.array([len(plan) - 1, 0, 3, 3])
    found = bench.numpy_forms.look_up(bench.numpy_forms.map_again(tmp_path / "plan"), pack_ids)
    batch = plan.lookup(pack_ids)
    assert [dataset for dataset, _, _, _ in found] == batch.dataset_id.tolist()
    assert np.cumsum([0, *(len(samples) for _, samples, _, _ in found)]).tolist() == batch.piece_cu.tolist()
    for column, name in ((1, "sample"), (2, "start")):
        assert [value for pack in found for value in pack[column]] == getattr(batch, name).tolist()
    for pack, (_, samples, starts, stops) in zip(pack_ids.tolist(), found, strict=True):
        whole = [lengths[sample] if stop == -1 else stop for sample, stop in zip(samples, stops, strict=True)]
        assert sum(whole) - sum(starts) == 1000
        assert len(plan[pack].pieces) == len(samples)


def test_lengths_on_disk_are_those_in_memory(bench: SimpleNamespace, tmp_path: Path) -> None:
    bench.distributions.write_lengths(tmp_path / "lengths.npy", 1000, bench.distributions.CHAT)
    written = np.load(tmp_path / "lengths.npy")
    np.testing.assert_array_equal(written, bench.distributions.draw_lengths(1000, bench.distributions.CHAT))
    assert written.min() >= 1 and written.max() <= 32768


def test_a_contestant_whose_result_changes_is_refused(bench: SimpleNamespace) -> None:
    results = iter([1, 2])
    contestant = bench.measure.Contestant(lambda: next(results), int)
    with pytest.raises(bench.measure.OutputsDiffer, match="wandering"):
        bench.measure.race({"wandering": contestant}, 2)


@pytest.mark.parametrize("to_files", [False, True])
def test_a_child_reports_time_and_peak(bench: SimpleNamespace, tmp_path: Path, to_files: bool) -> None:
    np.save(tmp_path / "lengths.npy", np.full(200_000, 100, dtype=np.int32))
    reply = bench.measure.run_child(
        {
            "lengths": str(tmp_path / "lengths.npy"),
            "order": None,
            "seed": 0,
            "max_length": 4096,
            "threads": 1,
            "out": str(tmp_path / "plan") if to_files else None,
            "rounds": 2,
        }
    )
    assert reply["packs"] == 200_000 * 100 // 4096
    assert reply["seconds"] > 0
    assert reply["peak"] < 64 * 2**20
    assert not (tmp_path / "plan").exists()


def test_results_outside_the_markers_of_a_part_stay(bench: SimpleNamespace, tmp_path: Path) -> None:
    results = tmp_path / "RESULTS.md"
    results.write_text("above\n")
    bench.report.write(results, "packing", "first\n")
    bench.report.write(results, "checkpoint", "other\n")
    results.write_text(results.read_text() + "below\n")
    bench.report.write(results, "packing", "second\n")
    (begin, end), (others_begin, others_end) = map(bench.report.markers, ("packing", "checkpoint"))
    assert results.read_text() == (
        f"above\n\n{begin}\nsecond\n{end}\n\n{others_begin}\nother\n{others_end}\nbelow\n"
    )


def test_the_results_have_no_part_twice_or_in_half(bench: SimpleNamespace) -> None:
    # A part is there from its first full run on.
    results = (PEERS.parent / "RESULTS.md").read_text()
    for part in ("packing", "checkpoint", "shm", "scatter"):
        begin, end = map(results.count, bench.report.markers(part))
        assert begin == end <= 1


# Each kind of them; the others begin as one of these does, and a bench that cannot run one says so.
WAYS = [
    ("writes", 2, True),
    ("hf", 1, False),
    ("hf lazy", 1, False),
    ("safetensors", 1, False),
    ("torch thread", 1, False),
    ("hf", 2, False),
    ("dcp", 2, True),
]


@pytest.mark.parametrize(("way", "world", "sharded"), WAYS)
def test_a_way_of_saving_is_timed_and_compared(
    bench: SimpleNamespace, tmp_path: Path, way: str, world: int, sharded: bool
) -> None:
    reply = bench.processes.run_ranks(saving(tmp_path, way, world, sharded), threads=1)
    assert reply["differing"] == []
    assert len(reply["stall"]) == len(reply["durable"]) == 2
    for stall, durable in zip(reply["stall"], reply["durable"], strict=True):
        assert 0 < stall <= durable
    assert reply["memory"] < 64 * 2**20
    # Of what was saved nothing is left.
    assert not list((tmp_path / "saves").rglob("*.safetensors"))


def test_time_lost_beside_training_is_measured(bench: SimpleNamespace, tmp_path: Path) -> None:
    loops = ["matrix products", "400 tiny operations"]
    reply = bench.processes.run_ranks(saving(tmp_path, "hf", 1, False) | {"loops": loops}, threads=1)
    for loop in loops:
        assert len(reply["lost"][loop]) == 2
        for lost in reply["lost"][loop]:
            assert lost["base"] > 0
            # What a save of a few kilobytes costs is less than a few steps.
            assert abs(lost["lost"]) < 5
            assert lost["worst"] > 0


def test_a_rank_that_fails_is_told_of(bench: SimpleNamespace, tmp_path: Path) -> None:
    # Where the way wants to make a folder is a file.
    request = saving(tmp_path, "safetensors", 1, False)
    (tmp_path / "saves").write_text("")
    with pytest.raises(RuntimeError, match=r"(?s)safetensors: it ended with 1.*FileExistsError"):
        bench.processes.run_ranks(request, threads=1)


def test_a_save_that_is_no_copy_is_found_out(bench: SimpleNamespace) -> None:
    state = bench.state.make_state(bench.state.WORKLOADS["tiny"])
    assert bench.state.differing(state, bench.state.make_state(bench.state.WORKLOADS["tiny"])) == []
    saved = {name: tensor.clone() for name, tensor in state.items()}
    changes = bench.state.Changes(state)
    changes.toggle()
    assert bench.state.differing(saved, state) == sorted(state)
    changes.toggle()
    assert bench.state.differing(saved, state) == []
    del saved["layers.1.weight"]
    assert bench.state.differing(saved, state) == ["layers.1.weight"]


def saving(folder: Path, way: str, world: int, sharded: bool) -> dict[str, Any]:
    return {
        "way": way,
        "workload": "tiny",
        "world": world,
        "sharded": sharded,
        "root": str(folder / "saves"),
        "rounds": 2,
        "compare": True,
        "loops": [],
    }


@pytest.mark.parametrize("way", ["ours", "queues", "executor shared", "torch"])
def test_a_pool_is_timed_weighed_and_checked(bench: SimpleNamespace, way: str) -> None:
    reply = bench.pools.run_pool(pooling(way, "fork", ["tasks", "results", "binding", "readers"]))
    for measure, names in {
        "tasks": ("each", "chunked", "one"),
        "results": ("large", "small"),
        "binding": ("constructor", "first", "small first"),
    }.items():
        for name in names:
            assert reply[measure][name] and all(0 < seconds < 10 for seconds in reply[measure][name])
    assert reply["binding"]["constructor"] <= reply["binding"]["first"]
    # Two processes with numpy, and an array once or not at all.
    assert 2**20 < reply["readers"]["held"][0] < 2**30


def test_the_floors_of_pools_are_taken(bench: SimpleNamespace) -> None:
    reply = bench.pools.run_pool(pooling("floors", "", ["floors", "bare workers"]))
    assert all(0 < seconds < 1 for name in reply["floors"] for seconds in reply["floors"][name])
    # What numpy takes in two processes.
    assert 2 * 4 * 2**20 < reply["bare workers"]["held"][0] < 2 * 64 * 2**20


def test_a_pool_whose_results_are_anothers_is_found_out(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    class Backwards(bench.two_queues.TwoQueues):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            opened.append(self)

        def each(self, items: Any) -> Any:
            return reversed(list(super().each(items)))

        chunked = each

    monkeypatch.setitem(bench.contestants.WAYS, "queues", SimpleNamespace(load=lambda: Backwards))
    array = np.arange(4 << 20, dtype=np.int64)
    try:
        with pytest.raises(bench.measure.OutputsDiffer, match="out of order"):
            bench.timing.empty_tasks(pooling("queues", "spawn", []), array)
        with pytest.raises(bench.measure.OutputsDiffer, match="task 0"):
            bench.timing.results(pooling("queues", "spawn", []), array)
    finally:
        for pool in opened:
            pool.close()


def test_the_two_queue_pool_brings_errors_and_removes_its_blocks(bench: SimpleNamespace) -> None:
    array = np.arange(1000)
    pool = bench.two_queue_pool.TwoQueuePool(
        np.take, {"indices": array}, 2, multiprocessing.get_context("spawn")
    )
    [block] = [Path("/dev/shm", block.name) for block in pool._blocks]
    assert block.exists()
    given = np.arange(2000) * 3
    np.testing.assert_array_equal(pool.submit(given).result(60), given[:1000])
    with pytest.raises(IndexError):
        pool.submit(given[:10]).result(60)
    pool.shutdown()
    assert not block.exists()


def test_ranks_share_an_array_and_are_weighed(bench: SimpleNamespace) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-") as folder:
        request = {"array_bytes": 32 << 20, "forms": ["file", "ours"], "folder": folder}
        replies = bench.pools.run_ranks(request, ranks=2)
        assert not list(Path(folder).iterdir())
    assert replies[0]["copy"] > 0
    for form in ("file", "ours"):
        assert all(0 < reply[form]["seconds"] < 30 for reply in replies)
        # Once, and not once a rank.
        assert 31 * 2**20 < sum(reply[form]["held"] for reply in replies) < 2 * 32 * 2**20


def test_a_pool_that_fails_is_told_of(bench: SimpleNamespace) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)child.py ended with 1.*KeyError: 'nobody'"):
        bench.pools.run_pool(pooling("nobody", "fork", ["tasks"]))


def pooling(way: str, method: str, measures: list[str]) -> dict[str, Any]:
    return {
        "measures": measures,
        "way": way,
        "method": method,
        "array_bytes": 32 << 20,
        "workers": 2,
        "repeats": 1,
        "seconds": 0.02,
        "results": {"large": 2, "small": 4},
    }


@pytest.mark.parametrize(
    ("missing", "measure"),
    [
        ("megatron", "shuffle"),
        ("orbax", "large"),
        ("joblib", "tasks"),
        ("tensordict", "peers"),
    ],
)
def test_a_missing_peer_fails_the_bench(missing: str, measure: str) -> None:
    without = (
        f"import runpy, sys; sys.modules[{missing!r}] = None; "
        f"sys.argv = ['run.py', '--quick', '--only', {measure!r}]; "
        f"sys.path.insert(0, {str(PEERS)!r}); runpy.run_path({str(PEERS / 'run.py')!r}, run_name='__main__')"
    )
    ran = subprocess.run(
        [sys.executable, "-c", without], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 1
    assert "a peer is missing" in ran.stderr


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("local", ["seed", "objects"]),
        ("gloo", ["seed", "objects"]),
        ("peers", ["accelerate", "accelerate split"]),
        ("worlds", ["seed"]),
    ],
)
def test_ways_to_scatter_are_timed_and_agree(bench: SimpleNamespace, name: str, others: list[str]) -> None:
    kinds = ["text", "nested"] if name in ("local", "gloo") else ["text"]
    plan = bench.scatter_cases.Plan(
        worlds=(2,), rounds=dict.fromkeys(kinds, 1), judges=False, others=tuple(others)
    )
    [section] = bench.scatter_cases.measure(name, plan)
    cases = [row.case for row in section.rows if "itself" not in row.case]
    limits = ["", ": the limit"] if name in ("local", "gloo") else [""]
    assert sorted(set(cases)) == sorted(f"{kind}, 2 ranks{limit}" for kind in kinds for limit in limits)
    assert [case for case in cases if "limit" not in case] == [
        f"{kind}, 2 ranks" for kind in kinds for _ in others
    ]
    assert {row.met for row in section.rows} == {None}


def test_the_kinds_of_batches_are_as_large_as_they_say(bench: SimpleNamespace) -> None:
    sizes = {name: bench.scatter_batches.size(make(1)) for name, make in bench.scatter_batches.KINDS.items()}
    counts = {
        name: len(list(bench.scatter_batches.tensors_of(make(1))))
        for name, make in bench.scatter_batches.KINDS.items()
    }
    assert sizes["text"] == 4 * 8 * 4096 * 8
    assert sizes["VLM"] == 106_000_000 + 40 * 8 * 8 and counts["VLM"] == 41
    assert sizes["many"] == sizes["deep"] == 500 * 1024 and counts["many"] == counts["deep"] == 500
    assert counts["nested"] == 194


def test_trees_are_timed_and_agree(bench: SimpleNamespace) -> None:
    plan = bench.scatter_cases.Plan(rounds={"deep": 1, "nested": 1}, repeats=1, judges=False)
    section = bench.scatter_tree.tree(plan)
    assert [row.case.partition(",")[0] for row in section.rows] == ["deep", "deep", "nested", "nested"]


def test_waits_beside_a_step_are_measured(bench: SimpleNamespace) -> None:
    plan = bench.scatter_cases.Plan(worlds=(2,), rounds={"nested": 1}, repeats=3, judges=False)
    waits, products = bench.scatter_overlap.overlap(plan).rows
    assert waits.figure.endswith("% of the step")
    assert 0.5 < float(products.figure.removesuffix("×")) < 50


def test_two_nodes_are_joined_by_a_slow_link_or_left_out(
    bench: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = bench.scatter_cases.Plan(worlds=(2,), rounds={"text": 1}, repeats=1, judges=False)
    section = bench.scatter_nodes.nodes(plan)
    said = capsys.readouterr().err
    if "left out" in said:
        assert not section.rows
        assert section.note.removeprefix("Left out: ").removesuffix(".") in said
        assert section.title in bench.report.render("scatter", [section], [("a", "b")], "")
        return
    names = ["the seed's method", "scatter_object_list", "the link's limit"]
    assert [row.peer for row in section.rows] == names
    # What is faster than the link does not go over it.
    assert 0 < float(section.rows[-1].figure.removesuffix("%")) <= 100
    assert not nodes_left()


def nodes_left() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if f"tundish-bench-{os.getpid()}-" in line]


def test_nodes_are_named_and_joined_by_commands_of_their_own(bench: SimpleNamespace) -> None:
    commands = bench.scatter_network.setting_up("first", "second")
    # Each of them says in which namespace it is meant: nothing is done to the machine's own.
    assert all({"first", "second"} & set(command) for command in commands)
    shaped = [command for command in commands if command[0] == "tc"]
    assert [command[2] for command in shaped] == ["first", "second"]
    assert all(command[command.index("rate") + 1] == "1gbit" for command in shaped)
    environments = bench.scatter_network.environments_of(2)
    assert [one["RANK"] for one in environments] == ["0", "1", "2", "3"]
    assert [one["LOCAL_RANK"] for one in environments] == ["0", "1", "0", "1"]
    assert [one["GROUP_RANK"] for one in environments] == ["0", "0", "1", "1"]
    assert {one["WORLD_SIZE"] for one in environments} == {"4"}


def test_nodes_that_cannot_be_made_are_told_of_and_leave_nothing(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(bench.scatter_network.NoNodes, match="root"), bench.scatter_network.two_nodes():
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(bench.scatter_network.NoNodes, match="iproute2"), bench.scatter_network.two_nodes():
        pass


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


def test_a_fetch_is_timed_compared_and_weighed(bench: SimpleNamespace) -> None:
    with bench.rtensor_actors.pair("ours", ["64 KB", "4 MB"]) as (owner, consumer):
        consumer.ask("fetch", "64 KB")
        with bench.rtensor_actors.peaks_of([owner, consumer]) as peaks:
            seconds, digest = consumer.ask("fetch", "4 MB")
        assert 0 < seconds < 60
        assert digest == bench.rtensor_tensors.digest(bench.rtensor_tensors.make("4 MB"))
        # The consumer has it now, and the owner no more of it than before.
        assert 0 <= peaks[0] < 2**20 < 0.9 * 2**22 < peaks[1] < 2 * 2**22
        assert len(consumer.ask("beside", "4 MB", "64 KB", 5, 60.0)) == 5
        with pytest.raises(RuntimeError, match=r"(?s)no answer to fetch.*KeyError"):
            consumer.ask("fetch", "256 MB")


@pytest.mark.parametrize("way", ["sockets", "reading"])
def test_what_no_way_can_do_without_is_of_the_same_tensors(bench: SimpleNamespace, way: str) -> None:
    with bench.rtensor_actors.pair(way, ["64 KB", "256 × 64 KB"]) as (_, consumer):
        for case in ("64 KB", "256 × 64 KB"):
            for _ in range(2):
                _, digest = consumer.ask("fetch", case)
                assert digest == bench.rtensor_tensors.digest(bench.rtensor_tensors.make(case))
