"""The dtypes that kernels compute with, by torch's names."""

DTYPES = {"bfloat16": 0, "float16": 1, "float32": 2}
"""As ``enum Dtype`` of ``csrc/numeric.cuh`` numbers them."""

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
