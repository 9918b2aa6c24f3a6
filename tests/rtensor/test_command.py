"""`tundish rtensor stats`: one table of all processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.rtensor import peer_functions
from support.rtensor.peers import Peer

from tundish import cli


def test_all_processes_are_in_one_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with Peer() as owner, Peer(token="secret") as guarded:
        handles = owner.call(peer_functions.make, 3, 1 << 17)
        owner.call(peer_functions.sums_over_sockets, handles)
        assert cli.main(["rtensor", "stats", owner.addr, owner.addr]) == 0
        heading, row = capsys.readouterr().out.splitlines()
        assert heading.split()[:3] == ["address", "shards", "MiB"]
        assert row.split()[:4] == [owner.addr, "3", "3.0", "3"]
        assert cli.main(["rtensor", "stats", owner.addr, guarded.addr]) == 1
        out, problem = capsys.readouterr()
        assert owner.addr in out and guarded.addr not in out
        assert problem.startswith(f"tundish: no answer: {guarded.addr} wants the token of its server: ")
        assert "pass --token-file FILE" in problem and "trust" not in problem
        secret = tmp_path / "token"
        secret.write_text("another\n")
        assert cli.main(["rtensor", "stats", guarded.addr, "--token-file", str(secret)]) == 1
        out, problem = capsys.readouterr()
        assert out == "" and f"the one in {secret} (--token-file) is another" in problem
        secret.write_text("secret\n")
        words = ["rtensor", "stats", owner.addr, guarded.addr, "--token-file", str(secret)]
        assert cli.main(words) == 0
        *_, total = capsys.readouterr().out.splitlines()
        assert total.split()[:4] == ["all", "3", "3.0", "3"]
        assert cli.main([*words, "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["failed"] == {} and answer["processes"][owner.addr]["storage"]["num_entries"] == 3
    assert cli.main(["rtensor", "stats", owner.addr, "--json"]) == 1
    out, problem = capsys.readouterr()
    assert owner.addr in json.loads(out)["failed"] and owner.addr in problem
    assert cli.main(["rtensor", "stats", "nowhere"]) == 2
    assert cli.main(["rtensor", "stats", owner.addr, "--token-file", str(tmp_path / "none")]) == 3


@pytest.mark.timeout(20)
def test_only_regular_files_of_a_fitting_size_are_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fifo, large = tmp_path / "fifo", tmp_path / "large"
    os.mkfifo(fifo)
    large.write_bytes(bytes(1 << 21))
    for option in ("--token-file", "--certificate"):
        for path, what in [(fifo, "is a FIFO"), (Path("/dev/zero"), "is a device"), (large, "has more than")]:
            assert cli.main(["rtensor", "stats", "127.0.0.1:9", option, str(path)]) == 2
            told_of = capsys.readouterr().err
            assert f"{path}: {what}" in told_of


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from tundish.cli import main; main(['rtensor', 'stats', '127.0.0.1:9']);"
        "print([name for name in ('torch', 'numpy.testing') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]", ran.stderr
