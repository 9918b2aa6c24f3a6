"""Work done as another user of the node, for tests that run as root."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Final

NOBODY: Final = 65534
# The exit code of a child whose work raised an error.
RAISED: Final = 2


def start_as_nobody(work: Callable[[], int | None]) -> int:
    """Start a child of another user; returns its process id.

    Its exit code is the result of `work` (0 for None), or `RAISED`. Import what `work` needs first: the other user may
    not read the files of the installation.
    """
    child = os.fork()
    if child == 0:
        code: int | None = RAISED
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(int(code or 0))
    return child


def as_nobody(work: Callable[[], int | None]) -> int:
    """The result of `work` in a child of another user; fails where it raises."""
    _, status = os.waitpid(start_as_nobody(work), 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 1), f"the child ended with {code}"
    return code
