"""The code of a model that is none of transformers, as a user has it in a module of their own."""

from __future__ import annotations

CODE = """
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

class OwnConfig(PretrainedConfig):
    model_type = "own"

class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.layer = nn.Linear(3, 2)
        self.post_init()
"""
