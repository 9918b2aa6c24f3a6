"""`ImportedPlan`: packs that another tool made."""

from __future__ import annotations

from typing import Any, NoReturn

from tundish.errors import InvalidInputError
from tundish.packing.arguments.integer_arrays import as_length_arrays
from tundish.packing.plan.pack_plan import PackPlan

__all__ = ["ImportedPlan"]


class ImportedPlan(PackPlan):
    """A plan of mode "preset", whose packs are given and not computed.

    It is read as any plan. It cannot be verified, because no algorithm made it, and is not saved as a plan folder: the
    folder that it was imported from stays.
    """

    def with_lengths(self, lengths: Any) -> ImportedPlan:
        """As `PackPlan.with_lengths`."""
        arrays = as_length_arrays(lengths, single=len(self.num_samples) == 1)
        return ImportedPlan(self._columns, self._metadata_json, lengths=arrays)

    def save(self, path: Any, *, progress: bool | None = None) -> NoReturn:  # noqa: ARG002 (of `PackPlan.save`)
        """Refuse.

        Raises:
            InvalidInputError: Always.
        """
        raise InvalidInputError(
            "this plan was imported, and a plan folder says by which mode its packs were made: keep the folder that it "
            "was imported from"
        )

    def verify(self, lengths: Any = None, **options: Any) -> NoReturn:  # noqa: ARG002 (of `PackPlan.verify`)
        """Refuse.

        Raises:
            InvalidInputError: Always.
        """
        raise InvalidInputError(
            "this plan was imported, so there is no mode to compute its packs again. The import compared all pieces "
            "with the lengths"
        )
