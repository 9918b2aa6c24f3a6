"""`use_in_trl`: has TRL's `SFTTrainer` pack with tundish.

Invariants: TRL packs on one rank after the other, so nothing here may wait for another rank.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any

from tundish.errors import MissingExtraError
from tundish.integrations.hf.datasets import pack_dataset

__all__ = ["use_in_trl"]

# The versions of TRL that are known: from the first one on, before the second one.
_VERSIONS = ("1.16", "2")
# The arguments of TRL's function, which the one here takes.
_ARGUMENTS = ("dataset", "seq_length", "strategy", "map_kwargs")


def use_in_trl() -> contextlib.ExitStack:
    """Have `SFTTrainer(packing=True)` of TRL pack with `td.hf.pack_dataset`, from this call on.

    TRL tokenizes, makes labels, shuffles and collates as before. Only its packing is replaced: packs are planned over
    all samples, where TRL packs a thousand at a time, and are read when a batch asks for them. The strategies of
    `packing_strategy` mean what they mean in `pack_dataset`.

    With "bfd" and "bfd_split", the samples of a pack do not see each other. With "wrapped" they do, as in TRL's own
    packs of this name: a pack is trained on as one sequence.

    Returns:
        A context manager. A plain call holds until the process ends; `with td.hf.use_in_trl():` ends it. A trainer
        keeps the packs that were made for it.

    Raises:
        MissingExtraError: TRL is not installed, or in a version that is not known or does not pack as expected.

    Example:
        td.hf.use_in_trl()
        SFTTrainer(model, SFTConfig(packing=True, max_length=4096), train_dataset=chats).train()
    """
    trainers = _known_trainers()
    undo = contextlib.ExitStack()
    undo.callback(setattr, trainers, "pack_dataset", trainers.pack_dataset)
    trainers.pack_dataset = _pack_for_trl
    return undo


def _pack_for_trl(
    dataset: Any, seq_length: int, strategy: str = "bfd", map_kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Pack as TRL's `pack_dataset` does."""
    if strategy != "wrapped":
        return pack_dataset(dataset, seq_length, strategy, map_kwargs)
    # TRL trains on such a row as on one sequence, the first tokens of the samples among them.
    rows = pack_dataset(dataset, seq_length, strategy, map_kwargs, mask_first_token=False)
    return rows.select_columns(["input_ids", "labels"])


def _known_trainers() -> Any:
    """Return TRL's module with the `SFTTrainer`, which packs by its own name `pack_dataset`.

    Raises:
        MissingExtraError: TRL is not installed, or its version is not known, or the module does not pack as expected.
    """
    try:
        import trl
        from packaging.version import Version
        from trl.trainer import sft_trainer
    except ImportError as error:
        raise MissingExtraError(
            f"use_in_trl needs trl: run `pip install 'trl>={_VERSIONS[0]}'` ({error})", name="trl"
        ) from error
    first, last = map(Version, _VERSIONS)
    is_known = first <= Version(trl.__version__) < last
    if not is_known or not _packs_as_expected(sft_trainer):
        what = "packs in another way than is known" if is_known else "is not known"
        raise MissingExtraError(
            f"TRL {trl.__version__} {what}: use_in_trl works with versions from {_VERSIONS[0]} on, before "
            f"{_VERSIONS[1]}; install one of them, or pack with td.hf.pack_dataset and train with "
            "SFTConfig(dataset_kwargs={'skip_prepare_dataset': True})",
            name="trl",
        )
    return sft_trainer


def _packs_as_expected(trainers: Any) -> bool:
    """Whether the trainer calls a `pack_dataset` of its module that takes the expected arguments."""
    packer = getattr(trainers, "pack_dataset", None)
    prepare = getattr(getattr(trainers, "SFTTrainer", None), "_prepare_dataset", None)
    if not callable(packer) or not inspect.isfunction(prepare):
        return False
    return (
        "pack_dataset" in prepare.__code__.co_names
        and tuple(inspect.signature(packer).parameters) == _ARGUMENTS
    )
