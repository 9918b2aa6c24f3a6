"""Names of a plan's columns, in their order."""

from __future__ import annotations

__all__ = ["FIELDS", "PIECE_FIELDS", "fields_of"]

FIELDS = ("dataset_id", "indices", "indices_cu_len", "start_offset", "end_offset", "longest")
PIECE_FIELDS = ("piece_start", "piece_stop")


def fields_of(overlong: str | None) -> tuple[str, ...]:
    """The columns of a plan by its `overlong`, which is None in hard packing.

    Only parts of overlong samples can be partial pieces in the middle of a pack.
    """
    return FIELDS + PIECE_FIELDS if overlong in ("split", "truncate") else FIELDS
