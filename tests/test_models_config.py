"""config.json -> ModelConfig, and what is refused because no stage computes it. GGUF: tests/test_loading_gguf.py."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from checkpoints import LLAMA3_ROPE, SIZES, VARIANTS, make_checkpoint
from tokenweave.errors import ModelError
from tokenweave.models import ModelConfig, RopeScaling, builtin_names, read_config
from tokenweave.models.config import read_model_config

LLAMA3 = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", **SIZES}


def read(folder: Path, config: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return read_config(folder)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_transformers_saves_is_read(tmp_path: Path, variant: str) -> None:
    config = read_config(make_checkpoint(tmp_path, variant))
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (config.hidden, config.intermediate, config.layers) == (
        saved["hidden_size"],
        saved["intermediate_size"],
        saved["num_hidden_layers"],
    )
    assert (config.heads, config.kv_heads, config.head_dim) == (
        saved["num_attention_heads"],
        saved["num_key_value_heads"],
        saved["head_dim"] if "head_dim" in saved else saved["hidden_size"] // saved["num_attention_heads"],
    )
    assert (config.vocab, config.context) == (saved["vocab_size"], saved["max_position_embeddings"])
    assert config.tied_embeddings == saved["tie_word_embeddings"]
    assert config.eos_token_ids == (2,)
    assert config.bos_token_id == 1
    assert config.rope_theta == saved["rope_parameters"]["rope_theta"]
    assert config.qkv_bias == (variant in ("qwen2", "llama-bias"))
    assert config.output_bias == config.mlp_bias == (variant == "llama-bias")
    assert config.qk_norm == (variant == "qwen3")
    assert (config.experts > 0) == variant.startswith("mixtral")


def test_older_files(tmp_path: Path) -> None:
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    config = read(tmp_path, {**LLAMA, "rope_theta": 500000.0, "rope_scaling": scaling})
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 32)
    linear = read(tmp_path, {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert linear.rope_divisors == (2.0,) * 8
    no_kv = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "head_dim")}
    assert (read(tmp_path, no_kv).kv_heads, read(tmp_path, no_kv).head_dim) == (8, 8)


def test_generation_config_has_the_ends_of_turns_too(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert read(tmp_path, LLAMA).eos_token_ids == (7, 9, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architectures is .'GPT2LMHeadModel'.* supported are LlamaForCausalLM",
        ),
        ({"architectures": None, "model_type": "mamba"}, "model_type 'mamba'"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 128},
            "sliding_window is 128, shorter than .* 256",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 128},
            "sliding_window is 128",
        ),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["linear_attention"]}, "layer_types has"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["sliding_attention"], "sliding_window": None},
            "only full attention",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only silu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rotary scaling 'yarn' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rotary scaling 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "rotary scaling 'llama3' lacks 'low_freq_factor'"),
        ({"rope_scaling": 4.0}, "expected an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"attn_logit_softcapping": 50.0}, "soft-capped attention logits"),
        ({"final_logit_softcapping": 30.0}, "soft-capped output logits"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised Hugging Face checkpoints are not supported"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers is '3'; expected a whole number"),
        ({"num_attention_heads": 0}, "heads is 0; expected a positive integer"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"num_key_value_heads": 3}, "8 query heads over 3 key/value heads"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"rms_norm_eps": "tiny"}, "could not convert"),
        ({"rms_norm_eps": math.inf}, "norm_eps inf"),
        ({"rms_norm_eps": math.nan}, "norm_eps nan"),
        ({"num_attention_heads": 10**12, "num_key_value_heads": None}, "heads is 1000000000000; no model has more"),
        ({"num_attention_heads": 10**6, "num_key_value_heads": None}, "1000000 query heads; no model has more"),
        ({"max_position_embeddings": 2**70}, "context is 1180591620717411303424; no model"),
        ({"architectures": 3}, "architectures is 3; expected a list of names"),
        ({"architectures": [["LlamaForCausalLM"]]}, "expected a list of names"),
        ({"sliding_window": "128"}, "sliding_window is '128'; expected a whole number"),
        ({"layer_types": 3}, "layer_types is 3; expected a list of names"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; expected a token id"),
        ({"eos_token_id": [[1]]}, r"eos_token_id is \[\[1\]\]"),
        ({"bos_token_id": "<s>"}, "begin or end a text; expected integers"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, "rotary embedding's parameters: float"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": math.inf}}, "rope_theta inf"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, "rotary embedding's parameters: could not convert"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, r"divided by \[0.0.*expected positive numbers"),
        ({"rope_scaling": {**LLAMA3, "factor": math.nan}}, "factor nan.*expected positive numbers"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "low_freq_factor below high_freq_factor"),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": math.inf}}, "parameters: cannot convert"),
        ({"architectures": ["MixtralForCausalLM"]}, "num_local_experts is None"),
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 3},
            "3 experts per token of 2",
        ),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read(tmp_path, {**LLAMA, **change})
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "sliding_window": 128},
        {"architectures": ["MistralForCausalLM"], "sliding_window": 256},
        {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention"] * 3, "sliding_window": 128},
        {"rope_scaling": None, "attn_logit_softcapping": None, "quantization_config": None},
    ],
)
def test_settings_without_effect_are_accepted(tmp_path: Path, change: dict[str, Any]) -> None:
    assert read(tmp_path, {**LLAMA, **change}).hidden == 64


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00", '{"a":' * 100_000], ids=range(5))
def test_damaged_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(tmp_path)


# Parameters of the published models, in billions.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Llama-3.1-8B", 8.03),
        ("Llama-3.2-1B", 1.236),
        ("Llama-3.3-70B", 70.55),
        ("Qwen2.5-72B", 72.71),
        ("Qwen3-32B", 32.76),
        ("Mixtral-8x7B", 46.70),
        ("Mixtral-8x22B", 140.6),
        ("SmolLM2-135M", 0.1345),
    ],
)
def test_builtin_numbers_give_the_published_parameter_count(name: str, billions: float) -> None:
    c = read_config(name.upper())
    attention = c.hidden * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
    mlp = 3 * c.hidden * c.intermediate * max(1, c.experts) + c.hidden * c.experts
    embeddings = c.vocab * c.hidden * (1 if c.tied_embeddings else 2)
    assert c.layers * (attention + mlp) + embeddings == pytest.approx(billions * 1e9, rel=2e-3)


def test_every_builtin_is_read() -> None:
    assert len(builtin_names()) == 8
    for name in builtin_names():
        assert read_config(name).layers > 0


def test_a_name_too_long_for_a_file() -> None:
    with pytest.raises(ModelError, match="xxx': cannot be looked up: File name too long"):
        read_config("x" * 5000)


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(ModelError, match=r"no model 'Llama-9': .*Llama-3\.1-8B, .*Llama-3\.3-70B, .*SmolLM2-135M"):
        read_config("Llama-9")


def test_a_name_of_the_hub_says_how_to_get_it() -> None:
    with pytest.raises(ModelError, match=r"built-in .*: `hf download meta-llama/Llama-9 config\.json --local-dir DIR`"):
        read_config("meta-llama/Llama-9")
    with pytest.raises(
        ModelError, match=r"expected a Hugging Face folder .*: `hf download meta-llama/Llama-9 --local-dir"
    ):
        read_model_config(Path("meta-llama/Llama-9"))
    for other in ("Llama-9", "/models/Llama-9", "./Llama-9", "../Llama-9", "models/Llama-9.gguf", "a/b/c"):
        with pytest.raises(ModelError) as caught:
            read_config(other)
        assert "hf download" not in str(caught.value)
