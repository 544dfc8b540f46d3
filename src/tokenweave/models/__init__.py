"""Tensor-parallel models as stage lists."""

from tokenweave.models.config import ModelConfig, RopeScaling, builtin_names, read_config
from tokenweave.models.inputs import Inputs, SequenceRows

__all__ = ["Inputs", "ModelConfig", "RopeScaling", "SequenceRows", "builtin_names", "read_config"]
