"""What ``tokenweave doctor`` knows: what a machine has, and what the vLLM plugin would do with a model on it."""
