"""A Llama of a few thousand weights in a Hugging Face folder, and an engine around it, for tests of the engine."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from tokenweave.collective import Workspace
from tokenweave.engine.batch import rows_of
from tokenweave.engine.engine import Engine
from tokenweave.engine.kv_cache import KVCache
from tokenweave.engine.sampling import SamplingParams
from tokenweave.engine.scheduler import NewRequest, Scheduler
from tokenweave.models import load_model
from tokenweave.overlap import CpuThread
from tokenweave.planning.plan import Mode, Plan

VOCAB, CONTEXT, EOS = 96, 128, 2


def save_tiny_llama(folder: Path, context: int = CONTEXT) -> Path:
    """Random weights large enough that greedy texts vary, and a tokenizer of the words w0 ... w95."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=80,
        intermediate_size=88,
        num_hidden_layers=3,
        num_attention_heads=10,  # enough for 8 ranks; groups of five, which no number of ranks but 5 divides
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=context,
        eos_token_id=EOS,
        initializer_range=0.4,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    names = {f"w{i}": i for i in range(VOCAB) if i != EOS} | {"<end>": EOS}
    tokenizer = Tokenizer(WordLevel(names, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}w5 {{ m.content }} {% endfor %}{% if add_generation_prompt %}w6{% endif %}"
    settings = {"eos_token": "<end>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


class Letters:
    """A tokenizer's decoding half: token i is a letter, EOS is special."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(ord("a") + i % 26) for i in ids if i != EOS)


@functools.cache
def _model(path: str):
    """Loaded once per process; in a rank process, this rank's part."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    group = dist.group.WORLD if world_size > 1 else None
    return load_model(path, rank=rank, world_size=world_size, group=group)


def halves(mode: Mode) -> Callable[[int], Plan]:
    """Rows -> a plan of this mode, cut in the middle; one row runs fused instead of woven."""

    def plan(rows: int) -> Plan:
        if mode is not Mode.WOVEN:
            return Plan(mode)
        return Plan(Mode.FUSED) if rows == 1 else Plan(Mode.WOVEN, split=-(-rows // 2))

    return plan


def make_engine(
    path: str,
    plan: Callable[[int], Plan] | Mode = Mode.FUSED,
    *,
    max_batch_tokens: int = 64,
    max_num_seqs: int = 16,
    cache_rows: int = 512,
    context: int = CONTEXT,
) -> Engine:
    model = _model(path)
    config = model.config
    workspace = Workspace(model.group, max_tokens=max_batch_tokens, hidden=config.hidden, dtype=torch.float32)
    scheduler = Scheduler(
        cache_rows=cache_rows,
        context=context,
        max_batch_tokens=max_batch_tokens,
        max_num_seqs=max_num_seqs,
        vocab=config.vocab,
    )
    cache = KVCache(config.layers, cache_rows, model.kv_heads_local, config.head_dim, torch.float32)
    choose = halves(plan) if isinstance(plan, Mode) else plan
    return Engine(model, cache, workspace, scheduler, lambda chunks: choose(rows_of(chunks)), CpuThread(), Letters)


def new_requests(prompts, params=None, first_number: int = 0) -> list[NewRequest]:
    """One request per prompt; ``params`` one for all or a list; seeds are the numbers."""
    params = params or SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    listed = params if isinstance(params, list) else [params] * len(prompts)
    return [
        NewRequest(first_number + i, tuple(prompt), p, p.seed if p.seed is not None else first_number + i)
        for i, (prompt, p) in enumerate(zip(prompts, listed, strict=True))
    ]


def answers(engine: Engine, requests: list[NewRequest]) -> list[tuple[list[int], str]]:
    """Runs requests to the end: (token ids, finish reason) of each."""
    tokens: dict[int, list[int]] = {request.number: [] for request in requests}
    reasons: dict[int, str] = {}
    for events in engine.run(requests):
        for event in events:
            assert event.request not in reasons, "a token after the last one"
            tokens[event.request].append(event.token_id)
            if event.finished is not None:
                reasons[event.request] = event.finished.reason
    return [(tokens[r.number], reasons[r.number]) for r in requests]
