"""`serve(tls=…)`: tensors and requests travel encrypted, and only to clients that trust the certificate."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tundish import rtensor
from tundish._native import WorkerClient
from tundish.errors import InvalidInputError, TransferError

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


def test_a_controller_drains_a_server_that_speaks_tls(files: tuple[Path, Path]) -> None:
    with rtensor.serve(token="s3cret", tls=files) as server:
        rtensor.trust(server.addr, token="s3cret", tls=files[0])
        with rtensor.Controller([rtensor.Worker(server.addr)], token="s3cret") as controller:
            handle = rtensor.remotize(torch.arange(10))
            assert server.addr in str(controller.stats())
            with controller.step(claim=handle):
                pass
            assert rtensor.storage_stats()["num_tensors"] == 0
        rtensor.trust(server.addr, token=None)


def test_a_client_that_trusts_nothing_or_another_certificate_is_refused(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    other, _ = _certificate(tmp_path, "other")
    with rtensor.serve(tls=files) as server:
        trusting = WorkerClient(server.addr, tls=files[0].read_bytes())
        assert trusting.request("GET", "/health", timeout=_WAIT_SECONDS)[0] == 200
        for tls in (None, other.read_bytes()):
            with pytest.raises(TransferError):
                WorkerClient(server.addr, tls=tls).request("GET", "/health", timeout=_WAIT_SECONDS)


def test_files_that_are_no_certificates_are_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    for tls in [(empty, files[1]), (files[0], empty), (files[0], tmp_path / "missing")]:
        with pytest.raises(InvalidInputError, match="tls"):
            rtensor.serve(tls=tls)
    with pytest.raises(InvalidInputError, match="tls"):
        rtensor.trust("127.0.0.1:1", token=None, tls=empty)
