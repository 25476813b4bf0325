#!/usr/bin/env bash
# Run the tests. Sets up the Python environment first if necessary (see scripts/setup_env.sh).
#
#   scripts/test.sh                 all tests
#   scripts/test.sh PYTEST_ARGS     pytest with these arguments
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

setup_env dev
cd "$ROOT"
# pytest runs one test per core. More threads would only wait for each other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

exec "$PYTHON" -m pytest -n auto "$@"
