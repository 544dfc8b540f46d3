#!/bin/sh
# Makes a virtual environment with this project in it: make_venv.sh FOLDER WHAT PYTHON TORCH
# e.g. make_venv.sh .venv-test '.[test]' python3 torch==2.13.0. Safe to repeat; FOLDER/.ready is written last.
set -eu
folder=$1 what=$2 python=$3 torch=$4

fail() {
    echo "make_venv: $1" >&2
    exit 1
}

command -v "$python" >/dev/null || fail "no $python here; install Python 3.10 or newer, or say make PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$python is $("$python" -V 2>&1); Python 3.10 or newer is needed: make PYTHON=/path/to/python3"
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$python has no venv or pip; install them (Debian and Ubuntu: apt-get install python3-venv)"

echo "$folder: creating it with $("$python" -V 2>&1)"
"$python" -m venv "$folder"
suitable='import sys, torch; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))'
if ! "$folder/bin/python" -c "$suitable" 2>/dev/null; then
    # In a call of its own, so that nothing else's "torch" decides which build comes.
    echo "$folder: installing $torch"
    # shellcheck disable=SC2086  # options may follow the name
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check $torch
fi
echo "$folder: installing $what"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check -e "$what"
touch "$folder/.ready"
