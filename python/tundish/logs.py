"""Lines of logs that one process writes for the whole job."""

from __future__ import annotations

import logging
import os
import sys


def is_first_process() -> bool:
    """Whether this process is rank 0, and in a `DataLoader` the first of its workers. It never imports torch."""
    data = sys.modules.get("torch.utils.data")
    worker = None if data is None else data.get_worker_info()
    if worker is not None and worker.id > 0:
        return False
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"


def info(logger: logging.Logger, message: str, *values: object) -> None:
    """Log a line at INFO in the first process, and in no other."""
    if logger.isEnabledFor(logging.INFO) and is_first_process():
        logger.info(message, *values, stacklevel=2)
