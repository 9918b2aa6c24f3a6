"""What every test runs under.

Owns the environment of the tests and the rule about skips: as root on Linux only a test marked `needs_gpu` may be
skipped; any other skip fails the run, so that no check is lost unnoticed.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator

# Read when torch, matplotlib and the Hugging Face libraries are first imported, here and in child processes.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# Ranks of one test share the machine; a thread pool each would make them wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts the tests in the background has them ignore Ctrl-C, and with them all that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import pytest

# A machine that does other work at the same time makes single examples slow, never wrong.
hypothesis.settings.register_profile("tundish", deadline=None, print_blob=True)
hypothesis.settings.load_profile("tundish")

_lost = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_lost] = []


def pytest_collection_finish() -> None:
    # What was imported is never garbage, and to look through all of torch again and again takes minutes.
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("needs_gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    expected_failure = hasattr(report, "wasxfail")
    if report.skipped and not expected_failure and item.get_closest_marker("needs_gpu") is None:
        item.config.stash[_lost].append(f"{item.nodeid}: {_reason(report)}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped:
        collector.config.stash[_lost].append(f"{collector.nodeid}: {_reason(report)}")
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (
        session.config.stash[_lost]
        and _nothing_is_out_of_reach()
        and session.exitstatus == pytest.ExitCode.OK
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lost = config.stash[_lost]
    if lost and _nothing_is_out_of_reach():
        terminalreporter.section("skipped where nothing but a missing GPU excuses it", red=True)
        for line in lost:
            terminalreporter.line(line, red=True)


def _nothing_is_out_of_reach() -> bool:
    return sys.platform == "linux" and os.geteuid() == 0


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    # pytest keeps (path, line, reason) of a skip.
    return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
