"""Settings and fixtures of all tests.

Invariants:
    As root on Linux, only tests marked `needs_gpu` may be skipped. Any other skip fails the run.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# torch, matplotlib and the Hugging Face libraries read these at import, here and in child processes.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# The ranks of a test share the processors, so a thread pool in each would slow all of them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Disable DNS. torch's store looks up the name of each client before it serves it, which can take five seconds.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

# A shell that starts the tests in the background makes them and their children ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import pytest
from support.distributed import rank_processes
from support.soak import IS_SOAK

# Failing assertions there show both values.
pytest.register_assert_rewrite("support.shm.leftovers")

# No deadline: a busy machine makes single examples slow.
hypothesis.settings.register_profile(
    "tundish", deadline=None, print_blob=True, max_examples=500 if IS_SOAK else 60
)
hypothesis.settings.load_profile("tundish")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Skips())
    # Ranks are started from a fork server, which is started before the first test.
    rank_processes.preload()


def pytest_unconfigure() -> None:
    # The interpreter would wait for them.
    rank_processes.end_idle()


def pytest_collection_finish() -> None:
    # Imported modules are never garbage; without this, collections in tests would spend minutes on torch.
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
    """Collects skips that are not allowed, also from the processes of xdist."""

    def __init__(self) -> None:
        self._skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_expected = hasattr(report, "wasxfail") or "needs_gpu" in report.keywords
        if report.skipped and not is_expected:
            self._skipped.append(f"{report.nodeid}: {_reason(report)}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._skipped.append(f"{report.nodeid}: {_reason(report)}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._skipped and _skips_are_forbidden() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._skipped and _skips_are_forbidden():
            terminalreporter.section("skipped, although only tests that need a GPU may be skipped", red=True)
            for line in self._skipped:
                terminalreporter.line(line, red=True)


@pytest.fixture
def path_in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory for gigabytes of data, so that tests do not wait for a disk."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tests-") as folder:
        yield Path(folder)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Let torch use two threads in this test."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tmp_path_of_all(tmp_path: Path) -> Path:
    """`tmp_path`, readable by other users."""
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        mode = parent.stat().st_mode
        if mode & 0o011 != 0o011:
            parent.chmod(mode | 0o011)
    return tmp_path


def _skips_are_forbidden() -> bool:
    return sys.platform == "linux" and os.geteuid() == 0


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    # For a skip, pytest stores (path, line, reason).
    return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
