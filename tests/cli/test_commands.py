"""The command `tundish`, run as a user runs it: what it prints where, and with which exit code it ends."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from support.command_line import tundish

import tundish as td
from tundish import cli


def answer(*words: object, code: int = 0, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The output of `--json`, in this process: quicker than a process of its own."""
    assert cli.main([*map(str, words), "--json"]) == code
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    parsed = json.loads(out)
    assert isinstance(parsed, dict)
    return parsed


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.npy"
    np.save(path, np.random.default_rng(0).integers(1, 900, 2000, dtype=np.int32))
    return path


@pytest.fixture
def plan(lengths: Path, tmp_path: Path) -> Path:
    td.pack(np.load(lengths), 512, seed=7, out=tmp_path / "plan")
    return tmp_path / "plan"


def test_pack_show_and_verify(lengths: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan"
    packed = tundish("pack", lengths, "--max-length", 512, "--seed", 7, "--out", out)
    assert (packed.returncode, packed.stderr) == (0, "")
    expected = td.pack(np.load(lengths), 512, seed=7)
    made = td.PackPlan.load(out)
    assert made.fingerprint == expected.fingerprint
    for name, column in expected.arrays().items():
        np.testing.assert_array_equal(made.arrays()[name], column)

    again = tundish("pack", lengths, "--max-length", 512, "--seed", 7, "--out", out)
    assert (again.returncode, again.stderr) == (0, "")
    assert packed.stdout.startswith("packed ") and again.stdout.startswith(
        "found the plan there already, of "
    )

    shown = tundish("plan", "show", out)
    assert (shown.returncode, shown.stderr) == (0, "")
    for name, value in [
        ("packs", f"{len(expected):,}"),
        ("pieces", f"{len(expected.indices):,}"),
        ("samples cut", f"{expected.stats()['samples_cut']:,}"),
        ("padding align", "0"),
        ("tokens dropped", f"{expected.stats()['tokens_dropped']:,}"),
        ("fingerprint", expected.fingerprint),
        ("seed", "7"),
    ]:
        assert re.search(rf"^{name} +{re.escape(value)}(  |$)", shown.stdout, re.MULTILINE), (
            name,
            shown.stdout,
        )
    assert re.search(
        r"^samples cut .*  in more than one pack, or without their end$", shown.stdout, re.MULTILINE
    )

    verified = tundish("plan", "verify", out, lengths)
    assert (verified.returncode, verified.stderr) == (0, "")
    assert expected.fingerprint in verified.stdout


def test_json_prints_one_object_with_the_same_values(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan"
    packed = answer("pack", lengths, "--max-length", 512, "--keep-last", "--out", out, capsys=capsys)
    expected = td.pack(np.load(lengths), 512, drop_last=False)
    for name, value in expected.stats().items():
        assert packed[name] == value
    assert packed["fingerprint"] == expected.fingerprint
    assert packed["drop_last"] is False
    assert packed["bytes"] == sum(column.nbytes for column in expected._columns)
    shown = answer("plan", "show", out, capsys=capsys)
    assert {**shown, "seconds": packed["seconds"]} == packed
    assert answer("plan", "verify", out, lengths, capsys=capsys)["verified"] is True


def test_order_threads_and_several_datasets(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    array = np.load(lengths)
    order = np.random.default_rng(1).permutation(2000)[:1500]
    np.save(tmp_path / "order.npy", order)
    ordered = answer(
        *("pack", lengths, "--max-length", 512, "--order", tmp_path / "order.npy", "--threads", 2),
        *("--mode", "hard", "--out", tmp_path / "ordered"),
        capsys=capsys,
    )
    assert ordered["fingerprint"] == td.pack(array, 512, order=order).fingerprint
    assert (ordered["order"], ordered["seed"]) == ("given", None)
    verify = ("plan", "verify", tmp_path / "ordered", lengths)
    assert answer(*verify, "--order", tmp_path / "order.npy", capsys=capsys)["verified"] is True
    assert "order" in answer(*verify, code=2, capsys=capsys)["error"]["message"]
    np.save(tmp_path / "order.npy", order[::-1])
    answer(*verify, "--order", tmp_path / "order.npy", code=1, capsys=capsys)

    both = [lengths, tmp_path / "second.npy"]
    np.save(both[1], array[::-1])
    for options in ([], ["--global-pack"]):
        out = tmp_path / f"both{len(options)}"
        found = answer("pack", *both, "--max-length", 512, "--seed", 3, *options, "--out", out, capsys=capsys)
        expected = td.pack_datasets([array, array[::-1]], 512, seed=3, global_pack=bool(options))
        assert found["fingerprint"] == expected.fingerprint
        assert found["datasets"] == 2
        answer("plan", "verify", out, *both, capsys=capsys)
        answer("plan", "verify", out, *reversed(both), code=1, capsys=capsys)


def test_sources_of_other_kinds_and_their_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ids = [[0] * length for length in (5, 0, 3, 9, 2, 700)]
    for number in range(2):
        table = pa.table({"ids": ids[number * 3 :][:3], "id": [7, 8, 9], "length": [1, 1, 1]})
        pyarrow.parquet.write_table(table, f"part-{number}.parquet")
    expected = td.pack([len(one) for one in ids], 16, drop_last=False)
    options = ("--max-length", 16, "--keep-last", "--column", "ids", "--out")
    packed = answer("pack", "part-*.parquet", *options, "plan", capsys=capsys)
    assert packed["fingerprint"] == expected.fingerprint
    assert (
        answer("plan", "verify", "plan", "part-*.parquet", "--column", "ids", capsys=capsys)["verified"]
        is True
    )
    answer("plan", "verify", "plan", "part-*.parquet", code=1, capsys=capsys)
    shown = ("plan", "show", "plan", "--plot", "fill.png", "--lengths", "part-*.parquet", "--column", "ids")
    assert answer(*shown, capsys=capsys)["plot"] == "fill.png"

    both = answer("pack", "part-0.parquet", "part-1.parquet", *options, "both", capsys=capsys)
    assert both["datasets"] == 2
    assert (
        answer("pack", "part-0.parquet", *options[:-2], "id", "--out", "new", capsys=capsys)["tokens"] == 24
    )
    error = answer(
        "pack", "part-0.parquet", *options[:-2], "tokens", "--out", "other", code=2, capsys=capsys
    )["error"]
    assert (
        "part-0.parquet has no column 'tokens': its columns are 'ids', 'id' and 'length'" in error["message"]
    )
    error = answer("pack", "none-*.parquet", *options, "other", code=3, capsys=capsys)["error"]
    assert "none-*.parquet" in error["message"] and "no file matches" in error["message"]


def test_plot_writes_a_picture(
    plan: Path, lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([], ["--lengths", lengths]):
        picture = tmp_path / f"fill{len(words)}.png"
        facts = answer("plan", "show", plan, "--plot", picture, *words, capsys=capsys)
        assert facts["plot"] == str(picture)
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_plan_that_fails_verification_exits_with_1(plan: Path, lengths: Path, tmp_path: Path) -> None:
    others = np.load(lengths)
    others[[5, 6]] += [1, -1]
    np.save(tmp_path / "others.npy", others)
    run = tundish("plan", "verify", plan, tmp_path / "others.npy")
    assert run.returncode == 1
    assert_one_clear_line(run, "")

    run = tundish("plan", "verify", plan, lengths, lengths)
    assert run.returncode == 1
    assert_one_clear_line(run, "1 dataset")

    with (plan / "indices.npy").open("r+b") as file:
        file.truncate(1000)
    run = tundish("plan", "show", plan)
    assert run.returncode == 1
    assert_one_clear_line(run, "indices.npy")


def assert_one_clear_line(run: subprocess.CompletedProcess[str], mentions: str) -> None:
    assert run.stdout == ""
    assert run.stderr.startswith("tundish: ")
    assert run.stderr.count("\n") == 1
    assert mentions in run.stderr
    assert "Error(" not in run.stderr


BAD = {
    "no command": ([], "COMMAND", 2),
    "no max length": (["pack", "good.npy", "--out", "new"], "--max-length", 2),
    "max length of no number": (["pack", "good.npy", "--max-length", "many", "--out", "new"], "many", 2),
    "max length of zero": (["pack", "good.npy", "--max-length", "0", "--out", "new"], "max_length is 0", 2),
    "seed too large": (
        ["pack", "good.npy", "--max-length", "8", "--seed", "4294967296", "--out", "new"],
        "4294967296",
        2,
    ),
    "negative seed": (["pack", "good.npy", "--max-length", "8", "--seed", "-1", "--out", "new"], "-1", 2),
    "no threads": (["pack", "good.npy", "--max-length", "8", "--threads", "0", "--out", "new"], "threads", 2),
    "seed and order": (
        ["pack", "good.npy", "--max-length", "8", "--seed", "0", "--order", "good.npy", "--out", "new"],
        "--order",
        2,
    ),
    "an order for two": (
        ["pack", "good.npy", "good.npy", "--max-length", "8", "--order", "good.npy", "--out", "new"],
        "one dataset",
        2,
    ),
    "a tail of whole samples": (
        ["pack", "good.npy", "--max-length", "9", "--mode", "best_fit", "--keep-last", "--out", "new"],
        "leave out --keep-last",
        2,
    ),
    "a window of one mode": (
        ["pack", "good.npy", "--max-length", "9", "--mode", "best_fit", "--window", "8", "--out", "new"],
        "takes no window",
        2,
    ),
    "an align of hard packing": (
        ["pack", "good.npy", "--max-length", "9", "--align", "3", "--out", "new"],
        "takes no align",
        2,
    ),
    "a max length that is not aligned": (
        ["pack", "good.npy", "--max-length", "9", "--mode", "best_fit", "--align", "2", "--out", "new"],
        "choose 8 or 10",
        2,
    ),
    "an unknown mode": (
        ["pack", "good.npy", "--max-length", "9", "--mode", "best-fit", "--out", "new"],
        "best_fit",
        2,
    ),
    "overlong samples": (
        ["pack", "good.npy", "--max-length", "8", "--mode", "best_fit", "--out", "new"],
        "sample 2",
        2,
    ),
    "bad order": (
        ["pack", "good.npy", "--max-length", "8", "--order", "good.npy", "--out", "new"],
        "order",
        2,
    ),
    "negative length": (["pack", "negative.npy", "--max-length", "8", "--out", "new"], "sample 1", 2),
    "floats": (
        ["pack", "floats.npy", "--max-length", "8", "--out", "new"],
        "floats.npy has the dtype float64",
        2,
    ),
    "two dimensions": (
        ["pack", "square.npy", "--max-length", "8", "--out", "new"],
        "square.npy has the shape",
        2,
    ),
    "objects": (["pack", "objects.npy", "--max-length", "8", "--out", "new"], "objects.npy", 2),
    "half a dtype": (
        ["pack", "half.npy", "--max-length", "8", "--out", "new"],
        "half.npy: cannot be read as a file of numpy",
        2,
    ),
    "not a .npy file": (["pack", "text.npy", "--max-length", "8", "--out", "new"], "text.npy", 2),
    "truncated": (["pack", "short.npy", "--max-length", "8", "--out", "new"], "short.npy", 2),
    "copied as text to Windows": (
        ["pack", "text-mode.npy", "--max-length", "8", "--out", "new"],
        "1 byte more",
        2,
    ),
    "a header nested too deeply": (
        ["pack", "nested4000.npy", "--max-length", "8", "--out", "new"],
        "nested4000.npy: cannot be read as a file of numpy",
        2,
    ),
    "a header nested deeper": (
        ["pack", "nested9000.npy", "--max-length", "8", "--out", "new"],
        "nested9000.npy: cannot be read as a file of numpy",
        2,
    ),
    "no such lengths": (["pack", "none.npy", "--max-length", "8", "--out", "new"], "none.npy", 3),
    "lengths that are a folder": (["pack", ".", "--max-length", "8", "--out", "new"], ".: is a folder", 2),
    "lengths from a pipe": (
        ["pack", "pipe", "--max-length", "8", "--out", "new"],
        "pipe: is a FIFO; give a file with samples, as a regular file",
        2,
    ),
    "an order from a pipe": (
        ["pack", "good.npy", "--max-length", "8", "--order", "pipe", "--out", "new"],
        "pipe: is a FIFO",
        2,
    ),
    "lengths of a device": (["pack", "/dev/zero", "--max-length", "8", "--out", "new"], "is a device", 2),
    "lengths from a socket": (["pack", "socket", "--max-length", "8", "--out", "new"], "is a socket", 2),
    "lengths to verify from a pipe": (["plan", "verify", "plan", "pipe"], "pipe: is a FIFO", 2),
    "lengths to show from a pipe": (["plan", "show", "plan", "--lengths", "pipe"], "pipe: is a FIFO", 2),
    "a plan that is a pipe": (["plan", "show", "pipe"], "pipe: is not a plan folder", 3),
    "checkpoints in a pipe": (["checkpoint", "list", "pipe"], "pipe", 2),
    "a checkpoint in a pipe": (["checkpoint", "verify", "pipe"], "pipe", 2),
    "no such parent": (["pack", "good.npy", "--max-length", "8", "--out", "no/new"], "no", 3),
    "a place that is taken": (["pack", "good.npy", "--max-length", "8", "--out", "taken"], "taken", 3),
    "no such plan": (["plan", "show", "none"], "none", 3),
    "a plan that is none": (["plan", "show", "taken"], "taken", 3),
    "a kind of picture": (["plan", "show", "plan", "--plot", "fill.gif"], "fill.gif", 2),
    "no place for a picture": (["plan", "show", "plan", "--plot", "no/fill.png"], "no", 3),
    "a picture in a folder's place": (["plan", "show", "plan", "--plot", "folder.png"], "folder.png", 3),
    "a file as parent": (["pack", "good.npy", "--max-length", "8", "--out", "text.npy/new"], "text.npy", 3),
    "empty lengths": (["pack", "", "--max-length", "8", "--out", "new"], "the path is empty", 2),
    "an empty order": (
        ["pack", "good.npy", "--max-length", "8", "--order", "", "--out", "new"],
        "the path is empty",
        2,
    ),
    "an empty folder": (["pack", "good.npy", "--max-length", "8", "--out", ""], "the path is empty", 2),
    "an empty plan": (["plan", "show", ""], "the path is empty", 2),
    "an empty picture": (["plan", "show", "plan", "--plot", ""], "the path is empty", 2),
    "an empty token file": (["rtensor", "stats", "here:1", "--token-file", ""], "the path is empty", 2),
    "a line break in a folder": (
        ["pack", "good.npy", "--max-length", "8", "--out", "a\nb"],
        "a line break",
        2,
    ),
    "a line break at the end": (["plan", "show", "plan\n"], "a line break", 2),
    "a separator of lines": (
        ["pack", "good.npy", "--max-length", "8", "--out", "a\u2028b"],
        "a line break",
        2,
    ),
    "a null in lengths": (["pack", "a\0b", "--max-length", "8", "--out", "new"], "null character", 2),
    "a null in an order": (
        ["pack", "good.npy", "--max-length", "8", "--order", "a\0b", "--out", "new"],
        "null character",
        2,
    ),
    "a null in a plan": (["plan", "show", "a\0b"], "null character", 2),
    "a null in a picture": (["plan", "show", "plan", "--plot", "a\0b.png"], "null character", 2),
    "a null in a folder": (["pack", "good.npy", "--max-length", "8", "--out", "a\0b"], "null character", 2),
}


@pytest.fixture
def yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    np.save("good.npy", np.array([5, 3, 9, 2]))
    np.save("negative.npy", np.array([5, -3]))
    np.save("floats.npy", np.array([5.0, 3.0]))
    np.save("square.npy", np.ones((2, 2), dtype=int))
    np.save("objects.npy", np.array([5, None], dtype=object), allow_pickle=True)
    Path("half.npy").write_bytes(Path("good.npy").read_bytes().replace(b"'<i8', ", b"('b',),"))
    Path("text.npy").write_text("5 3 9 2\n")
    Path("short.npy").write_bytes(Path("good.npy").read_bytes()[:-8])
    Path("text-mode.npy").write_bytes(Path("good.npy").read_bytes().replace(b"\n", b"\r\n"))
    for depth in (4000, 9000):
        header = b"-" * depth + b"1\n"
        Path(f"nested{depth}.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
    Path("taken").mkdir()
    Path("taken", "file").write_text("mine")
    Path("folder.png").mkdir()
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as named:
        named.bind("socket")
    td.pack(np.array([5, 3, 9, 2]), 8, out="plan")
    return tmp_path


@pytest.mark.parametrize("case", BAD)
def test_a_usage_error_is_one_line_and_an_exit_code(
    case: str, yard: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, mentions, code = BAD[case]
    before = sorted(yard.rglob("*"))
    assert cli.main(words) == code
    out, line = capsys.readouterr()
    assert out == ""
    assert line.startswith("tundish: ")
    assert line.count("\n") == 1
    assert mentions in line
    assert line.count(str(yard)) <= 1
    assert sorted(yard.rglob("*")) == before

    error = answer(*words, code=code, capsys=capsys)["error"]
    assert error["exit_code"] == code
    assert mentions in error["message"]
    assert error["kind"].endswith("Error")


def test_a_path_cannot_control_the_terminal(yard: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\x1b[31m\tb"
    assert cli.main(["pack", "good.npy", "--max-length", "8", "--out", name]) == 0
    out = capsys.readouterr().out
    assert r"a\x1b[31m\tb" in out and "\x1b" not in out
    assert cli.main(["plan", "show", name]) == 0


def test_empty_lengths_make_the_empty_plan(yard: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save("empty.npy", np.zeros(0, dtype=np.int64))
    assert answer("pack", "empty.npy", "--max-length", 8, "--out", "new", capsys=capsys)["packs"] == 0
    assert answer("plan", "verify", "new", "empty.npy", capsys=capsys)["verified"] is True


def test_an_unexpected_error_prints_its_traceback(
    yard: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(plan: td.PackPlan) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(td.PackPlan, "stats", broken)
    assert cli.main(["plan", "show", "plan", "--json"]) == 70
    out, line = capsys.readouterr()
    assert "Traceback" in line
    assert json.loads(out)["error"]["kind"] == "ZeroDivisionError"


def test_a_missing_optional_package_exits_with_4(
    yard: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    error = answer("plan", "show", "plan", "--plot", "fill.png", code=4, capsys=capsys)["error"]
    assert "pip install 'tundish[plot]'" in error["message"]


def test_help_is_fast_and_lists_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["pack", "--help"], ["plan", "show", "--help"], ["plan", "verify", "--help"]):
        assert cli.main(words) == 0
        assert "130  interrupted" in capsys.readouterr().out
    code = (
        "import sys; from tundish.cli import main; main(sys.argv[1:]);"
        "print([name for name in ('torch', 'matplotlib', 'tqdm', 'transformers') if name in sys.modules])"
    )
    for words in (["--help"], ["--version"], ["plan", "show", "none"]):
        run = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
        assert run.stdout.splitlines()[-1] == "[]"


def test_version() -> None:
    run = tundish("--version")
    assert (run.returncode, run.stdout) == (0, f"tundish {td.__version__}\n")


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["pack", "--help"], ["plan", "show", "--help"]])
def test_help_and_version_print_text_with_json_too(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """As the guide says: they are for people, and end the command before it does anything."""
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert text.startswith(("usage: tundish", f"tundish {td.__version__}"))
    for asked in ([*words, "--json"], [*words[:-1], "--json", words[-1]]):
        assert cli.main(asked) == 0
        assert capsys.readouterr().out == text


def test_the_command_is_installed() -> None:
    installed = Path(sys.executable).with_name("tundish")
    run = subprocess.run([installed, "--version"], capture_output=True, text=True, check=True)
    assert run.stdout == f"tundish {td.__version__}\n"
