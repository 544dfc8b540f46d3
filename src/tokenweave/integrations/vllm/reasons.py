"""Why a step, or a whole engine, runs as stock vLLM: one name a reason, counted, and said once in the log."""

from __future__ import annotations

from enum import Enum


class Reason(str, Enum):
    """The value is what the log says."""

    # The engine: found when the model is built, and final.
    ONE_RANK = "one tensor-parallel rank has nothing to communicate"
    SUBMODEL = "the model is a part of another one (multimodal, draft)"
    NOT_GENERATING = "the model does not generate text (pooling)"
    PIPELINE_PARALLEL = "pipeline parallelism hands residuals from stage to stage"
    CONTEXT_PARALLEL = "context parallelism spreads a request's cache over ranks"
    EXPERT_PARALLEL = "expert parallelism has collectives of its own"
    MICROBATCHING = "vLLM's own dual-batch overlap is on"
    LORA = "LoRA adapters change the linear layers"
    SPECULATIVE = "speculative decoding reads hidden states that are never whole on one rank"
    KV_CONNECTOR = "a KV connector's hooks would run twice a layer"
    PROMPT_EMBEDS = "prompts can be embeddings"
    SLEEP_MODE = "sleep mode moves weights and cache away"
    OFFLOADING = "weights are offloaded to the host's memory"
    SLIDING_WINDOW = "a layer's attention has a sliding window"
    KV_CACHE_DTYPE = "the KV cache is quantised"
    ATTENTION_BACKEND = "the attention backend's metadata cannot be cut"
    ROUTED_EXPERTS = "the experts that tokens are routed to are recorded as whole steps route them"
    RUNNER = "vLLM's model runner has no hook"
    BREAKABLE_GRAPHS = "VLLM_USE_BREAKABLE_CUDAGRAPH runs prefill in graphs of its own"
    BATCH_INVARIANT = "VLLM_BATCH_INVARIANT asks for vLLM's own kernels"
    LAYERS = "a layer is not what the walk knows"
    QUANTISATION = "a linear layer's quantisation cannot run un-reduced"
    VOCABULARY = "the embedding has added tokens or weights of its own kind"
    SETUP = "its buffers or its planner could not be set up"
    TRANSPORT = "the GPUs do not reach each other's memory"
    SLOWER_COLLECTIVE = "vLLM's all-reduce and norm were faster than the fused collective"

    # A step.
    WHOLE_GRAPH = "vLLM replays a graph of its own that is the whole step"
    DUMMY = "a dummy run"
    DECODES = "all requests decode: attention has a kernel for that alone"
    LONG_CONTEXT = "a long context, and too few rows beside it to fill the GPU without splitting it"
    PLANNER = "the planner expects no gain"
    CACHE_GROUPS = "layers have different kinds of cache"
    INPUT_EMBEDS = "the inputs are embeddings"
    NEW_BUCKET = "a step of a size that came rarely so far: no graph is made yet, and stock is the fastest without"
    EAGER_SLOWER = "too few rows to run without a graph"
    # No cut, but the step may still be fused.
    PREFIX_HAZARD = "a request reads cache blocks that a later row of the same step writes"
    # Anything that went wrong.
    ERROR = "an error: vLLM goes on without TokenWeave"

    def __str__(self) -> str:
        return self.name.lower()
