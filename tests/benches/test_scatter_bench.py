"""Scatter methods are timed and compared, on one node and on two."""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.usefixtures("warm_programs")


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("local", ["isend", "objects"]),
        ("gloo", ["isend", "objects"]),
        ("peers", ["accelerate", "accelerate split"]),
    ],
)
def test_methods_are_timed_and_agree(bench: SimpleNamespace, name: str, others: list[str]) -> None:
    kinds = ["text", "nested"] if name in ("local", "gloo") else ["text"]
    plan = bench.scatter_cases.Plan(worlds=(2,), rounds=dict.fromkeys(kinds, 1), others=tuple(others))
    [section] = bench.scatter_cases.measure(name, plan)
    cases = [row.case for row in section.rows if "itself" not in row.case]
    assert cases == [f"{kind}, 2 ranks" for kind in kinds for _ in others]
    # Of several times the least is taken.
    assert all(row.spread.endswith("%") for row in section.rows)


def test_the_kinds_of_batches_are_as_large_as_they_say(bench: SimpleNamespace) -> None:
    sizes = {name: bench.scatter_batches.size(make(1)) for name, make in bench.scatter_batches.KINDS.items()}
    counts = {
        name: len(list(bench.scatter_batches.tensors_of(make(1))))
        for name, make in bench.scatter_batches.KINDS.items()
    }
    assert sizes["text"] == 4 * 8 * 4096 * 8
    assert sizes["VLM"] == 106_000_000 + 40 * 8 * 8 and counts["VLM"] == 41
    assert sizes["many"] == 500 * 1024 and counts["many"] == 500
    assert counts["nested"] == 194


def test_waits_beside_a_step_are_measured(bench: SimpleNamespace) -> None:
    plan = bench.scatter_cases.Plan(worlds=(2,), rounds={"nested": 1}, repeats=3)
    waits, products = bench.scatter_overlap.overlap(plan).rows
    assert waits.figure.endswith("% of the step")
    assert 0.5 < float(products.figure.removesuffix("×")) < 50


def test_two_nodes_are_joined_by_a_slow_link_or_left_out(
    bench: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = bench.scatter_cases.Plan(worlds=(2,), rounds={"text": 1}, repeats=1)
    section = bench.scatter_nodes.nodes(plan)
    said = capsys.readouterr().err
    if "left out" in said:
        assert not section.rows
        assert section.note.removeprefix("Left out: ").removesuffix(".") in said
        assert section.title in bench.report.render("scatter", [section], [("a", "b")], "")
        return
    names = ["one isend per tensor", "scatter_object_list", "the link's limit"]
    assert [row.peer for row in section.rows] == names
    # A transfer that is faster than the link does not use it.
    assert 0 < float(section.rows[-1].figure.removesuffix("%")) <= 100
    assert not nodes_left()


def nodes_left() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if f"tundish-bench-{os.getpid()}-" in line]


def test_nodes_are_named_and_joined_by_commands_of_their_own(bench: SimpleNamespace) -> None:
    commands = bench.scatter_namespaces.setup_commands("first", "second")
    # Each of them says in which namespace it is meant: nothing is done to the machine's own.
    assert all({"first", "second"} & set(command) for command in commands)
    shaped = [command for command in commands if command[0] == "tc"]
    assert [command[2] for command in shaped] == ["first", "second"]
    assert all(command[command.index("rate") + 1] == "1gbit" for command in shaped)
    environments = bench.scatter_namespaces.two_node_environments(2)
    assert [one["RANK"] for one in environments] == ["0", "1", "2", "3"]
    assert [one["LOCAL_RANK"] for one in environments] == ["0", "1", "0", "1"]
    assert [one["GROUP_RANK"] for one in environments] == ["0", "0", "1", "1"]
    assert {one["WORLD_SIZE"] for one in environments} == {"4"}


def test_nodes_that_cannot_be_made_are_told_of_and_leave_nothing(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with (
        pytest.raises(bench.scatter_namespaces.NamespacesUnavailable, match="root"),
        bench.scatter_namespaces.two_nodes(),
    ):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    with (
        pytest.raises(bench.scatter_namespaces.NamespacesUnavailable, match="iproute2"),
        bench.scatter_namespaces.two_nodes(),
    ):
        pass
