"""What differs between versions of vLLM: a module a range, chosen once by :mod:`tokenweave.integrations.vllm.switch`."""
