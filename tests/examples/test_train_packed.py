"""The example in `examples/` trains on real text, on two ranks and on one."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support.distributed.programs import DEVNULL, PIPE, Program, run
from tokenizers import Tokenizer

import tundish as td

SCRIPT = Path(__file__).parents[2] / "examples" / "train_packed.py"
SMALL = ["--documents", "40", "--vocabulary", "400", "--max-length", "128", "--steps", "10"]
TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# torchrun's agent with ranks that are forked, and have their imports; the other test has those that torchrun starts.
FORKING_LAUNCHER = """
import sys
from support.distributed.programs import become
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

alone = LaunchConfig(
    min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork"
)
elastic_launch(alone, lambda *words: become(words))(*sys.argv[1:])
"""


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def two_ranks(out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TWO_RANKS, str(SCRIPT), "--out", str(out), *SMALL],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=100,
        check=False,
    )


def test_two_ranks_train_and_print_a_summary(two_ranks: subprocess.CompletedProcess[str], out: Path) -> None:
    assert two_ranks.returncode == 0, two_ranks.stderr
    said = two_ranks.stdout
    assert re.search(r"^documents +40, ", said, re.MULTILINE)
    assert re.search(r"^padding +would have been \d+\.\d% of all tokens", said, re.MULTILINE)
    # Every line is said once, not by each rank.
    assert said.count("step   10/10") == 1
    match = re.search(r"^loss +(\S+) -> (\S+)", said, re.MULTILINE)
    assert match
    assert float(match[2]) < float(match[1])
    for mode in ("hard", "best_fit", "ordered", "sequential"):
        assert re.search(rf"^{mode} +[\d,]+ packs, [\d.]+% full", said, re.MULTILINE)
    whole = re.search(r"^best fit +loss (\S+) -> (\S+) in 5 steps on whole documents", said, re.MULTILINE)
    assert whole
    assert float(whole[2]) < float(whole[1])
    for picture in ("plan.png", "modes.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    assert not list(out.rglob("*incomplete*"))


def test_the_saved_plan_matches_the_tokens(two_ranks: subprocess.CompletedProcess[str], out: Path) -> None:
    assert two_ranks.returncode == 0, two_ranks.stderr
    (corpus,) = out.glob("corpus-*")
    (folder,) = (out / "plans").iterdir()
    bounds = np.load(corpus / "bounds.npy")
    tokens = np.load(corpus / "tokens.npy", mmap_mode="r")
    vocabulary = json.loads((corpus / "corpus.json").read_text())["vocabulary"]
    assert bounds[-1] == len(tokens)
    assert tokens.min() >= 0
    assert tokens.max() < vocabulary == 400
    # Every document ends with the mark of its end, and with no other.
    (end,) = {int(token) for token in tokens[bounds[1:] - 1]}
    assert np.count_nonzero(tokens == end) == 40
    td.PackPlan.load(folder).verify(np.diff(bounds))


def test_an_incomplete_corpus_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    corpus = importlib.import_module("python_corpus")
    folder = tmp_path / "out" / "corpus"
    corpus.prepare_corpus(folder, 5, 300)
    names = {path.name for path in folder.iterdir()}
    assert names == {"tokens.npy", "bounds.npy", "tokenizer.json", "corpus.json"}
    # The leftovers of a run that ends just before its last file, and of files that never reached the disk.
    (folder / "corpus.json").unlink()
    (folder / "tokens.npy").write_bytes(b"")
    (folder / "bounds.npy").unlink()
    corpus.prepare_corpus(folder, 5, 300)
    assert {path.name for path in folder.iterdir()} == names
    opened = corpus.open_corpus(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # Another training of the tokenizer may give other tokens, but the text is that of the files.
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in corpus.source_files(5)]
    assert [tokenizer.decode(opened[number].tolist()) for number in range(len(opened))] == texts


def test_one_process_reuses_tokens_and_warns_when_the_loss_rises(
    two_ranks: subprocess.CompletedProcess[str], out: Path
) -> None:
    assert two_ranks.returncode == 0, two_ranks.stderr
    before = {path: path.stat().st_mtime_ns for path in out.glob("corpus-*/*")}
    # Steps this long throw any model off.
    ran = run([SCRIPT, "--out", out, *SMALL, "--learning-rate", "50"], env=environment())
    assert ran.returncode == 1
    assert "the loss did not go down" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert {path: path.stat().st_mtime_ns for path in out.glob("corpus-*/*")} == before


def test_ctrl_c_ends_both_ranks(two_ranks: subprocess.CompletedProcess[str], out: Path) -> None:
    assert two_ranks.returncode == 0, two_ranks.stderr
    # A session of its own, so that the signal reaches launcher and ranks as a terminal's would, and nobody else.
    running = Program(
        ["-c", FORKING_LAUNCHER, SCRIPT, "--out", out, *SMALL, "--steps", "100000"],
        stdout=PIPE,
        stderr=DEVNULL,
        env=environment(),
        start_new_session=True,
    )
    try:
        assert running.stdout is not None
        for line in running.stdout:
            if line.startswith("model"):
                break
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait(timeout=60) != 0
        # The group is empty once every rank is gone too.
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                os.killpg(running.pid, 0)
            except ProcessLookupError:
                break
            time.sleep(0.05)
        else:
            pytest.fail("a rank outlived the launcher")
        assert not list(out.rglob("*incomplete*"))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
