"""vLLM with and without TokenWeave: ``tokenweave bench vllm``."""
