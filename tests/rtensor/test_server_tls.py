"""`serve(tls=…)`: tensors and requests travel encrypted, and only to clients that trust the certificate."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from support.distributed.rank_processes import Job, Line
from support.rtensor import peer_functions
from support.rtensor.peers import Peer

from tundish import cli, rtensor
from tundish._native import WorkerClient
from tundish.errors import DrainError, InvalidInputError, NotFoundError, TransferError

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")

_WAIT_SECONDS = 30.0


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 and its key, in PEM. This process does not serve."""
    # That of an earlier test, which nobody had to close.
    rtensor.serve().close()
    return _certificate(tmp_path, "node")


def _certificate(folder: Path, name: str) -> tuple[Path, Path]:
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=node"
    )
    subject = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *subject], check=True, capture_output=True)
    return certificate, key


def _step_of_all(workers: list[rtensor.Worker], handles: Any) -> list[int]:
    """In the process of a trainer: a step that fetches over TLS, and drains all workers over TLS."""
    rtensor.set_backend(rtensor.HttpBackend(shared_memory=False))
    with rtensor.Controller(workers) as controller:
        with controller.step(claim=handles):
            sums = [int(tensor.sum()) for tensor in rtensor.localize(handles)]
        left = [
            answer["storage"]["num_entries"] if isinstance(answer, dict) else answer
            for answer in controller.stats().values()
        ]
    assert left == [0] * len(workers)
    return sums


def test_processes_of_a_job_serve_fetch_and_drain_over_tls(files: tuple[Path, Path]) -> None:
    with Peer(token="s3cret", tls=files) as rollout, Peer(token="s3cret", tls=files) as trainer:
        workers = [rtensor.Worker(rollout.addr), rtensor.Worker(trainer.addr)]
        handles = rollout.call(peer_functions.make, 3, 1000)
        assert trainer.call(_step_of_all, workers, handles) == [0, 1000, 2000]
        # This process serves nothing: it is told whom to trust.
        handles = rollout.call(peer_functions.make, 1, 10)
        with rtensor.Controller(workers) as stranger, pytest.raises(DrainError), stranger.step(claim=handles):
            pass
        rtensor.trust(rollout.addr, trainer.addr, token="s3cret", tls=files[0])
        with rtensor.Controller(workers) as controller, controller.step(claim=handles):
            assert rtensor.localize(handles)[0].tolist() == [0] * 10
        assert rollout.call(peer_functions.stats)[0]["num_tensors"] == 0


def _rank_over_tls(rank: int, line: Line) -> None:
    from tundish import rtensor

    certificate, key = line.hear()
    rtensor.serve(token="s3cret", tls=(certificate, key))
    rtensor.set_backend(rtensor.HttpBackend(shared_memory=False))
    with rtensor.Controller.from_group() as controller:
        line.say(rtensor.dumps(rtensor.remotize(torch.full((8,), rank))))
        tensors = rtensor.localize([rtensor.loads(one) for one in line.hear()])
        line.say([int(tensor.sum()) for tensor in tensors], len(controller.workers))
        line.hear()


def test_ranks_of_a_group_trust_each_other_as_their_own_server(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    with Job(_rank_over_tls, 2, tmp_path) as job:
        job.tell_all(tuple(map(str, files)))
        handles = [said[0] for said in job.hear_all()]
        job.tell_all(handles)
        assert job.hear_all() == [([0, 8], 2)] * 2
        job.tell_all()
        job.expect_end()


def test_the_command_shows_servers_that_speak_tls(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    with Peer(token="s3cret", tls=files) as peer:
        words = ["rtensor", "stats", peer.addr, "--token-file", str(tmp_path / "token")]
        assert cli.main(words) == 1
        assert cli.main([*words, "--certificate", str(files[0])]) == 0
        assert peer.addr in capsys.readouterr().out


def test_a_client_that_trusts_another_certificate_is_refused(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    other, _ = _certificate(tmp_path, "other")
    with rtensor.serve(tls=files) as server:
        trusting = WorkerClient(server.addr, tls=files[0].read_bytes())
        assert trusting.request("GET", "/health", timeout=_WAIT_SECONDS)[0] == 200
        with pytest.raises(TransferError, match=r"none of those to trust: call trust\(ADDR") as refused:
            WorkerClient(server.addr, tls=other.read_bytes()).request("GET", "/health", timeout=_WAIT_SECONDS)
        assert "CaUsedAsEndEntity" not in str(refused.value)


def test_a_client_without_tls_is_told_of_it(files: tuple[Path, Path]) -> None:
    with rtensor.serve(tls=files) as server:
        status, body = WorkerClient(server.addr).request("GET", "/health", timeout=_WAIT_SECONDS)
        assert status == 400 and b"speaks TLS" in body
    with rtensor.serve() as server:
        trusting = WorkerClient(server.addr, tls=files[0].read_bytes())
        with pytest.raises(TransferError, match="does not serve over TLS"):
            trusting.request("GET", "/health", timeout=_WAIT_SECONDS)


def test_files_that_are_no_certificates_are_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    empty, encrypted = tmp_path / "empty", tmp_path / "encrypted"
    empty.touch()
    command = [
        "openssl",
        "pkey",
        "-in",
        str(files[1]),
        "-aes256",
        "-passout",
        "pass:s3cret",
        "-out",
        str(encrypted),
    ]
    subprocess.run(command, check=True, capture_output=True)
    for tls, what in [
        ((empty, files[1]), "the certificate cannot be read: the file is empty"),
        ((files[0], empty), "the private key cannot be read: the file is empty"),
        ((files[0], encrypted), "the private key cannot be read: it is encrypted"),
        ((files[0], files[0]), "the private key cannot be read: the file has only: CERTIFICATE"),
    ]:
        with pytest.raises(InvalidInputError, match=what):
            rtensor.serve(tls=tls)
    with pytest.raises(NotFoundError, match="missing"):
        rtensor.serve(tls=(files[0], tmp_path / "missing"))
    with pytest.raises(InvalidInputError, match="tls"):
        rtensor.trust("127.0.0.1:1", token=None, tls=empty)


@pytest.mark.timeout(20)
def test_files_without_end_are_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (str(fifo), "/dev/zero"):
        for tls in [(path, files[1]), (files[0], path)]:
            with pytest.raises(InvalidInputError, match=path):
                rtensor.serve(tls=tls)
        with pytest.raises(InvalidInputError, match=path):
            rtensor.trust("127.0.0.1:1", token=None, tls=path)


def test_an_open_key_and_an_expired_certificate_are_said(
    files: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = files
    with rtensor.serve(tls=files):
        assert caplog.messages == []
    key.chmod(0o644)
    with rtensor.serve(tls=files):
        (said,) = caplog.messages
    assert f"other users may read the server's private key in {key}" in said
    caplog.clear()
    key.chmod(0o600)
    expired = tmp_path / "expired.pem"
    command = ["openssl", "x509", "-in", str(certificate), "-signkey", str(key), "-out", str(expired)]
    subprocess.run([*command, "-days", "-1"], check=True, capture_output=True)
    with rtensor.serve(tls=(expired, key)):
        (said,) = caplog.messages
    assert f"certificate in {expired} is not valid now" in said and "expired" in said
