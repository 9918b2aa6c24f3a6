"""Lists that one rank tells all others through the store: ten thousand read them, so they are a tenth of plain text."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any

__all__ = ["compress_list", "decompress_list"]


def compress_list(values: Sequence[Any]) -> str:
    """A list of what JSON has, as a text."""
    return base64.b64encode(zlib.compress(json.dumps(values).encode())).decode("ascii")


def decompress_list(text: str) -> list[Any]:
    """What was `compress_list`."""
    values: list[Any] = json.loads(zlib.decompress(base64.b64decode(text)))
    return values
