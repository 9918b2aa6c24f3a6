"""Work done as another user of the node, for tests that run as root."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

NOBODY = 65534


def as_nobody(work: Callable[[], None]) -> None:
    """Do `work` in a child that belongs to another user; fails where it fails there.

    Import what it needs first: the other user may not read the files of the installation.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status == 0
