"""The way from a shell into the command line: the program `tundish`, and `python -m tundish`.

Owns what Ctrl-C does before the command has begun its work, which is mostly importing: there is nothing to clear
away, so the process leaves at once. Left to Python, an interrupt in the middle of an import is a traceback, or is
turned by the import into another error, or lost. To have that settled early, next to nothing is imported here.
"""

from __future__ import annotations

import os
import sys

from tundish.lazy import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import NoReturn

__all__ = ["main"]

EXIT_INTERRUPTED = 130
INTERRUPTED_JSON = b'{"error": {"kind": "KeyboardInterrupt", "message": "interrupted", "exit_code": 130}}\n'


def _leave(*_: object) -> NoReturn:
    _tell(2, b"tundish: interrupted\n")
    if "--json" in sys.argv:
        _tell(1, INTERRUPTED_JSON)
    os._exit(EXIT_INTERRUPTED)


def _tell(descriptor: int, text: bytes) -> None:
    try:
        os.write(descriptor, text)
    except OSError:
        # Where nobody can be told, the exit code still tells.
        return


try:
    # A few milliseconds, which are most of what passes before `main` can say what Ctrl-C does.
    import signal
except KeyboardInterrupt:
    _leave()


def main() -> int:
    """Run the command line of this process and return the exit code."""
    # In a background job of a shell without job control Ctrl-C is ignored, and stays so.
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeded:
        signal.signal(signal.SIGINT, _leave)
    from tundish import cli

    return cli.main(begin=_begin if heeded else None)


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    sys.exit(main())
