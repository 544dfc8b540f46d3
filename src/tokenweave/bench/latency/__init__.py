"""Prefill steps of a whole model in every mode: ``tokenweave bench latency``."""
