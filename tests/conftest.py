"""What every test runs under.

Owns the environment of the tests and the rule about skips: as root on Linux only a test marked `needs_gpu` may be
skipped; any other skip fails the run, so that no check is lost unnoticed, in whichever process the test was.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Read when torch, matplotlib and the Hugging Face libraries are first imported, here and in child processes.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# Ranks of one test share the machine; a thread pool each would make them wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The network is asked for no names. torch's store asks for that of every client, and serves nobody until it has an
# answer, which takes five seconds now and then.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

# A shell that starts the tests in the background has them ignore Ctrl-C, and with them all that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import pytest
from support.distributed import rank_processes

# What fails there says what differs.
pytest.register_assert_rewrite("leftovers")

# A machine that does other work at the same time makes single examples slow, never wrong.
hypothesis.settings.register_profile("tundish", deadline=None, print_blob=True)
hypothesis.settings.load_profile("tundish")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Skips())
    # Whichever test is the first to need the fork server: later ones start hundreds of ranks from it.
    rank_processes.preload()


def pytest_collection_finish() -> None:
    # What was imported is never garbage, and to look through all of torch again and again takes minutes.
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("needs_gpu")
    if marker is not None:
        import torch

        (wanted,) = marker.args or (1,)
        if torch.cuda.device_count() < wanted:
            pytest.skip("needs a CUDA device" if wanted == 1 else f"needs {wanted} CUDA devices")


class _Skips:
    """What was skipped without an excuse; reports of other processes come here too."""

    def __init__(self) -> None:
        self._lost: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_expected = hasattr(report, "wasxfail") or "needs_gpu" in report.keywords
        if report.skipped and not is_expected:
            self._lost.append(f"{report.nodeid}: {_reason(report)}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._lost.append(f"{report.nodeid}: {_reason(report)}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._lost and _nothing_is_out_of_reach() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._lost and _nothing_is_out_of_reach():
            terminalreporter.section("skipped where nothing but a missing GPU excuses it", red=True)
            for line in self._lost:
                terminalreporter.line(line, red=True)


@pytest.fixture
def path_in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder for gigabytes that ask nothing of a disk, so that no test waits until one has them."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tests-") as folder:
        yield Path(folder)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """torch, and what asks it, takes two threads here."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tmp_path_of_all(tmp_path: Path) -> Path:
    """`tmp_path`, where other users reach and read it."""
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        mode = parent.stat().st_mode
        if mode & 0o011 != 0o011:
            parent.chmod(mode | 0o011)
    return tmp_path


def _nothing_is_out_of_reach() -> bool:
    return sys.platform == "linux" and os.geteuid() == 0


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    # pytest keeps (path, line, reason) of a skip.
    return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
