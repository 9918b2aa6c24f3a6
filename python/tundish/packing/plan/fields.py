"""Names of a plan's columns, in their order, and the parts of `plan.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["FIELDS", "PIECE_FIELDS", "fields_of", "plan_parts"]

FIELDS = ("dataset_id", "indices", "indices_cu_len", "start_offset", "end_offset", "longest")
PIECE_FIELDS = ("piece_start", "piece_stop")


def fields_of(overlong: str | None) -> tuple[str, ...]:
    """The columns of a plan by its `overlong`, which is None in hard packing.

    Only parts of overlong samples can be partial pieces in the middle of a pack.
    """
    return FIELDS + PIECE_FIELDS if overlong in ("split", "truncate") else FIELDS


def plan_parts(metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What `plan.json` says of the packs of each mode: tokens and counts before packs are left out or repeated.

    A mixed plan has a part for each dataset, and any other plan one for all.
    """
    if metadata.get("parts"):
        return [dict(part) for part in metadata["parts"]]
    part = {name: metadata.get(name) for name in ("mode", "tokens", "tokens_packed", "hard", "whole")}
    multiple = metadata.get("multiple")
    if multiple and multiple["remainder"] == "drop":
        part["tokens_packed"] = metadata["tokens_packed"] + multiple["tokens"]
    return [part]
