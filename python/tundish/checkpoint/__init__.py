"""Checkpoints that are saved while training goes on, and are whole or not there.

`Checkpointer` saves Hugging Face exports and torch DCP checkpoints under one root; `open_readonly` reads the root
from elsewhere, without importing torch. Layers, each knowing only those before it: `retention`, `reading`, `saves`
(the seam to the kinds), `tensors`, `names`, `placements` (what is saved), `buffers` and `staging` (into host memory),
`writing` and `windows` (onto the disk), `owngroup` (background exchanges), `hf` and `dcp` (the kinds), `budget`,
`finalizing` and `lane` (one save after the other, in the background), `failure`, `owner` (who changes the root),
`opening`, `taking`, `calls` (what all ranks call together), `checkpointer`.
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
