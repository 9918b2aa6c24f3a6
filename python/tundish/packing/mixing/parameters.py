"""Everything that determines a mix, and its fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

__all__ = ["MixParameters", "PlanIdentity", "Stage"]

# Another order for the same parameters needs another number here.
ORDER_VERSION = 1


class PlanIdentity(NamedTuple):
    """A plan of a mix: its fingerprint, and the number of its packs."""

    fingerprint: str
    packs: int


class Stage(NamedTuple):
    """The weights that hold from the pack `start` of a mix on, one for each plan."""

    start: int
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MixParameters:
    """The parameters of a mix, as `tundish.mix` documents them.

    Attributes:
        plans: The plans.
        seed: The seed of the orders of the plans' packs.
        exhausted: What happens when a plan is through.
        epochs: Epochs after which a plan is through, or None.
        num_packs: Packs of the mix at most, or None.
        stages: The weights. The first stage starts at 0, and `PackMix.resume` adds one.
    """

    plans: tuple[PlanIdentity, ...]
    seed: int
    exhausted: str
    epochs: int | None
    num_packs: int | None
    stages: tuple[Stage, ...]

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits, a hash of all parameters."""
        text = json.dumps([ORDER_VERSION, self.as_json()], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def resumed(self, start: int, weights: tuple[float, ...]) -> MixParameters:
        """The same parameters, with these weights from pack `start` on."""
        kept = tuple(stage for stage in self.stages if stage.start < start)
        return replace(self, stages=(*kept, Stage(start, weights)))

    def packs_in_common(self, fingerprint: str) -> int | None:
        """The number of packs that this mix has in common with a mix that it was resumed from, or None."""
        for number in range(1, len(self.stages)):
            if replace(self, stages=self.stages[:number]).fingerprint == fingerprint:
                return self.stages[number].start
        return None

    def as_json(self) -> dict[str, Any]:
        """The parameters as JSON has them."""
        return {
            "plans": [plan._asdict() for plan in self.plans],
            "seed": self.seed,
            "exhausted": self.exhausted,
            "epochs": self.epochs,
            "num_packs": self.num_packs,
            "stages": [{"start": stage.start, "weights": list(stage.weights)} for stage in self.stages],
        }

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> Self:
        """The inverse of `as_json`.

        Raises:
            KeyError, TypeError, ValueError: Something is missing or of another type.
        """
        return cls(
            plans=tuple(
                PlanIdentity(str(plan["fingerprint"]), int(plan["packs"])) for plan in value["plans"]
            ),
            seed=int(value["seed"]),
            exhausted=str(value["exhausted"]),
            epochs=None if value["epochs"] is None else int(value["epochs"]),
            num_packs=None if value["num_packs"] is None else int(value["num_packs"]),
            stages=tuple(
                Stage(int(stage["start"]), tuple(map(float, stage["weights"]))) for stage in value["stages"]
            ),
        )
