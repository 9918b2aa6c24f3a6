"""Checkpoints that are saved while training goes on, and are whole or not there.

`Checkpointer` saves Hugging Face exports and torch DCP checkpoints under one root; `open_readonly` reads the root
from elsewhere. Layers, each knowing only those before it: `reading`, `retention`, `saves` (the seam to the kinds),
`hf` and `dcp` (the kinds), `lane` (one save after the other, in the background), `owner` (who changes the root),
`checkpointer`.
"""

from tundish.checkpoint.checkpointer import Checkpointer
from tundish.checkpoint.reading import ReadOnlyRoot, open_readonly, verify
from tundish.checkpoint.retention import Checkpoint
from tundish.checkpoint.saves import Save

__all__ = ["Checkpoint", "Checkpointer", "ReadOnlyRoot", "Save", "open_readonly", "verify"]
