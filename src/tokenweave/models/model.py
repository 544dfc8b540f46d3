"""A whole model on one rank: embedding, layers and head, as the stage list that the weave walks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.functional import linear

from tokenweave.errors import ModelError
from tokenweave.models import attention_cuda, kernels
from tokenweave.models.config import ModelConfig, read_model_config
from tokenweave.models.embedding import vocabulary_rows
from tokenweave.models.inputs import Inputs
from tokenweave.models.llama import Attention, GatedMLP, load_attention, load_mlp
from tokenweave.models.loading import Loader, Part, Progress, Tensors, open_weights
from tokenweave.models.mixtral import MixtureMLP, groups_on_device, load_mixture
from tokenweave.models.rotary import Rotary
from tokenweave.models.sharding import ModelShard, shard_of
from tokenweave.stages import Epilogue, Stage

if TYPE_CHECKING:  # the engine imports the models
    from tokenweave.engine.kv_cache import KVCache

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Layer:
    """One rank's share of a layer; the norms, [hidden], are whole on every rank."""

    input_norm: torch.Tensor
    attention: Attention
    post_attention_norm: torch.Tensor
    mlp: GatedMLP | MixtureMLP


@dataclass(frozen=True)
class Model:
    """One rank's share of a model.

    Attributes:
        config: the model's numbers.
        shard: what this rank keeps.
        group: the tensor-parallel group, None for a single rank.
        dtype, device: of the weights, of the rows that stages exchange and of the K/V cache.
        embedding: [vocab rows of this rank, hidden]. The rows past the vocabulary's end are zero.
        head: the same shape; the embedding itself where they are tied.
        final_norm: [hidden].
    """

    config: ModelConfig
    shard: ModelShard
    group: dist.ProcessGroup | None
    dtype: torch.dtype
    device: torch.device
    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    final_norm: torch.Tensor
    head: torch.Tensor

    @property
    def kv_heads_local(self) -> int:
        """Key/value heads of this rank's cache, padded ones included; the same on every rank."""
        return len(self.shard.heads.kv)

    @property
    def packs(self) -> bool:
        """Whether the stages take :class:`tokenweave.models.PackedSequences`: attention in one launch."""
        return attention_cuda.available(self.device, self.dtype, self.config.head_dim)

    @property
    def capturable(self) -> bool:
        """Whether the stages of packed inputs run without waiting for the GPU, so that a CUDA graph can hold them."""
        waits = self.config.experts > 0 and not groups_on_device(self.device, self.dtype)
        return self.packs and not waits and kernels.available(self.embedding) and self.config.head_dim % 4 == 0

    def stages(self, kv: KVCache) -> list[Stage]:
        """[embedding, attention_0, mlp_0, attention_1, ..., mlp_last] over this cache.

        ``Stage.compute`` takes :class:`tokenweave.models.Inputs`. The last epilogue is the final norm.

        Args:
            kv: [rows, kv_heads_local, head_dim] per layer, of the model's dtype.
        """
        rotary = Rotary(self.config, min(self.config.context, kv.keys[0].shape[0]), self.device)
        eps = self.config.norm_eps
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.final_norm]
        stages = [Stage("embedding", self._embed, Epilogue(self.layers[0].input_norm, eps, has_residual=False))]
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            attention, mlp = layer.attention, layer.mlp
            compute: Any = partial(attention.compute, index, kv, rotary)  # Any: the embedding alone gets x = None
            stages.append(
                Stage(
                    f"attention_{index}", compute, Epilogue(layer.post_attention_norm, eps, bias=attention.output_bias)
                )
            )
            compute = mlp.compute
            if isinstance(mlp, MixtureMLP):
                # The experts add to the partial sums while later ones still read the rows.
                stages.append(Stage(f"mlp_{index}", compute, Epilogue(next_norm, eps), in_place=False))
            else:
                stages.append(Stage(f"mlp_{index}", compute, Epilogue(next_norm, eps, bias=mlp.down_bias)))
        return stages

    def _embed(self, x: torch.Tensor | None, inputs: Inputs, out: torch.Tensor) -> None:
        """Rows of tokens in this rank's part of the vocabulary, zeros for the others."""
        if self.shard.world_size == 1:
            torch.index_select(self.embedding, 0, inputs.token_ids, out=out)
            return
        count = self.shard.vocab.size
        vocabulary_rows(self.embedding, inputs.token_ids, out, first=self.shard.rank * count, count=count)

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Scores of the next token. A collective: every rank calls it with the same rows.

        Args:
            rows: [n, hidden], final-norm rows.

        Returns:
            float32 [n, vocab], the same bits on every rank.
        """
        world = self.shard.world_size
        if rows.shape[0] == 0:
            return torch.empty(0, self.config.vocab, device=rows.device)
        mine = linear(rows, self.head)
        if world == 1:
            return mine.float()
        parts = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(parts, mine, group=self.group)
        # The last ranks' rows past the end of the vocabulary are padding: they are cut off, never sampled.
        return torch.cat(parts, dim=1)[:, : self.config.vocab].float()


def load_model(
    path: str | Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Model:
    """Reads one rank's share of a model.

    Args:
        path: a Hugging Face folder (config.json and *.safetensors) or a .gguf file.
        rank, world_size, group: of the tensor-parallel group; ``group`` None for a single rank (or where it is WORLD).
        dtype: float32, bfloat16 or float16.
        progress: called as ``progress(done, total)`` while layers are read; see
            :func:`tokenweave.models.progress_bar`.

    Raises:
        ModelError: the model is missing, damaged or not supported, or ``world_size`` exceeds its query heads.
    """
    path, device = Path(path), torch.device(device)
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype}; supported are {', '.join(map(str, DTYPES))}")
    config = read_model_config(path)
    shard = shard_of(config, rank, world_size)
    loader = Loader(open_weights(path, config.head_dim), dtype, device, unit_rows=config.head_dim)
    model = assemble(loader, config, shard, group, dtype, device, progress)
    loader.finish()
    return model


def assemble(
    loader: Tensors,
    config: ModelConfig,
    shard: ModelShard,
    group: dist.ProcessGroup | None,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> Model:
    """The model whose tensors ``loader`` gives, in ``dtype`` and on ``device``; the rest as :func:`load_model`."""
    total = config.layers + 2

    def report(done: int) -> None:
        if progress is not None:
            progress(done, total)

    report(0)
    vocab_shape = (config.vocab, config.hidden)
    embedding = loader.rows([Part("model.embed_tokens.weight", vocab_shape, shard.vocab)])
    report(1)
    layers = []
    for index in range(config.layers):
        layers.append(_load_layer(loader, f"model.layers.{index}", config, shard))
        report(index + 2)
    final_norm = loader.vector("model.norm.weight", config.hidden)
    head = embedding if config.tied_embeddings else loader.rows([Part("lm_head.weight", vocab_shape, shard.vocab)])
    report(total)
    return Model(config, shard, group, dtype, device, embedding, tuple(layers), final_norm, head)


def _load_layer(loader: Tensors, prefix: str, config: ModelConfig, shard: ModelShard) -> Layer:
    mlp: GatedMLP | MixtureMLP
    if config.experts:
        mlp = load_mixture(loader, f"{prefix}.block_sparse_moe", config, shard)
    else:
        names = (f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj", f"{prefix}.mlp.down_proj")
        mlp = load_mlp(loader, names, config, shard.intermediate, config.mlp_bias)
    return Layer(
        input_norm=loader.vector(f"{prefix}.input_layernorm.weight", config.hidden),
        attention=load_attention(loader, f"{prefix}.self_attn", config, shard),
        post_attention_norm=loader.vector(f"{prefix}.post_attention_layernorm.weight", config.hidden),
        mlp=mlp,
    )
