"""Checkpoints that are saved while training goes on, and are complete or not there.

`Checkpointer` saves Hugging Face exports (`hf`) and torch DCP checkpoints (`dcp`) under one root. A save is taken
on the caller's thread (`save_job`), staged in host memory and published in the background (`publish`).
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
    from tundish.checkpoint.readonly import ReadonlyRoot, open_readonly, verify
    from tundish.checkpoint.resume import ResumedRun as ResumedRun
    from tundish.checkpoint.resume import choose_checkpoint as choose_checkpoint
    from tundish.checkpoint.resume import load_chosen as load_chosen
    from tundish.checkpoint.resume import start_new_run as start_new_run
    from tundish.checkpoint.retention import Retention as Retention
    from tundish.checkpoint.retention import WritableRoot as WritableRoot
    from tundish.checkpoint.root import KINDS as KINDS
    from tundish.checkpoint.root import Checkpoint
    from tundish.checkpoint.root import Checkpoints as Checkpoints
    from tundish.checkpoint.root import Damaged as Damaged
    from tundish.checkpoint.root import DiskRoot as DiskRoot
    from tundish.checkpoint.save_job import Save
    from tundish.checkpoint.training_state import random_states as random_states
    from tundish.checkpoint.training_state import set_random_states as set_random_states
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
            "tundish.checkpoint.readonly": ("ReadonlyRoot", "open_readonly", "verify"),
            "tundish.checkpoint.resume": (
                "ResumedRun",
                "choose_checkpoint",
                "load_chosen",
                "start_new_run",
            ),
            "tundish.checkpoint.retention": ("Retention", "WritableRoot"),
            "tundish.checkpoint.root": ("KINDS", "Checkpoint", "Checkpoints", "Damaged", "DiskRoot"),
            "tundish.checkpoint.save_job": ("Save",),
            "tundish.checkpoint.training_state": ("random_states", "set_random_states"),
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
