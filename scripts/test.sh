#!/usr/bin/env bash
# Run the tests. Sets up the Python environment first if necessary (see scripts/setup_env.sh).
#
#   scripts/test.sh                 all tests, and the tests of the casts again with torchao 0.17
#   scripts/test.sh PYTEST_ARGS     pytest with these arguments
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

setup_env dev
cd "$ROOT"
# pytest runs one test per core. More threads would only wait for each other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

"$PYTHON" -m pytest -n auto "$@"
if [ $# -gt 0 ]; then exit; fi

# The oldest supported torchao, whose prototype modules have other names, beside the installed torchao.
old_torchao="$VENV/torchao-0.17"
if [ ! -e "$old_torchao/installed" ]; then
    "$PYTHON" -m pip install -qq --no-deps --upgrade --target "$old_torchao" 'torchao==0.17.*'
    touch "$old_torchao/installed"
fi
PYTHONPATH="$old_torchao${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" -m pytest -n auto -m torchao
