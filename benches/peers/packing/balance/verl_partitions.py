"""verl's partitions without the rest of verl, which they do not use."""

from __future__ import annotations

from collections.abc import Callable

from import_alone import import_alone

EMPTY: dict[str, dict[str, object]] = {
    "verl": {},
    "verl.utils": {},
    "verl.protocol": {"DataProto": None},
    "verl.utils.device": {"get_device_name": None},
    "verl.utils.tensordict_utils": {},
}


def balanced_partitions() -> Callable[..., list[list[int]]]:
    """verl's `get_seqlen_balanced_partitions`."""
    module = import_alone("verl", "verl.utils.seqlen_balancing", EMPTY)
    function: Callable[..., list[list[int]]] = module.get_seqlen_balanced_partitions
    return function
