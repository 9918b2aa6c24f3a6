"""The command `tundish` as a process of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from support.distributed.programs import run

COMMAND = [sys.executable, "-c", "import sys; from tundish.cli import main; sys.exit(main())"]


def tundish(*words: object, **settings: Any) -> subprocess.CompletedProcess[str]:
    return run([*COMMAND[1:], *words], **settings)
