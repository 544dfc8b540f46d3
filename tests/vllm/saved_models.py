"""Models in folders, for a real vLLM on two ranks; and what transformers says with them, which is the reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def tiny_model(folder: Path, variant: str = "llama", **more: Any) -> Path:
    """Saves a random model of :data:`checkpoints.VARIANTS` in ``folder`` with heads of a size that vLLM's CPU attention has."""
    from checkpoints import make_checkpoint

    return make_checkpoint(folder, variant, **{"head_dim": 32, **more})


def int8_model(folder: Path, variant: str = "llama-bias") -> Path:
    """Saves :func:`tiny_model` with linear layers of int8 weights, whose inputs vLLM quantises row by row (compressed-tensors)."""
    import json

    from safetensors.torch import load_file, save_file

    tiny_model(folder, variant, num_attention_heads=4)
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        scale = stored[name].abs().amax(dim=1, keepdim=True) / 127
        stored[name + "_scale"] = scale
        stored[name] = (stored[name] / scale).round().char()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    common = {"num_bits": 8, "type": "int"}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "linear": {
                "targets": ["Linear"],
                "weights": {**common, "symmetric": True, "strategy": "channel", "dynamic": False},
                # Not symmetric: vLLM's kernel for that takes fp32 on any CPU.
                "input_activations": {**common, "symmetric": False, "strategy": "token", "dynamic": True},
            }
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def awq_model(folder: Path, group: int = 32) -> Path:
    """Saves :func:`tiny_model` with linear layers of 4-bit weights, each ``group`` inputs with a scale and a zero point (AWQ)."""
    import json

    import torch
    from safetensors.torch import load_file, save_file

    tiny_model(folder, "llama", hidden_size=128, intermediate_size=256, num_attention_heads=4)

    def packed(codes: torch.Tensor) -> torch.Tensor:
        """[rows, outputs] -> int32 [rows, outputs / 8], in AWQ's order."""
        words = codes.to(torch.int64).view(len(codes), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return (words << torch.arange(0, 32, 4)).sum(-1).to(torch.uint32).view(torch.int32)

    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        groups = stored.pop(name).t().unflatten(0, (-1, group))  # [groups, inputs of each, outputs]
        least, most = groups.amin(1, keepdim=True).clamp_max(0), groups.amax(1, keepdim=True)
        scale = ((most - least) / 15).half().float()
        zero = (-least / scale).round().clamp(0, 15)
        codes = ((groups / scale).round() + zero).clamp(0, 15)
        layer = name.removesuffix("weight")
        stored[layer + "qweight"] = packed(codes.flatten(0, 1))
        stored[layer + "qzeros"] = packed(zero.squeeze(1))
        stored[layer + "scales"] = scale.squeeze(1).half().contiguous()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def unknown_model(folder: Path) -> Path:
    """Saves a random model of an architecture that the plugin does not know."""
    import transformers

    from checkpoints import SIZES

    config = transformers.GemmaConfig(**{**SIZES, "head_dim": 32, "num_attention_heads": 4})
    transformers.GemmaForCausalLM(config).save_pretrained(folder)
    return folder


def smollm2_model(gguf: Path, folder: Path, ranks: int = 2) -> Any:
    """Saves SmolLM2-135M of a GGUF file in ``folder`` for vLLM on so many ranks, and gives it as transformers has it, in fp32.

    It has 9 heads in 3 groups, which vLLM does not divide by 2, 4 or 8: more groups of heads whose weights are zero change nothing.
    """
    import torch
    import transformers

    from tokenweave.models.config import read_config
    from tokenweave.models.loading import open_weights

    config = read_config(gguf)
    groups = -(-config.kv_heads // ranks) * ranks
    weights = open_weights(gguf, config.head_dim)
    rope: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta}}
    if int(transformers.__version__.partition(".")[0]) < 5:
        rope = {"rope_theta": config.rope_theta}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab,
            hidden_size=config.hidden,
            intermediate_size=config.intermediate,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads // config.kv_heads * groups,
            num_key_value_heads=groups,
            head_dim=config.head_dim,
            max_position_embeddings=config.context,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=True,
            **rope,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            stored = weights.read(name).float()
            parameter.zero_()
            parameter[tuple(slice(0, n) for n in stored.shape)] = stored
    model.save_pretrained(folder)
    return model


def transformers_tokens(model: Path, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """The greedy tokens that transformers gives in fp32: the reference, in pytest's process."""
    import torch
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(max_tokens):
                tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    return answers
