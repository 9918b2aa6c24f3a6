"""`LocalCalls`, a base of `Checkpointer`: the calls about published checkpoints that a rank makes alone."""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
from pathlib import Path

from tundish.checkpoint.guarded_calls import GuardedCalls
from tundish.checkpoint.publish.readonly_root import Checkpoints, Kind, check_step, format_steps, plain_step
from tundish.errors import NotFoundError

__all__ = ["LocalCalls"]


class LocalCalls(GuardedCalls):
    """Lists, verifies, locks and protects published checkpoints. No call is collective."""

    def list(self, kind: Kind | None = None) -> Checkpoints:
        """All published checkpoints, or those of one kind. Not collective.

        Args:
            kind: "hf" or "dcp"; None lists both.

        Returns:
            A `Checkpoint` for each: first those of kind "hf", then "dcp", each by step.

        Raises:
            InvalidInputError: `kind` is another text.
            Exception: with `on_failure="raise"`, the error of an earlier save.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> with td.Checkpointer("listed") as checkpointer:
            ...     _ = checkpointer.save_dcp(1, {"w": torch.ones(2)}, extra={"loss": 0.5}, blocking=True)
            ...     [(checkpoint.step, checkpoint.extra) for checkpoint in checkpointer.list("dcp")]
            [(1, {'loss': 0.5})]
        """
        self._raise_pending()
        return self._resources.readonly.list(kind)

    def latest(self, kind: Kind = "hf") -> Path | None:
        """The newest published checkpoint of `kind`. Not collective.

        Args:
            kind: "hf" or "dcp".

        Returns:
            Its path; None if there is no checkpoint.

        Raises:
            InvalidInputError: `kind` is another text.
            Exception: with `on_failure="raise"`, the error of an earlier save.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> with td.Checkpointer("newest") as checkpointer:
            ...     _ = checkpointer.save_hf(1, {"w": torch.ones(2)}, blocking=True)
            ...     checkpointer.latest().name, checkpointer.latest("dcp")
            ('hf-1', None)
        """
        self._raise_pending()
        return self._resources.readonly.latest(kind)

    def verify(self, path: str | os.PathLike[str]) -> builtins.list[str]:
        """Read every byte of a checkpoint again and compare it with the recorded checksums. Not collective.

        Args:
            path: of the checkpoint; a relative path is one under the root.

        Returns:
            The names of the files without a checksum: only their sizes were compared.

        Raises:
            CorruptCheckpointError: names all files that are missing, changed, cut short or too many.
            NotFoundError: there is no checkpoint.
            Exception: with `on_failure="raise"`, the error of an earlier save.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> with td.Checkpointer("verified") as checkpointer:
            ...     _ = checkpointer.save_hf(1, {"w": torch.ones(2)}, blocking=True)
            ...     checkpointer.verify("hf-1")
            []
        """
        self._raise_pending()
        return self._resources.readonly.verify(path)

    def reading(self, step: int, kind: Kind = "hf") -> contextlib.AbstractContextManager[Path]:
        """Keep the checkpoint of `step` from being removed or replaced while the block reads it. Not collective.

        Args:
            step: of the checkpoint.
            kind: "hf" or "dcp".

        Returns:
            A context manager that gives the path of the checkpoint.

        Raises:
            NotFoundError: on entry, if there is no such checkpoint.
            InvalidInputError: on entry, if `step` or `kind` cannot be one.
            Exception: with `on_failure="raise"`, the error of an earlier save.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> with td.Checkpointer("read") as checkpointer:
            ...     _ = checkpointer.save_hf(1, {"w": torch.ones(2)}, blocking=True)
            ...     with checkpointer.reading(1) as path:
            ...         (path / "model.safetensors").exists()
            True
        """
        self._raise_pending()
        return self._resources.readonly.reading(step, kind)

    def protect(self, step: int) -> None:
        """Keep the checkpoints of `step` whatever retention says, as long as this checkpointer is open. Not collective.

        Any rank may protect any step. The first rank removes old checkpoints. It learns of the step with the next save
        that begins.

        Args:
            step: a step that is published or being saved.

        Raises:
            NotFoundError: there is no checkpoint of `step`.
            InvalidInputError: the checkpointer is closed, or `step` is no whole number of at least 0.

        Example:
            >>> import torch
            >>> import tundish as td
            >>> with td.Checkpointer("protected", keep_last=1) as checkpointer:
            ...     for step in (1, 2, 3):
            ...         _ = checkpointer.save_hf(step, {"w": torch.ones(2)}, blocking=True)
            ...         if step == 1:
            ...             checkpointer.protect(1)
            ...     [checkpoint.step for checkpoint in checkpointer.list()]
            [1, 3]
        """
        self._check_open()
        self._raise_pending()
        step = check_step(plain_step(step))
        self._check_is_known(step)
        self._resources.protected.add(step)
        if self._resources.writable is not None:
            self._resources.writable.protect([step])

    def _check_is_known(self, step: int) -> None:
        """Refuse a step that is neither published nor being saved."""
        resources = self._resources
        # First, since a save may be published between the two looks.
        if any(step in queue.steps_under_way() for queue in resources.queues.values()):
            return
        steps = sorted({one.step for one in resources.readonly.list()})
        if step not in steps:
            raise NotFoundError(
                errno.ENOENT,
                f"{self.path} has no checkpoint of step {step}, and none is being saved ({format_steps(steps)}): call "
                "protect after the save begins",
                str(self.path),
            )
