"""Checkpoints that are saved while training goes on, and are complete or not there.

`Checkpointer` saves Hugging Face exports (`hf`) and torch DCP checkpoints (`dcp`) under one root. A save is submitted
on the caller's thread (`submit`), staged in host memory (`staging`) and published in the background (`publish`).
`open_readonly` reads a root from elsewhere, without importing torch.
"""

from __future__ import annotations

from tundish.lazy import TYPE_CHECKING, lazily

if TYPE_CHECKING:
    from tundish.checkpoint.checkpointer import Checkpointer
    from tundish.checkpoint.dcp.dcp_saver import load_dcp
    from tundish.checkpoint.publish.read_only_root import ReadOnlyRoot, open_readonly, verify
    from tundish.checkpoint.publish.retention import Checkpoint
    from tundish.checkpoint.save import Save
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "tundish.checkpoint.checkpointer": ("Checkpointer",),
            "tundish.checkpoint.dcp.dcp_saver": ("load_dcp",),
            "tundish.checkpoint.publish.read_only_root": ("ReadOnlyRoot", "open_readonly", "verify"),
            "tundish.checkpoint.publish.retention": ("Checkpoint",),
            "tundish.checkpoint.save": ("Save",),
        },
    )

__all__ = ["Checkpoint", "Checkpointer", "ReadOnlyRoot", "Save", "load_dcp", "open_readonly", "verify"]
