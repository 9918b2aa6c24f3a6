"""Checkpoints that are saved while training goes on, and are complete or not there.

`Checkpointer` saves Hugging Face exports (`hf`) and torch DCP checkpoints (`dcp`) under one root. A save is taken
on the caller's thread (`start_save`), staged in host memory (`staging`) and published in the background (`publish`).
`open_readonly` reads a root from elsewhere, without importing torch.
"""

from __future__ import annotations

from tundish.lazy import TYPE_CHECKING, lazily

# An alias lets the command line and the integrations import a name that is not public.
if TYPE_CHECKING:
    from tundish.checkpoint.checkpointer import Checkpointer
    from tundish.checkpoint.dcp.load import load_dcp
    from tundish.checkpoint.hf.adapters import holds_adapters as holds_adapters
    from tundish.checkpoint.hf.adapters import load_adapters as load_adapters
    from tundish.checkpoint.hf.adapters import refuse_encoded as refuse_encoded
    from tundish.checkpoint.hf.adapters import refuse_mixed as refuse_mixed
    from tundish.checkpoint.publish.kinds_and_steps import KINDS as KINDS
    from tundish.checkpoint.publish.readonly_root import Checkpoints as Checkpoints
    from tundish.checkpoint.publish.readonly_root import Damaged as Damaged
    from tundish.checkpoint.publish.readonly_root import ReadonlyRoot, open_readonly, verify
    from tundish.checkpoint.publish.retention import Checkpoint
    from tundish.checkpoint.publish.retention import Retention as Retention
    from tundish.checkpoint.publish.writable_root import WritableRoot as WritableRoot
    from tundish.checkpoint.save import Save
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "tundish.checkpoint.checkpointer": ("Checkpointer",),
            "tundish.checkpoint.dcp.load": ("load_dcp",),
            "tundish.checkpoint.hf.adapters": (
                "holds_adapters",
                "load_adapters",
                "refuse_encoded",
                "refuse_mixed",
            ),
            "tundish.checkpoint.publish.kinds_and_steps": ("KINDS",),
            "tundish.checkpoint.publish.readonly_root": (
                "Checkpoints",
                "Damaged",
                "ReadonlyRoot",
                "open_readonly",
                "verify",
            ),
            "tundish.checkpoint.publish.retention": ("Checkpoint", "Retention"),
            "tundish.checkpoint.publish.writable_root": ("WritableRoot",),
            "tundish.checkpoint.save": ("Save",),
        },
    )

__all__ = [
    "Checkpoint",
    "Checkpointer",
    "ReadonlyRoot",
    "Save",
    "load_dcp",
    "open_readonly",
    "verify",
]
