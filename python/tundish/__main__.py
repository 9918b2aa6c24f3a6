"""Entry point of the command line: the program `tundish`, and `python -m tundish`.

Handles Ctrl-C during startup, which is mostly imports: the process exits at once. Python itself would print a
traceback, and an import could turn the interrupt into another error or lose it. This file therefore imports almost
nothing.
"""

from __future__ import annotations

import os
import sys

from tundish.lazy import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import NoReturn

EXIT_INTERRUPTED = 130
INTERRUPTED_JSON = b'{"error": {"kind": "KeyboardInterrupt", "message": "interrupted", "exit_code": 130}}\n'


def _exit_interrupted(*_: object) -> NoReturn:
    _write(2, b"tundish: interrupted\n")
    if "--json" in sys.argv:
        _write(1, INTERRUPTED_JSON)
    os._exit(EXIT_INTERRUPTED)


def _write(descriptor: int, text: bytes) -> None:
    try:
        os.write(descriptor, text)
    except OSError:
        # The exit code still reports the interrupt.
        return


try:
    # This import takes most of the time before `main` can install the handler.
    import signal
except KeyboardInterrupt:
    _exit_interrupted()


def main() -> int:
    """Run the command line of this process and return the exit code."""
    # Shells without job control start background jobs with Ctrl-C ignored. It stays ignored.
    handles_ctrl_c = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handles_ctrl_c:
        signal.signal(signal.SIGINT, _exit_interrupted)
    from tundish import cli

    return cli.main(before_run=_restore_ctrl_c if handles_ctrl_c else None)


def _restore_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    sys.exit(main())
