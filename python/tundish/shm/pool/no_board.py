"""What stands for the board of a pool that is over.

Owns nothing: the board's memory is not kept for those who still have futures. What always holds: no task is on it, and
nobody waits for one.
"""

from __future__ import annotations

from typing import Any

__all__ = ["NoBoard"]


class NoBoard:
    """An empty board that takes no task."""

    def wait(self, _timeout: float, _caller: bool) -> bool:
        return False

    def collect(self) -> list[tuple[int, int, Any]]:
        return []

    def put(self, _kind: int, _payload: Any) -> None:
        return None

    def put_many(self, _kind: int, _payloads: list[Any], _start: int) -> list[int]:
        return []

    def is_ready(self) -> bool:
        return False

    def revoke(self, _ticket: int) -> bool:
        return False

    def running(self, _ticket: int) -> bool:
        return False

    def poke(self) -> None:
        return
