"""`mix`: an order over the packs of several plans, by weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tundish.packing.arguments.choices import check_choice, check_sharing
from tundish.packing.arguments.integers import as_integer, as_optional_integer
from tundish.packing.mixing.arguments import as_plans, as_weights
from tundish.packing.mixing.ordering import agreed_order
from tundish.packing.mixing.pack_mix import PackMix
from tundish.packing.mixing.parameters import MixParameters, PlanIdentity, Stage

__all__ = ["mix"]

EXHAUSTED = ("repeat", "stop", "drop")
LARGEST_SEED = 2**32 - 1
# The core says that no memory holds a larger mix.
LARGEST_MIX = 2**48


def mix(
    plans: Sequence[Any],
    weights: Sequence[float],
    *,
    num_packs: int | None = None,
    epochs: int | None = None,
    seed: int = 0,
    exhausted: str = "repeat",
    share: bool = False,
    group: Any = None,
    progress: bool | None = None,
) -> PackMix:
    """Order the packs of several plans so that each plan has the share that its weight says.

    After any number of packs, each plan is within one pack of its share. This is the blending of Megatron-LM, with one
    difference. `build_blending_indices` takes a pack of the plan that lacks most, which may leave a plan more than a
    pack behind. This function looks only at plans that have had less than their share, and takes the one whose next
    pack is due first (Tijdeman, "The chairman assignment problem", 1980).

    The packs of a plan come in a random order, and in a new one in each epoch. Epoch *e* of plan *p* has the order
    `numpy.random.RandomState([seed, p, e]).shuffle(numpy.arange(len(plan)))`.

    A plan is *through* when each of its packs came in `epochs` epochs. `exhausted` says what the mix does then. The mix
    ends after `num_packs` packs in any case.

    | `exhausted` | the plan | the mix ends |
    |---|---|---|
    | `"repeat"` | goes on in a new order | when all plans are through |
    | `"stop"` | | when the first plan is through |
    | `"drop"` | leaves; the others go on, with their weights in proportion | when all plans are through |

    By default `epochs` is 1. With `exhausted="repeat"` and `num_packs`, it is unlimited: the mix has exactly
    `num_packs` packs. With `"drop"`, shares count from the place where a plan last left.

    Args:
        plans: The plans, or the `PackedDataset`s of plans.
        weights: A number for each plan: finite, at least 0, in any unit. With the weight 0 a plan takes no part, and
            its epochs do not count; at least one weight must be above 0. A plan without packs must have the weight 0.
        num_packs: The most packs of the mix, 1 … 2⁴⁸.
        epochs: Epochs after which a plan is through, at least 1.
        seed: 0 … 2³² − 1; the same on every rank.
        exhausted: "repeat", "stop" or "drop".
        share: Make the call collective over the ranks of a torch.distributed job. Every rank passes the same arguments.
            One rank a node computes the order, and all ranks of the node map the same memory.
        group: The process group that shares; by default all ranks.
        progress: Show progress; by default on a terminal.

    Returns:
        The mix: one index for each of its packs, int32 if the plans have up to 2³¹ packs, else int64. To compute it
        takes one more index for each pack of the plans.

    Raises:
        InvalidTypeError: An argument is of the wrong type.
        InvalidInputError: A weight is negative, infinite or not a number; all are 0; there are not as many as plans; a
            plan without packs has a weight; an argument is out of range; or the mix would have more than 2⁴⁸ packs.
        OutOfMemoryError: The system has no memory for the order.
        PeerFailedError: With `share`, another rank failed, and the message carries its error; or ranks ask for
            different mixes.
        KeyboardInterrupt: On Ctrl-C, within 100 ms.

    Example:
        >>> import tundish as td
        >>> web, code = td.pack([8] * 90, 8), td.pack([8] * 10, 8)
        >>> mix = td.mix([web, code], [0.7, 0.3], num_packs=100)
        >>> [mix[place].plan for place in range(10)]
        [0, 0, 1, 0, 0, 1, 0, 0, 1, 0]
        >>> mix.stats()["given"], mix.stats()["epochs"][1]
        ([0.7, 0.3], 3.0)
    """

    def checked() -> MixParameters:
        check_sharing(share, group)
        check_choice(exhausted, "exhausted", EXHAUSTED)
        found = as_plans(plans)
        most = as_optional_integer(num_packs, "num_packs", 1, LARGEST_MIX)
        through = as_optional_integer(epochs, "epochs", 1, LARGEST_MIX)
        if through is None and (exhausted != "repeat" or most is None):
            through = 1
        return MixParameters(
            plans=tuple(PlanIdentity(plan.fingerprint, len(plan)) for plan in found),
            seed=as_integer(seed, "seed", 0, LARGEST_SEED),
            exhausted=exhausted,
            epochs=through,
            num_packs=most,
            stages=(Stage(0, as_weights(weights, len(found))),),
        )

    nothing = np.empty(0, dtype=np.int32)
    parameters, packs = agreed_order(checked, nothing, share=share, group=group, progress=progress)
    return PackMix(as_plans(plans), packs, parameters)
