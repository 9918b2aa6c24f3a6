"""Computes the order of a mix: in this process, or once on each node for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tundish import _native
from tundish.packing.arguments.integer_arrays import IntegerArray
from tundish.packing.mixing.parameters import MixParameters
from tundish.progress import ProgressLine

__all__ = ["agreed_parameters", "mixed_order"]


def agreed_parameters(checked: Callable[[], MixParameters], *, share: Any, group: Any) -> MixParameters:
    """The result of `checked`; with `share`, an error on one rank is raised on all ranks of the group."""
    if share is False:
        return checked()
    from tundish.distributed import agreed

    with agreed("checking what to mix", group=group):
        return checked()


def mixed_order(
    parameters: MixParameters,
    beginning: IntegerArray,
    *,
    share: bool,
    group: Any,
    progress: bool | None,
) -> IntegerArray:
    """The packs of a mix, numbered through all plans, (packs,).

    Args:
        parameters: The parameters; those of the last stage hold from the end of `beginning` on.
        beginning: The packs before the last stage.
        share: Whether the ranks of a node share one copy; the call is then collective over `group`.
        group: The process group.
        progress: Show progress; by default on a terminal.
    """

    def build() -> IntegerArray:
        with ProgressLine("mix", progress) as line:
            return _native.mix_packs(
                {
                    "packs": [plan.packs for plan in parameters.plans],
                    "weights": parameters.stages[-1].weights,
                    "seed": parameters.seed,
                    "exhausted": parameters.exhausted,
                    "epochs": parameters.epochs,
                    "num_packs": parameters.num_packs,
                    "beginning": np.asarray(beginning),
                },
                line.callback,
            )

    if not share:
        return build()
    from tundish.shm import node_shared

    return node_shared(build, key=f"mix {parameters.fingerprint}", group=group)
