"""Tensor-parallel models as stage lists."""

from tokenweave.models.config import ModelConfig, RopeScaling, builtin_names, read_config
from tokenweave.models.inputs import Inputs, SequenceRows
from tokenweave.models.loading import progress_bar
from tokenweave.models.model import Model, load_model

__all__ = [
    "Inputs",
    "Model",
    "ModelConfig",
    "RopeScaling",
    "SequenceRows",
    "builtin_names",
    "load_model",
    "progress_bar",
    "read_config",
]
