"""The command `tundish` as a process of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

__all__ = ["COMMAND", "tundish"]

COMMAND = [sys.executable, "-c", "import sys; from tundish.cli import main; sys.exit(main())"]


def tundish(*words: object, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, words)], capture_output=True, text=True, timeout=60, check=False, **settings
    )
