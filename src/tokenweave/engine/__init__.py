"""A small real engine: continuous batching, chunked prefill, sampling, and the rank processes."""
