# Sourced by the other scripts. Defines ROOT (this checkout) and setup_env, which sets PYTHON to the Python to use.
#
#   setup_env       install the packages for training
#   setup_env dev   install the packages for training and tests
#
# If the active environment already has mxtrain and its dependencies, it is used with this checkout's code. Otherwise
# .venv is created on first use, and updated when pyproject.toml changes. In between, a start costs two short
# processes. Environment variables:
#
#   MXTRAIN_TITAN             0.3: TorchTitan 0.3.0 with PyTorch 2.14, in .venv-titan03 (default: 0.2.2, in .venv)
#   PYTHON                    interpreter for the environment, 3.11 or later (default: the first one on PATH)
#   MXTRAIN_TORCH_INDEX_URL   package index for torch, for example PyTorch's own for CPU builds or for another CUDA
#                             version (default: pip's index)

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
case "${MXTRAIN_TITAN:-0.2}" in
0.2) TITAN=titan02 VENV="$ROOT/.venv" ;;
0.3) TITAN=titan03 VENV="$ROOT/.venv-titan03" ;;
*)
    echo "mxtrain: error: MXTRAIN_TITAN = '$MXTRAIN_TITAN' is not a release: allowed are 0.2 and 0.3" >&2
    exit 2
    ;;
esac

setup_env() {
    local extra="${1:-}"
    if active_environment_holds_mxtrain "$extra"; then
        PYTHON="$(command -v python3)"
        export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
        return
    fi
    if ! is_installed "$extra"; then
        # One installation at a time. The lock is released before training starts from this shell.
        exec 9<"$ROOT/pyproject.toml"
        if command -v flock >/dev/null; then flock 9; fi
        if ! is_installed "$extra"; then install "$extra" 9<&-; fi
        exec 9<&-
    fi
    PYTHON="$VENV/bin/python"
}

say() { echo "mxtrain: $*" >&2; }

die() {
    say "error: $*"
    exit 1
}

active_environment_holds_mxtrain() {
    local packages="mxtrain torch torchtitan torchao"
    if [ "$1" = dev ]; then packages="$packages pytest pytest-xdist hypothesis ruff mypy pyright"; fi
    # From /, because an editable installation leaves metadata in the checkout that every Python finds there.
    [ "${VIRTUAL_ENV:-}" != "$VENV" ] && (cd / && python3 - $packages) >/dev/null 2>&1 <<'PYTHON_CODE'
import os, sys
from importlib.metadata import version

for package in sys.argv[1:]:
    version(package)
sys.exit(not version("torchtitan").startswith(os.environ.get("MXTRAIN_TITAN", "")))
PYTHON_CODE
}

# The stamp is written last. It records what the installation depends on: ROOT's path, and pyproject.toml.
stamp() { echo "$ROOT $(cksum <"$ROOT/pyproject.toml")"; }

is_installed() { [ "$(cat "$VENV/installed${1:+-$1}" 2>/dev/null)" = "$(stamp)" ]; }

install() {
    local extra="$1" started=$SECONDS
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    if ! is_python_new_enough "$VENV/bin/python"; then make_venv; fi
    install_torch
    say "installing mxtrain and its dependencies (a few minutes)"
    venv_pip install -qq --editable "$ROOT[$TITAN${extra:+,$extra}]"
    stamp >"$VENV/installed"
    if [ -n "$extra" ]; then stamp >"$VENV/installed-$extra"; fi
    say "set up in $((SECONDS - started)) s; for the command mxtrain in your shell: source $(printf %q "$VENV")/bin/activate"
}

venv_pip() { "$VENV/bin/python" -m pip "$@"; }

is_python_new_enough() { "$1" -c "import sys; sys.exit(sys.version_info < (3, 11))" >/dev/null 2>&1; }

make_venv() {
    local python candidates=(python3 python3.13 python3.12 python3.11 python)
    if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
    for python in "${candidates[@]}"; do
        if is_python_new_enough "$python"; then
            say "making $VENV with $("$python" --version)"
            "$python" -m venv --clear "$VENV" ||
                die "'$python -m venv' failed; on Debian and Ubuntu it is in the package python3-venv"
            return
        fi
    done
    die "Python 3.11 or later is needed, but ${PYTHON:-python3} is" \
        "$("${PYTHON:-python3}" --version 2>/dev/null || echo missing); install one, or name it: PYTHON=/path/to/python3"
}

# The releases of a package that pyproject.toml allows with this TorchTitan, such as torch>=2.11,<2.14. An extra, which
# comes last, says more than the dependencies.
requirement() { sed -nE "s/^( *|$TITAN = .*)\"($1[<>=][^\"]*)\".*/\2/p" "$ROOT/pyproject.toml" | tail -n 1; }

# The oldest release that pyproject.toml allows, such as 2.11.
oldest() { requirement "$1" | sed 's/.*>=\([0-9.]*\).*/\1/'; }

# The newest CPU build of torch that pip finds by name, such as 2.13.0+cpu. Empty if there is none.
cpu_build() { venv_pip index versions torch 2>/dev/null | grep -o '[0-9.]*+cpu' | head -n 1 || true; }

# With a GPU, torch is installed together with the other packages, so that pip picks the matching Triton. Without a GPU,
# torch is installed first: a CPU build, although a CUDA build may be newer. If there is none, a warning precedes the
# download of a CUDA build, which is useless there.
install_torch() {
    local requirement planned build
    requirement="$(requirement torch)"
    if [ -n "${MXTRAIN_TORCH_INDEX_URL:-}" ]; then
        say "installing $requirement from MXTRAIN_TORCH_INDEX_URL"
        venv_pip install -qq --index-url "$MXTRAIN_TORCH_INDEX_URL" "$requirement"
    elif [[ "$(nvidia-smi -L 2>/dev/null)" != *"GPU 0"* ]]; then
        # An older pip downloads whole packages to read their dependencies.
        "$VENV/bin/python" -c 'import pip, sys; sys.exit([int(n) for n in pip.__version__.split(".")[:2]] < [23, 3])' ||
            venv_pip install -qq --upgrade pip
        build="$(cpu_build)"
        if [ -n "$build" ] && venv_pip install --dry-run "$requirement,==$build" >/dev/null 2>&1; then
            requirement="$requirement,==$build"
        fi
        planned="$(venv_pip install --dry-run "$requirement" 2>/dev/null | grep '^Would install ' || true)"
        if [[ "$planned" == *" nvidia-"* || "$planned" == *" cuda-"* ]]; then
            say "this machine has no NVIDIA GPU, but pip's index offers only a CUDA build of torch: several gigabytes."
            say "To avoid them, stop now and set MXTRAIN_TORCH_INDEX_URL to PyTorch's package index for CPU builds."
            if [ -t 0 ]; then sleep 10; fi
        fi
        say "installing $requirement"
        venv_pip install -qq "$requirement"
    fi
}
