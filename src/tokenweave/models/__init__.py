"""Tensor-parallel models as stage lists."""

from tokenweave.models.config import ModelConfig, RopeScaling, builtin_names, read_config
from tokenweave.models.inputs import Inputs, PackedSequences, SequenceRows
from tokenweave.models.loading import progress_bar
from tokenweave.models.model import Model, load_model
from tokenweave.models.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Inputs",
    "Model",
    "ModelConfig",
    "PackedSequences",
    "RopeScaling",
    "SequenceRows",
    "Tokenizer",
    "builtin_names",
    "load_model",
    "load_tokenizer",
    "progress_bar",
    "read_config",
]
