"""Computes the order of a mix: in this process, or once on each node for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tundish import _native
from tundish.packing.arguments.integer_arrays import IntegerArray
from tundish.packing.mixing.parameters import MixParameters
from tundish.progress import ProgressLine

__all__ = ["agreed_order"]


def agreed_order(
    checked: Callable[[], MixParameters],
    packs: IntegerArray,
    *,
    share: Any,
    group: Any,
    progress: bool | None,
) -> tuple[MixParameters, IntegerArray]:
    """The parameters of a mix, and its packs, numbered through all plans, (packs,).

    Args:
        checked: Checks the arguments and makes the parameters. With `share`, an error on one rank is raised on all.
        packs: The packs of the mix that is resumed. Those before the last stage of the parameters stay.
        share: Whether the ranks of a node share one copy; the call is then collective over `group`.
        group: The process group.
        progress: Show progress; by default on a terminal.
    """
    if share is False:
        parameters = checked()
    else:
        from tundish.distributed import agreed

        with agreed("checking what to mix", group=group):
            parameters = checked()

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
                    "beginning": np.asarray(packs[: parameters.stages[-1].start]),
                },
                line.callback,
            )

    if not share:
        return parameters, build()
    from tundish.shm import node_shared

    return parameters, node_shared(build, key=f"mix {parameters.fingerprint}", group=group)
