"""Adapters for transformers, datasets and TRL. Public as `td.hf`.

Importing this package imports none of its modules: each comes, with the framework that it needs, when one of its names
is used.
"""

from __future__ import annotations

from tundish.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from tundish.integrations.hf.datasets import pack_dataset
    from tundish.integrations.hf.tokenizing import tokenize
    from tundish.integrations.hf.transformers import TundishTrainerMixin
    from tundish.integrations.hf.trl import use_in_trl
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "tundish.integrations.hf.datasets": ("pack_dataset",),
            "tundish.integrations.hf.tokenizing": ("tokenize",),
            "tundish.integrations.hf.transformers": ("TundishTrainerMixin",),
            "tundish.integrations.hf.trl": ("use_in_trl",),
        },
    )

__all__ = ["TundishTrainerMixin", "pack_dataset", "tokenize", "use_in_trl"]
