"""The state of a rank's process that one job must leave as it was, so that the next job can have the process.

Invariants:
    What a job can change is undone by `restored` or reported by `changes`. The next job on the process sees the rest.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import resource
import signal
import sys
import threading
import time
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Seconds in which what a job started has to end.
_ENDING_SECONDS = 1.0
# Modules beside tundish's own whose functions scenarios replace.
_OTHER_MODULES = (
    "builtins",
    "multiprocessing",
    "os",
    "socket",
    "threading",
    "time",
    "torch",
    "torch.cuda",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.distributed_c10d",
)
# tqdm's thread lives as long as the process.
_TQDM = "tqdm_monitor"
_LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Seeds random numbers; at the end of the block the environment, the folder and the warnings are as before."""
    import numpy as np
    import torch

    from tundish.distributed import process_groups

    environment, folder = dict(os.environ), Path.cwd()
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (what scenarios draw from)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            # Names of groups may be used again with the next job's store.
            process_groups._counters.clear()


class RankState:
    """The state before a job."""

    def __init__(self) -> None:
        self._settings, self._attributes, self._running = _settings(), _attributes(), _running()

    def changes(self) -> list[str]:
        """What is not as before: a thread or a child that still runs, a setting, a function that was replaced.

        Threads and children have a moment to end.
        """
        until = time.monotonic() + _ENDING_SECONDS
        while (running := _running() - self._running) and time.monotonic() < until:
            time.sleep(0.01)
            gc.collect()
        settings, attributes = _settings(), _attributes()
        return [
            *sorted(running),
            *(name for name, value in self._settings.items() if settings.get(name, value) != value),
            # Modules that are imported later add names, and no name goes.
            *(name for name, value in self._attributes.items() if attributes.get(name) is not value),
        ]


def _settings() -> dict[str, Any]:
    """Settings of the process, by name."""
    import torch

    settings: dict[str, Any] = {
        "signal handlers": [signal.getsignal(number) for number in signal.valid_signals()],
        "signal mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "limits": [resource.getrlimit(limit) for limit in _LIMITS],
        "user": (os.getuid(), os.geteuid(), os.getgid(), os.getegid()),
        "torch": (
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.cuda.is_initialized(),
        ),
    }
    if "torch.distributed.tensor" in sys.modules:
        # What torch keeps of operations on DTensors names the groups of their meshes, which end with the job.
        from torch.distributed.tensor import DTensor

        propagator = DTensor._op_dispatcher.sharding_propagator
        settings["DTensors"] = propagator.propagate_op_sharding.cache.cache_info().currsize, _native_plans()
    for name in ("", *(name for name in logging.root.manager.loggerDict if name.startswith("tundish"))):
        logger = logging.getLogger(name)
        settings[f"logger {name}"] = (list(logger.handlers), list(logger.filters), logger.level)
    if os.path.exists("/proc/self/ns/mnt"):
        settings["mounts"] = os.readlink("/proc/self/ns/mnt")
        status = Path("/proc/self/status").read_text().splitlines()
        settings["capabilities"] = [line for line in status if line.startswith("Cap")]
    return settings


def _native_plans() -> Any:
    """Operations on DTensors that torch planned in C++; None in a version that plans none."""
    import torch

    stats = getattr(torch._C, "_get_DTensor_sharding_propagator_cache_stats", lambda: None)
    return stats()


def _attributes() -> dict[str, Any]:
    """What stands under each name of the library's modules and classes, and the functions of some other modules."""
    found: dict[str, Any] = {}
    for module_name, module in list(sys.modules.items()):
        is_own = module_name.split(".")[0] == "tundish"
        if not is_own and module_name not in _OTHER_MODULES:
            continue
        for name, value in list(vars(module).items()):
            # `isinstance` would ask objects that stand for another.
            kind = type(value)
            if is_own or issubclass(kind, (type, types.FunctionType, types.BuiltinFunctionType)):
                found[f"{module_name}.{name}"] = value
            if is_own and issubclass(kind, type) and value.__module__.startswith("tundish"):
                found |= {f"{module_name}.{name}.{attribute}": one for attribute, one in vars(value).items()}
    return found


def _running() -> set[str]:
    """Threads, of the library's Rust too, and child processes."""
    found = {
        f"thread {thread.name} {thread.ident}" for thread in threading.enumerate() if thread.name != _TQDM
    }
    for task in Path("/proc/self/task").glob("*"):
        # A thread may end meanwhile.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            name = (task / "comm").read_text().strip()
            if name.startswith("tundish"):
                found.add(f"thread {name} {task.name}")
            found.update(f"child {child}" for child in (task / "children").read_text().split())
    return found
